"""What one device computes for each instruction, in numpy, one file per family."""
