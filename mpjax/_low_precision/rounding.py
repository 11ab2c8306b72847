"""Rounding that no compiler deletes: float32 values onto the grid of a narrower dtype.

XLA's compilers for GPUs delete a cast to 16 bits and back, unless the narrow value is stored in
between. They do not delete the operations used here: `lax.reduce_precision`, integer arithmetic on
the bits, and rounding to whole numbers. Results are float32 values that the narrow dtype holds
exactly, so that a cast which follows can be done, deleted or delayed without changing a bit.
"""

import functools
import math

import jax
import jax.numpy as jnp

from mpjax._base.dtypes import FLOAT32, DType
from mpjax._base.typing import Array

TINY = 2.0**-126
"""Least normal float32: smaller values are 0 on GPUs, on TPUs and for XLA:CPU."""


def is_narrow(dtype: DType) -> bool:
    """Whether it is one of the two 16-bit dtypes."""
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 2


def nearest(x: Array, dtype: DType) -> Array:
    """Returns float32 values rounded to the nearest of a 16-bit dtype, ties to even, in float32."""
    info = jnp.finfo(dtype)
    rounded = jax.lax.reduce_precision(x, info.nexp, info.nmant)
    if info.minexp <= -126:
        return rounded
    # reduce_precision makes float16's subnormal values 0; these are rounded to multiples of 2⁻²⁴.
    step = 2.0 ** (int(info.minexp) - int(info.nmant))
    fine = jax.lax.round(x * (1 / step), jax.lax.RoundingMethod.TO_NEAREST_EVEN) * step
    return jnp.where(jnp.abs(x) < 2.0 ** int(info.minexp), fine, rounded)


def stochastic(x: Array, dtype: DType, random: Array) -> Array:
    """Returns float32 values rounded up or down, each with a chance by which the mean is exact.

    Args:
      x: f32[...]; what the dtype holds exactly stays, whatever the chance.
      dtype: a floating dtype with at most 10 explicit bits of significand.
      random: u32[...], of which the upper bits are used.

    Returns:
      f32[...]; past the largest value of the dtype, and for inf and NaN, the nearest.
    """
    info = jnp.finfo(dtype)
    dropped = 23 - int(info.nmant)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    up = (bits + (random >> (32 - dropped))) & jnp.uint32(2**32 - 2**dropped)
    rounded = jax.lax.bitcast_convert_type(up, FLOAT32)
    if info.minexp > -126:  # float16: below its least normal value, values are equally spaced
        step = 2.0 ** (int(info.minexp) - int(info.nmant))
        chance = (random >> 19).astype(FLOAT32) * 2.0**-13  # the sum below is exact: 23 bits
        fine = jnp.floor(jnp.abs(x) * (1 / step) + chance) * step
        below = jnp.abs(x) < 2.0 ** int(info.minexp)
        rounded = jnp.where(below, jnp.copysign(fine, x), rounded)
    largest = float(info.max)
    beyond = ~(jnp.abs(x) < largest)  # inf, and NaN, which compares false
    return jnp.where(beyond, _beyond(x, dtype, largest), rounded)


def _beyond(x: Array, dtype: DType, largest: float) -> Array:
    if is_narrow(dtype):
        return nearest(x, dtype)
    return jnp.where(jnp.isnan(x), x, jnp.clip(x, -largest, largest))


# Compiled as one program when an optimizer's state is made outside of jit; inlined inside it.
@functools.partial(jax.jit, static_argnums=0, inline=True)
def scattered(shape: tuple[int, ...], count: Array, salt: int) -> Array:
    """Returns u32[shape] that look random: of the place, a step's count and a leaf's number.

    A hash and no generator: a dozen integer operations that fuse with what follows, the same on
    every backend and under every sharding, nothing to carry along.

    References:
      Hash function prospecting, https://nullprogram.com/blog/2018/07/31/
    """
    place = jnp.full(shape, count.astype(jnp.uint32) * jnp.uint32(0x9E3779B1))
    place = place ^ jnp.uint32(salt)
    for axis, size in enumerate(shape):
        stride = math.prod(shape[axis + 1 :]) % 2**32
        if size > 1:
            index = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
            place = place + index * jnp.uint32(stride)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        place = (place ^ (place >> shift)) * jnp.uint32(factor)
    return place ^ (place >> 16)


def land(p: Array, target: Array) -> tuple[Array, Array]:
    """Returns the update from a parameter to a target, and the value that it reaches, in float32.

    `p + update`, rounded to the parameter's dtype, is that value bit for bit: it is the target,
    or, if the two differ by less than float32 can express, the parameter itself. A zero that is
    reached is +0.0.

    Args:
      p: f32[...], the values of a 16-bit parameter.
      target: f32[...], values of that dtype. The difference is exact where the exponents differ by
        at most 16 for bfloat16, 13 for float16, and wherever `target` is the rounded sum of `p`
        (or a float32 value that rounds to `p`) and a float32 number.
    """
    way = target - p
    still = (target == p) | (jnp.abs(way) < TINY)
    # Adding -0.0 leaves a parameter as it is, also one that is -0.0.
    return jnp.where(still, -0.0, way), jnp.where(still, p, jnp.where(target == 0, 0.0, target))
