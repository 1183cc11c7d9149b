"""The emitters of instructions in numpy, one file for each family."""
