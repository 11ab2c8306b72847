"""Counts inf and NaN in an array, and finds its largest finite magnitude, from its bits.

In integers, for two reasons. XLA:CPU's maximum of a large array ignores NaN, so a maximum of
floating values cannot say that there is one. And XLA deletes a rounding whose result it widens
again (`xla_allow_excess_precision`); it deletes none whose result is read as bits.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mpjax._base import compat

_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}


def as_floating(x: Any) -> Any:
    """Returns `x` as a real array: a complex one as its two parts, an 8-bit one in float32."""
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.stack([x.real, x.imag])
    return x.astype(jnp.float32) if x.dtype.itemsize == 1 else x


def magnitude_bits(x: jax.Array) -> jax.Array:
    """Returns the bits of |x|: larger for larger values, inf above them, NaN above inf."""
    unsigned = _UNSIGNED[x.dtype.itemsize]
    bits = lax.bitcast_convert_type(x, unsigned)
    return bits & unsigned(jnp.iinfo(unsigned).max >> 1)


def infinity_bits(dtype: Any) -> int:
    """Returns the bits of inf."""
    info = jnp.finfo(dtype)
    return ((1 << int(info.nexp)) - 1) << int(info.nmant)


@jax.jit  # traced and lowered once for values of the same types, of which there are many
def counts(*values: Any) -> jax.Array:
    """Returns the numbers of inf and of NaN, and the largest finite magnitude, of each array.

    One pass over all of them, and one kernel to compile.

    Args:
      *values: arrays of one shape.

    Returns:
      f32[values, 3]; the counts are exact up to 2²⁴. What is largest in a float64 array is
      at most float32's largest number here.
    """
    return compat.unplaced(_counts, *values)


def _counts(*values: Any) -> jax.Array:
    real = [as_floating(x) for x in values]
    shape = real[0].shape
    if real[0].size == 0:
        return jnp.zeros((len(real), 3), jnp.float32)
    parts = [part for x in real for part in read(x)]
    joins = [lax.max if is_max else lax.add for _, is_max in parts]
    reduced = lax.reduce(
        tuple(part for part, _ in parts),
        tuple(part.dtype.type(0) for part, _ in parts),
        lambda a, b: tuple(join(x, y) for join, x, y in zip(joins, a, b, strict=True)),
        tuple(range(len(shape))),
    )
    rows = [_row(x.dtype, *reduced[3 * i : 3 * i + 3]) for i, x in enumerate(real)]
    return jnp.stack(rows)


def read(x: jax.Array) -> tuple[tuple[jax.Array, bool], ...]:
    """Returns the arrays to reduce, each with whether by its maximum or by its sum."""
    bits = magnitude_bits(x)
    infinity = bits.dtype.type(infinity_bits(x.dtype))
    nothing = bits.dtype.type(0)
    return (
        ((bits == infinity).astype(jnp.uint32), False),
        ((bits > infinity).astype(jnp.uint32), False),
        (jnp.where(bits < infinity, bits, nothing), True),
    )


def _row(dtype: Any, infs: jax.Array, nans: jax.Array, largest: jax.Array) -> jax.Array:
    amax = lax.bitcast_convert_type(largest, dtype).astype(jnp.float32)
    amax = jnp.minimum(amax, float(jnp.finfo(jnp.float32).max))  # of a float64 array
    return jnp.stack([infs.astype(jnp.float32), nans.astype(jnp.float32), amax])
