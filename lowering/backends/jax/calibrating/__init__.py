"""Calibrating: measures operations and collectives on the devices at hand."""
