"""Elementwise operations, and how their operands broadcast by name."""
