"""Policies: the dtypes of parameters, products and results; by path, by name, by recipe."""
