"""Policies on Flax modules: Linen's and NNX's."""
