"""Says what was decided of a function, and why."""
