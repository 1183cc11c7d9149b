"""Supervisors: start the processes of a job on a host, and start them again after a failure."""
