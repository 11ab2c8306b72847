"""Runs a plan: binds every equation again, each value in its decided dtype."""
