"""Running: functions compiled, called, and checked; operations that run at once."""
