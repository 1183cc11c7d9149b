"""Runs: what runs of `train` have reported, side by side, as a table, as JSON and as curves."""
