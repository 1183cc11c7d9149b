"""Checks of schedules: `checking.check` proves one right, or names the first wrong action."""
