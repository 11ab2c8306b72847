"""The arguments of a function: modules that hold arrays, parameters and their paths."""
