"""Policies: which dtype parameters, products and results have; by path, by name, by recipe."""
