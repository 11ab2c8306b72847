"""Products of float8 values with a scale for each block along the contracted axis, as in MXFP8.

Scales are powers of two, rounded up (rounded down, as in the first version of the standard,
training diverges). `jax.lax.scaled_dot` takes the 8-bit values and their scales: a GPU with units
for it multiplies them directly. Elsewhere the product is one of bfloat16, in which each value times
its scale is exact.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mpjax._autocast.product.scaled import absolute_maximum, largest, rounded

_MANTISSA = 0x7FFFFF  # the bits of float32 below its exponent


def block_product(x: jax.Array, y: jax.Array, dims: Any, dtypes: Any, size: int) -> jax.Array:
    """Returns the float32 product of two arrays, each quantised by blocks of `size`.

    Args:
      x, y: floating operands.
      dims: as `dot_general` takes them; the contracted length is a multiple of `size`.
      dtypes: float8, of both operands.
      size: how many neighbours along the contracted axis share a scale.
    """
    contracted, batch = dims
    operands = []
    for array, dtype, summed, batched in zip((x, y), dtypes, contracted, batch, strict=True):
        operands.append(_by_blocks(_in_order(array, summed, batched), dtype, size))
    (x_values, x_scale), (y_values, y_scale) = operands
    out = lax.scaled_dot(
        x_values,
        y_values,
        lhs_scale=x_scale,
        rhs_scale=y_scale,
        dimension_numbers=(((2,), (2,)), ((0,), (0,))),
        preferred_element_type=jnp.float32,
    )
    free = [
        [array.shape[i] for i in range(array.ndim) if i not in (*summed, *batched)]
        for array, summed, batched in zip((x, y), contracted, batch, strict=True)
    ]
    return out.reshape(*(x.shape[i] for i in batch[0]), *free[0], *free[1])


def _in_order(x: jax.Array, summed: Any, batched: Any) -> jax.Array:
    """Returns an operand as [batch, free, contracted]."""
    free = [i for i in range(x.ndim) if i not in (*summed, *batched)]
    shape = [math.prod(x.shape[i] for i in axes) for axes in (batched, free, summed)]
    return lax.transpose(x, (*batched, *free, *summed)).reshape(shape)


def _by_blocks(x: jax.Array, dtype: Any, size: int) -> tuple[jax.Array, jax.Array]:
    """Returns [batch, free, contracted] in 8 bits, and a scale for each block of the last axis."""
    batch, free, count = x.shape
    blocks = x.reshape(batch, free, count // size, size)
    amax = absolute_maximum(blocks, (3,))
    scale = _power_of_two(amax / largest(dtype))
    values = rounded(blocks, scale, dtype).reshape(x.shape)
    return values, scale[..., 0].astype(jnp.float8_e8m0fnu)


def _power_of_two(x: jax.Array) -> jax.Array:
    """Returns the least power of two that is not less, within the scale's range; 1 for 0.

    Computed from the bits: a logarithm is not exact, and rounds some powers of two up to the next.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32)
    up = lax.bitcast_convert_type((bits + _MANTISSA) & ~_MANTISSA, jnp.float32)
    usable = jnp.isfinite(x) & (x > 0)
    return jnp.where(usable, jnp.clip(up, 2.0**-120, 2.0**120), 1.0)
