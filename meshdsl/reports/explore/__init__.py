"""Explore: many plans of one training step, computed ahead, as one page."""
