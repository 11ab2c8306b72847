"""Transformer Engine's statistics of one array, in one pass over its bits."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mpjax._base.typing import Array
from mpjax.numerics import _bits

STATISTICS = ("amax", "l2_norm", "dynamic_range", "underflows%", "overflows%")
"""The statistics of a module, f32[] each, under Transformer Engine's names."""


class Reading(NamedTuple):
    """The statistics of an array, f32[] each; those of several join by maximum, minimum and sum."""

    largest: Array  # finite magnitude, 0 where there is none
    smallest: Array  # magnitude that is not 0, inf where there is none
    square: Array  # the sum of squares of what is finite
    used: Array  # the number of values that are not 0
    under: Array  # of them, those that a dtype would round to 0
    over: Array  # and the finite ones that it would round to inf


def named(reads: list[Reading], scale: Array | None = None) -> dict[str, Array]:
    """Returns the statistics of some reads together, of values divided by a scale."""
    largest, smallest, square, used, under, over = (
        jnp.stack(column) for column in zip(*reads, strict=True)
    )
    amax, amin, count = jnp.max(largest), jnp.min(smallest), jnp.maximum(jnp.sum(used), 1)
    seen = amax > 0
    bits = jnp.log2(jnp.where(seen, amax, 1)) - jnp.log2(jnp.where(seen, amin, 1))
    norm = jnp.sqrt(jnp.sum(square))
    if scale is not None:
        amax, norm = amax / scale, norm / scale
    share = 100 / count
    numbers = (amax, norm, bits, jnp.sum(under) * share, jnp.sum(over) * share)
    return dict(zip(STATISTICS, numbers, strict=True))


@functools.partial(jax.jit, static_argnums=1)  # traced once for arrays of the same types
def read(value: Any, dtype: Any) -> Reading:
    """Returns the statistics of an array, held against a dtype.

    On bits, so that neither XLA's excess precision nor its flushing of subnormal numbers matters.
    """
    x = value.astype(jnp.float32)
    bits = _bits.magnitude_bits(x)
    infinity = np.uint32(_bits.infinity_bits(jnp.float32))
    finite = bits < infinity
    not_zero = bits > 0
    zero_below, inf_above = limits(dtype)
    columns = (
        (jnp.where(finite, bits, np.uint32(0)), np.uint32(0), lax.max),
        (jnp.where(not_zero, bits, infinity), infinity, lax.min),
        (jnp.square(jnp.where(finite, x, 0)), np.float32(0), lax.add),
        (not_zero.astype(jnp.uint32), np.uint32(0), lax.add),
        ((not_zero & (bits <= zero_below)).astype(jnp.uint32), np.uint32(0), lax.add),
        ((finite & (bits >= inf_above)).astype(jnp.uint32), np.uint32(0), lax.add),
    )
    operands, starts, joins = zip(*columns, strict=True)
    largest, smallest, square, *counts = lax.reduce(  # one pass, which keeps nothing
        operands,
        starts,
        lambda a, b: tuple(join(x, y) for join, x, y in zip(joins, a, b, strict=True)),
        tuple(range(x.ndim)),
    )
    ends = [lax.bitcast_convert_type(end, jnp.float32) for end in (largest, smallest)]
    used, under, over = (c.astype(jnp.float32) for c in counts)
    return Reading(ends[0], ends[1], square, used, under, over)


def limits(dtype: Any) -> tuple[np.uint32, np.uint32]:
    """Returns the float32 bits of the largest value that rounds to 0, and the least to inf."""
    if dtype.itemsize >= 4:
        return np.uint32(0), np.uint32(_bits.infinity_bits(jnp.float32))
    info = jnp.finfo(dtype)
    half_of_least = np.float64(info.smallest_subnormal) / 2
    largest = np.float64(info.max)
    # Half a unit above the largest number: from there on, rounding gives inf.
    beyond = largest + 2.0 ** (np.floor(np.log2(largest)) - info.nmant - 1)
    ends = np.array([half_of_least, min(beyond, np.inf)]).astype(np.float32).view(np.uint32)
    return np.uint32(ends[0]), np.uint32(ends[1])
