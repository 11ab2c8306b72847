"""Corrects a kernel's result in rows of an attention that may read no key.

There XLA's softmax gives equal weights to all keys, since all logits are equal. A kernel saves the
logarithm of a row's sum of exponentials; in such a row it is so large that float32 loses the part
that the gradient needs. So a kernel computes a finite result for these rows, and `filled` replaces
it by XLA's, with its gradient.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mpjax._autocast.attention.program import Empty, Operands, Spec

LOST = -5e8  # added to a logit, a number like this leaves nothing of it in float32


_NAN = (Empty.NAN, Empty.NAN_THROUGH)
_THROUGH = (Empty.THROUGH, Empty.NAN_THROUGH)


class SpecialRows(NamedTuple):
    """The special rows by kind, bool[.., .., .., 1] on the axes of the logits; None for no row."""

    keyless: Any = None  # a mask lets no key be read
    lost: Any = None  # the bias is the same for all keys, and so large that it absorbs the logits
    infinite: Any = None  # the bias is -inf for all keys
    faint: Any = None  # the bias absorbs the logits and differs: logits get no gradient

    def filled(self, empty: Empty) -> Any:
        """Returns the rows whose result a kernel cannot compute, None if there are none."""
        keyless = None if empty is Empty.ALL else self.keyless
        return _any(keyless, self.lost, self.infinite)

    def nan(self, empty: Empty) -> Any:
        """Returns the rows whose result is NaN."""
        return _any(self.keyless if empty in _NAN else None, self.infinite)

    def through(self, empty: Empty) -> Any:
        """Returns the rows in which logits get gradients although the bias absorbs them."""
        keyless = self.keyless if empty in _THROUGH else None
        return _any(keyless, self.lost, self.infinite)


def _any(*rows: Any) -> Any:
    given = [x for x in rows if x is not None]
    for x in given[1:]:
        given[0] = given[0] | x
    return given[0] if given else None


def special(operands: Operands, spec: Spec) -> SpecialRows:
    """Returns the special rows of an attention."""
    read = operands.mask
    _, _, queries, keys = operands.sizes
    if operands.lengths is not None:
        first = jnp.arange(keys) < operands.lengths[:, None, None, None]
        read = first if read is None else read & first
    band = spec.band(queries, keys)
    if read is not None and band is not None:
        read = read & band
    keyless = None if read is None else ~jnp.any(read, axis=-1, keepdims=True)
    if operands.bias is None:
        return SpecialRows(keyless)
    bias, read = _wide(operands.bias), band if read is None else read
    seen = bias if read is None else jnp.where(read, bias, -jnp.inf)
    most = jnp.max(seen, axis=-1, keepdims=True)
    is_lost = most <= LOST if keyless is None else (most <= LOST) & ~keyless
    alike = jnp.min(bias, axis=-1, keepdims=True) == most
    if read is not None:
        alike &= jnp.all(read, axis=-1, keepdims=True)
    infinite = is_lost & jnp.isneginf(most)
    return SpecialRows(keyless, is_lost & alike & ~infinite, infinite, is_lost & ~alike & ~infinite)


def _wide(bias: Any) -> Any:
    return jax.lax.stop_gradient(bias.astype(jnp.float32))


def as_result(rows: Any) -> Any:
    """Returns an array of rows with the axes of the result, from one with those of the logits."""
    return rows.swapaxes(1, 2)  # [batch, heads, queries, 1] to [batch, queries, heads, 1]


def ready(operands: Operands, spec: Spec, rows: SpecialRows) -> Operands:
    """Returns operands for a kernel: no row is without keys, and a bias includes the mask."""
    if operands.bias is None:
        return (
            operands
            if operands.mask is None
            else operands._replace(mask=operands.mask | rows.keyless)
        )
    query = jnp.where(as_result(rows.faint), jnp.zeros((), operands.query.dtype), operands.query)
    return operands._replace(query=query, bias=_ready_bias(operands, spec), mask=None)


def _ready_bias(operands: Operands, spec: Spec) -> Any:
    """Returns a bias in the kernel's low dtype, each row shifted so that its largest value is 0.

    The shift changes no weight. Values near 0, which matter, then lose least to the rounding.
    """
    bias, dtype, sizes = _wide(operands.bias), operands.query.dtype, operands.sizes
    if operands.mask is not None:
        bias = jnp.where(operands.mask, bias, -jnp.inf)
    band = spec.band(*sizes[2:])
    seen = bias if band is None else jnp.where(band, bias, -jnp.inf)
    largest = jnp.max(seen, axis=-1, keepdims=True)
    bias = bias - jnp.where(jnp.isneginf(largest), 0.0, largest)
    least = float(jnp.finfo(dtype).min) / 2 if dtype == jnp.float16 else -(2.0**41)
    shape = (*bias.shape[:2], *sizes[2:])
    return jnp.broadcast_to(jnp.maximum(bias, least), shape).astype(dtype)


def filled(out: Any, operands: Operands, spec: Spec, rows: SpecialRows) -> Any:
    """Returns a kernel's result, with XLA's in special rows: see `Empty`."""
    which = rows.filled(spec.empty)
    if which is None:
        return out
    groups, keys = operands.query.shape[2] // operands.value.shape[2], operands.sizes[3]
    value, key = (
        jnp.repeat(x.astype(jnp.float32), groups, axis=2) for x in (operands.value, operands.key)
    )
    nan, through = rows.nan(spec.empty), rows.through(spec.empty)
    weight = 1 / keys if nan is None else as_result(jnp.where(nan, jnp.nan, 1 / keys))
    instead = weight * jnp.sum(value, axis=1, keepdims=True)
    if through is not None:
        centred = jax.lax.stop_gradient(value - jnp.mean(value, axis=1, keepdims=True))
        together = jnp.einsum("bsnh,bsnv->bnhv", key, centred) * (spec.scale / keys)
        moved = jnp.einsum("btnh,bnhv->btnv", operands.query.astype(jnp.float32), together)
        moved = jnp.where(as_result(through), weight * keys * moved, 0.0)
        instead = instead + (moved - jax.lax.stop_gradient(moved))
    return jnp.where(as_result(which), instead.astype(out.dtype), out)
