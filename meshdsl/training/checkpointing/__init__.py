"""Checkpoints and weights: what a run keeps, where, and how it is known to be undamaged."""
