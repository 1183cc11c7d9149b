"""Writing: the instructions of a program, block by block."""
