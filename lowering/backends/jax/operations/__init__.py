"""The emitters of instructions in JAX, one file for each family."""
