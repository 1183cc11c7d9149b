"""Placement: where tensors are kept, and where partial sums are reduced."""
