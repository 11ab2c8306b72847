"""The instrument of `exponents`: how many elements of each exponent, counted on integer bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mpjax._base import compat
from mpjax._jaxpr.binding import bind
from mpjax._jaxpr.equation import Eqn
from mpjax.numerics import _bits
from mpjax.numerics._collect import Collecting, CollectingFrame
from mpjax.numerics._plan import is_inexact
from mpjax.numerics._run import TrackedValue

LOWEST, HIGHEST = -149, 127  # the exponents of float32, subnormal ones too
BINS = HIGHEST - LOWEST + 1
ZERO, INF, NAN = range(BINS, BINS + 3)  # the columns behind the exponents'
WIDTH = BINS + 3


@jax.jit  # compiled once for values of the same type, where operations run one by one
def histogram(x: Any) -> jax.Array:
    """Returns the number of elements of each exponent, then of zeros, inf and NaN.

    Args:
      x: any floating array; float64 is counted as float32.

    Returns:
      f32[280]; entry `e + 149` counts magnitudes in [2**e, 2**(e+1)).
    """
    return compat.unplaced(_histogram, x)


def _histogram(x: Any) -> jax.Array:
    bits = _as_float32_bits(_bits.as_floating(x)).ravel()
    exponent, mantissa = (bits >> 23).astype(jnp.int32), bits & 0x7FFFFF
    # The exponent of a subnormal number is the place of its highest bit: 2⁻¹⁴⁹ has bits 1.
    small = 31 - lax.clz(mantissa).astype(jnp.int32)
    column = jnp.where(exponent == 0, small, exponent + 22)
    column = jnp.where(bits == 0, ZERO, column)
    column = jnp.where(exponent == 255, jnp.where(mantissa == 0, INF, NAN), column)
    counts = jnp.zeros((WIDTH,), jnp.uint32).at[column].add(1)
    return counts.astype(jnp.float32)


def _as_float32_bits(x: jax.Array) -> jax.Array:
    """Returns the bits of |x| in float32, exactly, subnormal numbers too, whatever is flushed."""
    if x.dtype == jnp.bfloat16:
        return _bits.magnitude_bits(x).astype(jnp.uint32) << 16
    return _bits.magnitude_bits(x.astype(jnp.float32))


class Exponents(Collecting):
    """Counts the exponents of every operation's results; iterations and shards add up."""

    width = WIDTH
    sums = WIDTH
    shadows = False

    def frame(self, spread: Callable[[Any], Any]) -> _HistogramFrame:
        """Returns the frame of one function body."""
        return _HistogramFrame(spread)

    def outputs(self, outs: Sequence[TrackedValue]) -> Any:
        """Returns the histogram of each output."""
        return jnp.stack([histogram(t.value) for t in outs])


class _HistogramFrame(CollectingFrame):
    def constant(self, value: Any) -> Any:
        self.collected.append(self.spread(histogram(value)))
        return self.fresh(value)

    def measure(self, eqn: Eqn, operands: Sequence[TrackedValue]) -> list[TrackedValue]:
        outs = bind(eqn, [t.value for t in operands])
        pairs = zip(outs, eqn.outvars, strict=True)
        counts = [histogram(out) for out, var in pairs if is_inexact(var)]
        self.collected.append(self.spread(sum(counts[1:], counts[0])))
        return [TrackedValue(out) for out in outs]
