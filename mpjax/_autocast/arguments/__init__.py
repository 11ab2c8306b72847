"""The arguments of a function: modules with arrays in them, parameters and their paths."""
