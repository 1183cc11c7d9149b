"""Precision: the dtypes in which products are computed, by rules, kept out of the models."""
