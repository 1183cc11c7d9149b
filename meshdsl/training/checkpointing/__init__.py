"""Checkpoints and weights: saving and reading them, and checking that they are undamaged."""
