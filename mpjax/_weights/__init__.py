"""Weights in 8 bits, stored so for inference."""
