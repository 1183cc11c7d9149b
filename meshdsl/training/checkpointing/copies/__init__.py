"""Copies of the state in the memory of hosts, for restarts on the hosts that are left."""
