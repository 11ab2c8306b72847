"""Codes of 8 bits for moments: blocks along the last axis, each with a scale of its own.

A code is rounded up or down by chance, not to the nearest: from one step to the next a moment moves
by less than the distance of two codes, and rounded to the nearest it would not move at all.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from mpjax._base import compat
from mpjax._base.dtypes import FLOAT32
from mpjax._base.exported import exported
from mpjax._base.typing import Array
from mpjax._low_precision.rounding import TINY, stochastic

FLOAT8 = jnp.dtype(jnp.float8_e4m3fn)
FLOAT8_MAX = 448.0
# A code that is decoded and encoded again must come back, whatever the chance. So a level nearer to
# a code than this is that code: errors of division and roots are some 2⁻¹⁶ of the distance of two.
_SNAP = 2.0**-11


@exported
class FirstMoment(NamedTuple):
    """A moment of either sign in 8 bits."""

    codes: Array  # i8 or f8_e4m3fn, of the parameter's shape
    scales: Array  # f32[..., blocks]


@exported
class SecondMoment(NamedTuple):
    """A moment in 8 bits that is never negative; a value that is not 0 does not become 0."""

    codes: Array  # u8 or f8_e4m3fn, of the parameter's shape
    scales: Array  # f32[..., blocks]


def is_coded(x: Any) -> bool:
    """Whether it is a moment in 8 bits."""
    return isinstance(x, (FirstMoment, SecondMoment))


def block_count(size: int, block_size: int | None) -> int:
    """Returns the number of blocks of a last axis: of equal length, but for the last one."""
    return 1 if block_size is None else max(1, -(-size // block_size))


@functools.partial(jax.jit, static_argnames=("kind", "block_size", "is_second"), inline=True)
def encode(x: Array, kind: str, block_size: int | None, random: Array, *, is_second: bool) -> Any:
    """Returns a moment in 8 bits.

    Args:
      x: f32[..., n], or f64, which is taken in float32.
      kind: "int8" or "float8".
      block_size: the most that share a scale; None for the whole of the last axis.
      random: u32 of the same shape.
      is_second: whether it is never negative; if it is, or not finite, its block becomes NaN.
    """
    x = x.astype(FLOAT32)
    moment: Any = SecondMoment if is_second else FirstMoment

    def out(split: tuple[Any, ...]) -> Any:
        return moment(PartitionSpec(*split), PartitionSpec(*split[:-1], None))

    one = functools.partial(_encoded, kind=kind, block_size=block_size, is_second=is_second)
    return _of_rows(one, out, x, random)


def _of_rows(fun: Any, out: Any, *arrays: Array) -> Any:
    """Returns `fun(*arrays)`, where a mesh with explicit axes may split the rows of the first.

    No type says how blocks are split then: `out` gives the results' specs for that of the first.
    """
    split = compat.partitions(jax.typeof(arrays[0]))
    if not split or split[-1] is None:
        return fun(*arrays)
    return compat.unplaced(fun, *arrays, out=out(split))


def _encoded(x: Array, random: Array, kind: str, block_size: int | None, *, is_second: bool) -> Any:
    blocks = block_count(x.shape[-1], block_size)
    sound = jnp.isfinite(x) & (x >= 0) if is_second else jnp.isfinite(x)
    # A NaN counts as inf here: XLA:CPU's maximum of a large array ignores NaN.
    largest = _largest(jnp.where(sound, jnp.abs(x), jnp.inf), blocks)
    scales = jnp.where(largest == jnp.inf, jnp.nan, largest)
    spread = _spread(scales, x.shape)
    share = jnp.where(spread > 0, jnp.abs(x) / spread, 0.0)
    code = (_whole_code if kind == "int8" else _float_code)(share, random, is_second)
    if is_second:
        least = 1.0 if kind == "int8" else float(jnp.finfo(FLOAT8).smallest_subnormal)
        code = jnp.where(x > 0, jnp.maximum(code, least), 0.0)
        return SecondMoment(code.astype(jnp.uint8 if kind == "int8" else FLOAT8), scales)
    code = jnp.copysign(code, x)
    return FirstMoment(code.astype(jnp.int8 if kind == "int8" else FLOAT8), scales)


@functools.partial(jax.jit, inline=True)
def decode(moment: Any) -> Array:
    """Returns a moment in float32."""
    is_second = isinstance(moment, SecondMoment)
    one = functools.partial(_decoded, is_second=is_second)
    return _of_rows(one, lambda split: PartitionSpec(*split), *moment)


def _decoded(codes: Array, scales: Array, *, is_second: bool) -> Array:
    spread = _spread(scales, codes.shape)
    value = codes.astype(FLOAT32)
    share = shares(codes, is_second=is_second)
    if not is_second:
        share = jnp.copysign(share, value)
    if not is_second:
        return spread * share
    some = jnp.maximum(spread * share, TINY)
    return jnp.where(value > 0, some, jnp.where(jnp.isnan(spread), spread, 0.0))


def shares(codes: Array, *, is_second: bool) -> Array:
    """Returns the share of its block's largest that each code means, without its sign."""
    if codes.dtype == FLOAT8:
        return (_SECOND8 if is_second else _FIRST8).value(jnp.abs(codes.astype(FLOAT32)))
    return (_SECOND if is_second else _FIRST).value(jnp.abs(codes.astype(FLOAT32)))


