"""Arranges the equations of a program in groups and steps, in the order in which they run."""
