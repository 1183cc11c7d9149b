"""What one device computes for each instruction, in JAX, one file per family."""
