"""A job's training step: as a program, with flags that a search chooses; tables of pipelines."""
