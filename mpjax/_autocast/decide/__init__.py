"""Decides which values of a program are low. It knows nothing of speed."""
