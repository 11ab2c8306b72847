"""Attention by XLA's operations, for operands of any dtype: products in it, softmax in float32."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mpjax._autocast import product
from mpjax._autocast.attention.program import LEAST, Operands, Spec

_BATCH, _KEYS = (0, 2), (3,)  # axes of [batch, time, heads, ...]


def form(operands: Operands, spec: Spec) -> tuple[Any, Any]:
    """Returns the result, [batch, queries, heads, size], and the logarithm of each row's sum.

    Keys that a row may not read get a logit of -0.7 times the largest number, as `jax.nn` has it:
    a row without keys gives the mean of all values.
    """
    batch, heads, queries, keys = operands.sizes
    shared, dtype = operands.key.shape[2], operands.query.dtype
    wide = max(dtype, jnp.dtype(jnp.float32), key=lambda d: d.itemsize)
    query = operands.query.reshape(batch, queries, shared, heads // shared, -1)
    # [batch, key heads, queries, group, keys]
    logits = _product(query, operands.key, (((4,), (3,)), (_BATCH, _BATCH)), wide)
    logits = logits.transpose(0, 1, 3, 2, 4).reshape(batch, heads, queries, keys)
    logits = read(logits, operands, spec)
    rows = jax.nn.logsumexp(logits, axis=-1).astype(jnp.float32)
    weights = jax.nn.softmax(logits, axis=-1).astype(dtype)
    weights = weights.reshape(batch, shared, heads // shared, queries, keys)
    # [batch, key heads, group, queries, size]
    out = _product(weights, operands.value, (((4,), (1,)), ((0, 1), _BATCH)), wide)
    out = out.transpose(0, 3, 1, 2, 4).reshape(batch, queries, heads, -1)
    return out.astype(dtype), lax.stop_gradient(rows)


def read(logits: Any, operands: Operands, spec: Spec) -> Any:
    """Returns what the softmax reads, of products of queries and keys: scaled, biased and masked.

    Args:
      logits: [batch, heads, queries, keys], in the dtype to compute in.
      operands: their bias and masks.
      spec: their scale and band.
    """
    logits = logits * jnp.asarray(spec.scale, logits.dtype)
    if operands.bias is not None:
        logits = logits + operands.bias.astype(logits.dtype)
    mask = _mask(operands, spec)
    return logits if mask is None else jnp.where(mask, logits, jnp.asarray(LEAST, logits.dtype))


def _mask(operands: Operands, spec: Spec) -> Any:
    """Returns the mask of the keys that each row reads, or None for all of them."""
    _, _, queries, keys = operands.sizes
    masks = [operands.mask, spec.band(queries, keys)]
    if operands.lengths is not None:
        masks.append(jnp.arange(keys) < operands.lengths[:, None, None, None])
    given = [x for x in masks if x is not None]
    return functools.reduce(jnp.logical_and, given) if given else None


def _product(x: Any, y: Any, dims: Any, wide: Any) -> Any:
    if x.dtype.itemsize >= wide.itemsize:
        return lax.dot_general(x, y, dims, preferred_element_type=wide)
    params = {"dimension_numbers": dims, "preferred_element_type": wide, "precision": None}
    how = product.low(x.dtype)
    return product.product("dot_general", params, (x, x), (y, y), [], how=how, out_dtype=wide)