class _Curve(NamedTuple):
    """The meaning of codes from 0 to `most`: shares of a block's largest, down to exp(-depth).

    The ratio of neighbouring codes grows with the distance from the largest: 3 % apart at the top
    of a first moment, 18 % at a millionth. A power, such as `_Power`, would be finer at the top and
    lose values 10⁵ times smaller, as they are in a block with one column of large outliers.
    """

    most: float
    depth: float

    def level(self, share: Array) -> Array:
        """Returns the code of a share, with fractions."""
        depth = -jnp.log(jnp.maximum(share, TINY))
        return jnp.maximum(self.most * (1 - jnp.log1p(_BEND * depth) / self._whole), 0.0)

    def value(self, code: Array) -> Array:
        """Returns the share that a code means."""
        # Of `most - code`, exactly 0 at the top: the block's largest must come back as it was.
        depth = jnp.expm1((self.most - code) * (self._whole / self.most)) / _BEND
        return jnp.where(code > 0, jnp.exp(-depth), 0.0)

    @property
    def _whole(self) -> float:
        return math.log1p(_BEND * self.depth)


_BEND = 0.6
# The gradients of a block may be 10⁶ apart, their squares 10¹², and each varies by itself.
_FIRST, _SECOND = _Curve(127, math.log(1e8)), _Curve(255, math.log(1e14))


class _Power(NamedTuple):
    """The meaning of a float8 code, as a share of a block's largest: `(code / 448) ** exponent`."""

    exponent: float

    def level(self, share: Array) -> Array:
        """Returns the number that is to be rounded to float8."""
        return FLOAT8_MAX * share ** (1 / self.exponent)

    def value(self, code: Array) -> Array:
        """Returns the share that a code means."""
        return (code / FLOAT8_MAX) ** self.exponent


_FIRST8, _SECOND8 = _Power(1.5), _Power(3.0)


def _whole_code(share: Array, random: Array, is_second: bool) -> Array:
    """Returns a whole code, from 0 to 127 or 255."""
    curve = _SECOND if is_second else _FIRST
    level = jnp.minimum(curve.level(share), curve.most)
    low = jnp.floor(level)
    high = jnp.minimum(low + 1, curve.most)
    return _by_chance(share, level, (low, high), random, curve, _SNAP)


def _float_code(share: Array, random: Array, is_second: bool) -> Array:
    """Returns a float8 code; these reach as far down as whole codes."""
    power = _SECOND8 if is_second else _FIRST8
    level = jnp.minimum(power.level(share), FLOAT8_MAX)
    ends = [stochastic(level, FLOAT8, jnp.full_like(random, r)) for r in (0, 2**32 - 1)]
    low, high = (jnp.minimum(end.astype(FLOAT32), FLOAT8_MAX) for end in ends)
    return _by_chance(share, level, (low, high), random, power, _SNAP / 8 * level)


def _by_chance(
    share: Array,
    level: Array,
    ends: tuple[Array, Array],
    random: Array,
    curve: "_Curve | _Power",
    snap: Array | float,
) -> Array:
    """Returns one of the two codes about a level, by a chance that makes the mean exact.

    The mean of the decoded values, that is: one of the codes would make the moments larger.
    """
    low, high = ends
    below, above = map(curve.value, ends)
    chance = (random >> 8).astype(FLOAT32) * 2.0**-24
    # P(high) = (share - below) / (above - below), so that the mean is the share.
    code = jnp.where(chance * (above - below) < share - below, high, low)
    code = jnp.where(high - level <= snap, high, code)
    return jnp.where(level - low <= snap, low, code)


def _largest(x: Array, blocks: int) -> Array:
    """Returns the largest of each block of non-negative values: f32[..., blocks].

    By windows, and not by a reshape, for which XLA writes the moments out: 12 bytes a parameter
    move in a step on an H100 in place of 21, and 48 in place of 65 on a v5e. A TPU finds a whole
    row's largest where it computes the row, and writes nothing out.
    """
    if blocks == 1:
        return jnp.max(x, axis=-1, keepdims=True)
    length = -(-x.shape[-1] // blocks)
    ones = (1,) * (x.ndim - 1)
    padding = [(0, 0)] * (x.ndim - 1) + [(0, blocks * length - x.shape[-1])]
    window = (*ones, length)
    zero = x.dtype.type(0)  # not 0.0: with 64-bit types that is a float64
    return jax.lax.reduce_window(x, zero, jax.lax.max, window, window, padding)


def _spread(scales: Array, shape: tuple[int, ...]) -> Array:
    """Returns each block's scale at each of its places: f32[shape]."""
    blocks = scales.shape[-1]
    if blocks == 1:
        return jnp.broadcast_to(scales, shape)
    length = -(-shape[-1] // blocks)
    wide = jnp.broadcast_to(scales[..., None], (*scales.shape, length))
    wide = wide.reshape(*scales.shape[:-1], blocks * length)
    return jax.lax.slice_in_dim(wide, 0, shape[-1], axis=-1)
