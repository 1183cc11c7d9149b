"""Tracing: how a Python function becomes a graph, and how a graph reads."""
