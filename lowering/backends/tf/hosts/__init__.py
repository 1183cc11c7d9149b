"""Programs on host devices, CPUs and GPUs, of one process or several."""
