"""The base of every folder: seams between JAX versions, messages, dtypes, trees, tables."""
