"""Rows of an attention of which a kernel knows less than XLA does: those that may read no key.

XLA's weights are all equal there. A kernel takes the logarithm of such a row's sum, which is so
large that float32 loses what its gradient needs of it. So a kernel computes something for these
rows that is finite, and `filled` puts there what XLA gives, with its gradient.
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
    """Which rows are special, bool[.., .., .., 1] on the axes of the logits, or None for none."""

    keyless: Any = None  # no key may be read
    lost: Any = None  # to all logits the same is added, and nothing is left of them
    infinite: Any = None  # to all logits -inf is added
    faint: Any = None  # as well, but what is added differs between keys: logits get no gradients

    def filled(self, empty: Empty) -> Any:
        """Returns which rows a kernel cannot answer for, None if there are none."""
        keyless = None if empty is Empty.ALL else self.keyless
        return _any(keyless, self.lost, self.infinite)

    def nan(self, empty: Empty) -> Any:
        """Returns which rows are NaN."""
        return _any(self.keyless if empty in _NAN else None, self.infinite)

    def through(self, empty: Empty) -> Any:
        """Returns in which rows logits get gradients, although nothing is left of them."""
        keyless = self.keyless if empty in _THROUGH else None
        return _any(keyless, self.lost, self.infinite)


def _any(*rows: Any) -> Any:
    given = [x for x in rows if x is not None]
    for x in given[1:]:
        given[0] = given[0] | x
    return given[0] if given else None


def special(operands: Operands, spec: Spec) -> SpecialRows:
    """Returns which rows of an attention a kernel has to be helped with."""
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
    """Returns rows on the axes of the logits on those of the result."""
    return rows.swapaxes(1, 2)  # [batch, heads, queries, 1] to [batch, queries, heads, 1]


def ready(operands: Operands, spec: Spec, rows: SpecialRows) -> Operands:
    """Returns operands of which a bias holds the mask; a row without keys reads all in a mask."""
    if operands.bias is None:
        return (
            operands
            if operands.mask is None
            else operands._replace(mask=operands.mask | rows.keyless)
        )
    query = jnp.where(as_result(rows.faint), jnp.zeros((), operands.query.dtype), operands.query)
    return operands._replace(query=query, bias=_ready_bias(operands, spec), mask=None)


def _ready_bias(operands: Operands, spec: Spec) -> Any:
    """Returns a bias as a kernel adds it, low: each row is shifted so that its largest is 0.

    That changes no weight. Rounded, what counts of a bias is near 0, and exact.
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
    """Returns a kernel's result, and in special rows what XLA gives: see `Empty`."""
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
