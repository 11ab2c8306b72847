"""Finds values that a program computes several times, so that all copies are rounded alike."""
