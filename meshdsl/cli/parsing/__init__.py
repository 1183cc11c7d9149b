"""Parsing: the texts of flags and of configuration files, and the flags that records declare."""
