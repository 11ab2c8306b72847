"""What every folder stands on: JAX's seams, messages, dtypes, trees of arrays, tables."""
