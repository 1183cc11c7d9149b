"""The training step of a job: as a program, and with flags whose values a search chooses."""
