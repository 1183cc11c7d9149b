"""The emitters of instructions in TensorFlow, one file for each family."""
