"""Moves low values before they are widened: `split(x @ w + b)` of an LSTM's or a GLU's gates.

If the whole is widened first and split then, it is a float32 value that several kernels of a TPU
read, and XLA stores it. So the low value is split, and the bias is added to the parts. Each element
must have one reader: a value's gradient is the sum over its readers, which for a low value would be
added in low precision.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
from jax import lax

from mpjax._autocast.known import traits
from mpjax._autocast.speed.hints import hint
from mpjax._base import compat
from mpjax._jaxpr.equation import Eqn

Cut = tuple[Sequence[int], Sequence[int], Sequence[int] | None]
"""A part of an array: its start and its end on each axis, and its strides."""

_MANY = 32
"""A value cut into more parts is widened first: to compare all pairs of parts would take long."""


@hint("moved_low", lambda _: set[Any]())
def moved_low(eqns: Sequence[Eqn]) -> set[Any]:
    """Returns the values that a group moves before they are widened; the results are widened."""
    return {v for v, readers in _readers(eqns).items() if _moves_once(*readers)}


@hint("moved_again", lambda *_: dict[Any, Any]())
def moved_again(eqns: Sequence[Eqn], inputs: Collection[Any]) -> dict[Any, Any]:
    """Returns moves of a group's inputs that the group reads unmoved too: result to input.

    A group norm reads its input as it is and, for the statistics of channels, reshaped. If it is
    widened first, XLA:TPU stores one float32 value and copies it from one layout to the other. If
    it is widened after the reshape, both are read from the low value.
    """
    once = moved_low(eqns)
    return {
        eqn.outvars[0]: eqn.invars[0]
        for eqn in eqns
        if eqn.primitive.name in traits.PERMUTES - traits.SLICES
        and eqn.invars[0] in inputs
        and eqn.invars[0] not in once
    }


@hint("read_in_parts", lambda *_: dict[Any, Any]())
def read_in_parts(eqns: Sequence[Eqn], outputs: Collection[Any]) -> dict[Any, Any]:
    """Returns elementwise results of which a group reads only slices, each with its equation.

    The slices are computed from slices of the operands, which nothing else in the group reads.
    """
    readers = _readers(eqns)
    makers: dict[Any, Any] = {}
    for eqn in reversed(eqns):
        (out, *_) = eqn.outvars
        if eqn.primitive.name not in traits.PARTS or out in outputs or out not in readers:
            continue
        shape = out.aval.shape
        (reader, *others) = readers[out]
        again = not others and reader.outvars[0] in makers and reader.outvars[0].aval.shape == shape
        in_parts = again or _cut_once(readers[out])
        large = [v for v in compat.variables(eqn) if v.aval.shape == shape]
        if in_parts and all(len(readers[v]) == 1 for v in large):
            makers[out] = eqn
    return makers


def made_of(v: Any, makers: Mapping[Any, Eqn]) -> list[Eqn]:
    """Returns the equations of `makers` that compute a value, in an order in which they can run.

    Each of their results has one reader, so those found first, from the value on, run last.
    """
    found: list[Eqn] = []
    waiting = [v]
    while waiting:
        eqn = makers.get(waiting.pop())
        if eqn is not None:
            found.append(eqn)
            waiting += compat.variables(eqn)
    return found[::-1]


@jax.custom_jvp
def valued(whole: jax.Array, part: jax.Array) -> jax.Array:
    """Returns `part`, with the derivative of `whole`, which has the same value.

    `part` is computed from slices or from low values. `whole` is cut out of the complete result:
    XLA removes its forward pass, and its cotangent is stored complete, for the product before it.
    """
    del whole
    return part


@valued.defjvp
def _valued_jvp(primals: Any, tangents: Any) -> Any:
    return valued(*primals), tangents[0]


def _readers(eqns: Sequence[Eqn]) -> dict[Any, list[Any]]:
    return {v: [eqns[i] for i in at] for v, at in read_at(eqns).items()}


def read_at(eqns: Sequence[Eqn]) -> dict[Any, list[int]]:
    """Returns the places of the equations that read each variable, once for each operand."""
    places: dict[Any, list[int]] = {}
    for i, eqn in enumerate(eqns):
        for v in compat.variables(eqn):
            places.setdefault(v, []).append(i)
    return places


def _cut_once(readers: Sequence[Any]) -> bool:
    return readers[0].primitive.name in traits.SLICES and _moves_once(*readers)


def cuts(eqn: Eqn) -> list[Cut]:
    """Returns the part of the operand that each result of a slice, split or unstack is; else []."""
    if eqn.primitive.name not in traits.SLICES:
        return []
    if eqn.primitive.name == "slice":
        names = "start_indices", "limit_indices", "strides"
        return [tuple(eqn.params[name] for name in names)]
    axis, (operand,) = eqn.params["axis"], eqn.invars
    sizes = eqn.params.get("sizes", [1] * len(eqn.outvars))  # an `unstack` has none
    ends = list(itertools.accumulate(map(int, sizes), initial=0))
    starts, limits = [0] * operand.aval.ndim, list(operand.aval.shape)
    at = [
        ([*starts[:axis], i, *starts[axis + 1 :]], [*limits[:axis], j, *limits[axis + 1 :]])
        for i, j in itertools.pairwise(ends)
    ]
    return [(start, limit, None) for start, limit in at]


def cut(array: Any, of: Sequence[int], at: Cut) -> Any:
    """Returns the part `at` of an array that is broadcast to shape `of`, before its broadcast."""
    if array.ndim == 0:
        return array
    start, limit, strides = at
    single = [have == 1 != want for have, want in zip(array.shape, of, strict=True)]
    return lax.slice(
        array,
        [0 if one else i for one, i in zip(single, start, strict=True)],
        [1 if one else i for one, i in zip(single, limit, strict=True)],
        strides and [1 if one else i for one, i in zip(single, strides, strict=True)],
    )


def as_result(eqn: Eqn, part: Any) -> Any:
    """Returns a part in the shape that the equation gives it: an `unstack` drops the axis."""
    dropped = eqn.primitive.name == "unstack"
    return lax.squeeze(part, [eqn.params["axis"]]) if dropped else part


def _moves_once(eqn: Eqn, *others: Any) -> bool:
    """Whether all the readers of a value are moves, and no two of them read the same element."""
    if not others:
        return eqn.primitive.name in traits.PERMUTES | traits.SLICES
    slices = [eqn, *others]
    if len(slices) > _MANY or any(one.primitive.name != "slice" for one in slices):
        return False
    return all(_disjoint(a.params, b.params) for a, b in itertools.combinations(slices, 2))


def _disjoint(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether two slices share no element: `x[:4]` and `x[4:]`, or `x[::2]` and `x[1::2]`."""
    if a["strides"] == b["strides"] is not None:
        starts = zip(a["start_indices"], b["start_indices"], a["strides"], strict=True)
        if any((i - j) % stride for i, j, stride in starts):
            return True
    limits = (zip(x["start_indices"], y["limit_indices"], strict=True) for x, y in ((a, b), (b, a)))
    return any(start >= limit for start, limit in itertools.chain(*limits))
