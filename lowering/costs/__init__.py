"""Costs: the arithmetic, the memory and the time of a program on one device."""
