"""Samples that tests compute with, made by NumPy: importing a test file then compiles nothing."""

import jax
import jax.numpy as jnp
import numpy as np


def normal(seed: int, *shape: int, scale: float = 1.0, dtype: jnp.dtype = jnp.float32) -> jax.Array:
    """Returns normal samples, `scale` times those of deviation 1."""
    return jnp.asarray(scale * np.random.default_rng(seed).normal(size=shape), dtype)


def integers(seed: int, below: int, *shape: int) -> jax.Array:
    """Returns integers from 0 to `below`, without it."""
    return jnp.asarray(np.random.default_rng(seed).integers(below, size=shape), jnp.int32)


def chosen(seed: int, share: float, *shape: int) -> jax.Array:
    """Returns truth values, of which about a share is true."""
    return jnp.asarray(np.random.default_rng(seed).random(shape) < share)
