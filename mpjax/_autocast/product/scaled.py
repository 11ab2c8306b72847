"""Operands in 8 bits with scales, and the product of two: quantise, multiply, scale after.

XLA multiplies in 8 bits only operands that are 8-bit themselves: it multiplies values that are
scaled back before the product in 16 bits. So the product is of the 8-bit values, and its result is
scaled.

An inf or NaN in an operand must reach the result, or loss scaling would not notice it. But int8 has
no NaN, clipping turns inf into the largest number, and XLA:CPU's maximum ignores NaN. So the
maximum is taken of the bits of float32, as integers, where inf and NaN are larger than all numbers;
if the maximum is one of these, the scale is NaN.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mpjax._autocast.product.config import Scaling
from mpjax._base.dtypes import FLOAT32
from mpjax._jaxpr.axes import Axes

_LEAST = 2.0**-110  # divided by 57344 it is a normal number still; less is scaled as this is
_LONGEST_INT8 = (2**31 - 1) // 127**2  # products of int8 that int32 can add up


class Quantized(NamedTuple):
    """An array in 8 bits: it is `values * scale`."""

    values: jax.Array
    scale: jax.Array  # f32, of the rank of `values`: 1 along each axis that shares a scale


def largest(dtype: Any) -> float:
    """Returns the largest finite value of an 8-bit dtype: 127 (not -128), 448 or 57344."""
    dtype = jnp.dtype(dtype)
    return 127.0 if dtype == jnp.int8 else float(jnp.finfo(dtype).max)


def absolute_maximum(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Returns the largest magnitude over some axes, left as 1; not finite if a value is not."""
    bits = lax.bitcast_convert_type(jnp.abs(x.astype(FLOAT32)), jnp.int32)
    return lax.bitcast_convert_type(jnp.max(bits, axis=axes, keepdims=True), FLOAT32)


def scale_of(amax: jax.Array, dtype: Any, margin: int) -> jax.Array:
    """Returns the scale for a maximum, `amax / largest`: 1 for 0, NaN if it is not finite."""
    used = largest(dtype) * 2.0**-margin
    scale = jnp.where(amax == 0, 1.0, jnp.maximum(amax, _LEAST) / used)
    return jnp.where(jnp.isfinite(amax), scale, jnp.nan).astype(FLOAT32)


def rounded(x: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    """Returns an array in 8 bits: divided by its scale, clipped, rounded to the nearest."""
    clipped = _clipped(x.astype(FLOAT32), scale, dtype)
    if dtype == jnp.int8:
        clipped = jnp.round(clipped)
    return clipped.astype(dtype)


def _clipped(x: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    top = largest(dtype)
    # e4m3 has no infinity: a value above 448 would be NaN.
    return jnp.clip(x / scale, -top, top)


def quantize(x: jax.Array, dtype: Any, axes: tuple[int, ...], margin: int = 0) -> Quantized:
    """Returns an array in 8 bits.

    Args:
      x: floating values.
      dtype: int8, float8_e4m3fn or float8_e5m2.
      axes: those along which values share a scale.
      margin: bits of headroom above the largest value.
    """
    scale = scale_of(absolute_maximum(x, axes), dtype, margin)
    return Quantized(rounded(x, scale, dtype), scale)


def quantize_delayed(x: jax.Array, amax: jax.Array, dtype: Any, margin: int = 0) -> Quantized:
    """Returns an array in float8 with the scale of the maximum of earlier steps.

    Args:
      x: floating values; larger ones are clipped, inf and NaN become NaN.
      amax: f32[], 0 if none is known yet: then the scale is 1.
      dtype: float8_e4m3fn or float8_e5m2.
      margin: bits of headroom above `amax`.
    """
    scale = scale_of(amax.reshape((1,) * x.ndim), dtype, margin)
    wide = x.astype(FLOAT32)
    # `wide * 0` is NaN for inf and NaN, else 0. A `where(isfinite)` would cost XLA:GPU a pass.
    values = _clipped(wide, scale, dtype) + wide * 0
    return Quantized(values.astype(dtype), scale)


def shared_axes(axes: Axes, operand: int, scaling: Scaling) -> tuple[int, ...]:
    """Returns the axes of an operand along which a scale is shared.

    A scale can be factored out of a product only along an axis that the result has.
    """
    places = ((axis[operand], _has_scales(axis, operand, scaling)) for axis in axes)
    return tuple(place for place, has_scales in places if place is not None and not has_scales)


def _has_scales(axis: Any, operand: int, scaling: Scaling) -> bool:
    if axis.result is None or axis[operand] is None:
        return False
    is_batch = axis.first is not None and axis.second is not None
    return axis.mapped or is_batch or scaling.granularity != "tensor"


def is_usable(stored: Any, axes: Axes, operand: int, dtype: Any) -> bool:
    """Whether stored 8-bit values can be multiplied: no scale varies along a contracted axis."""
    values, scale = stored
    summed = [a[operand] for a in axes if a.result is None]
    return values.dtype == dtype and all(i is None or scale.shape[i] == 1 for i in summed)


def as_result(scale: jax.Array, axes: Axes, operand: int, ndim: int) -> jax.Array:
    """Returns the scales of an operand, to multiply the result of the product by."""
    result_axes = {a[operand]: a.result for a in axes if a.result is not None}
    pairs = sorted((result_axes[i], i) for i in range(scale.ndim) if i in result_axes)
    dropped = tuple(i for i in range(scale.ndim) if i not in result_axes)
    shape = [1] * ndim
    for place, i in pairs:
        shape[place] = scale.shape[i]
    places = [i for _, i in pairs]
    order = [sorted(places).index(i) for i in places]
    return lax.transpose(lax.squeeze(scale, dropped), order).reshape(shape)


def marks(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Returns 1 if all values along some axes are finite, and NaN if one is not."""
    return jnp.where(jnp.isfinite(absolute_maximum(x, axes)), 1.0, jnp.nan).astype(FLOAT32)


def fits(axes: Axes, shape: tuple[int, ...], dtype: Any, block_size: int) -> bool:
    """Whether a product can be of 8-bit values: blocks divide its length, int8 sums fit int32.

    Sums of float8 always fit float32. A symbolic length (`jax.export`) is refused for both.
    """
    sizes = [shape[a.first] for a in axes if a.result is None and a.first is not None]
    length = math.prod(sizes)  # how many products are added up in each element
    if not isinstance(length, int):
        return dtype != jnp.int8 and block_size == 1
    return length % block_size == 0 and (dtype != jnp.int8 or length <= _LONGEST_INT8)
