"""Optimizers for parameters and moments of 16 and 8 bits; `mpjax.optim` exports them."""
