"""Faults of a run's devices and processes that raise no error by themselves."""
