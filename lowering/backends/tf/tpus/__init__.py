"""Programs on the cores of a TPU."""
