"""HLO: what XLA's compilers made of a program, read from the text that they print."""
