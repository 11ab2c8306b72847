"""Says what was decided for a function, and why."""
