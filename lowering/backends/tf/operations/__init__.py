"""What one device computes for each instruction, in TensorFlow, one file per family."""
