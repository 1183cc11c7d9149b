"""The training step of a job: as a program, and with flags that a search finds values for."""
