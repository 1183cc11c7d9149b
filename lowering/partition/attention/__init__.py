"""Partition rules of attention, and the schedules of ring attention."""
