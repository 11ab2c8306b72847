"""Runs a plan: binds every equation again, each value in the form that was decided for it."""
