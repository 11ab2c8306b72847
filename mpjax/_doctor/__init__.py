"""Compares policies for a user's own function: compiled, and by the clock."""
