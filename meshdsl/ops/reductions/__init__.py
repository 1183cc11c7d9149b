"""Reductions, cumulative sums, counts and statistics along dims."""
