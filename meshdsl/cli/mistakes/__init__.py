"""Mistakes of a user on a command line: looked for early, collected, and shown in one error."""
