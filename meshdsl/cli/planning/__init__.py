"""A job's training step as a program; flags that a search chooses; tables of pipelines; pages."""
