"""What a group moves before it is widened: the gates of a cell, a gate and what it lets through.

Widened first, and split then, the whole is a float32 value that several kernels of a TPU read, and
XLA stores it. So it is split as it is held, and a bias is added to the parts. Each element must
have one reader: a value's gradient is the sum over its readers, and of what is held low it would be
added up in low precision.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any

import jax
from jax import lax

from mpjax._autocast.decide import traits
from mpjax._autocast.speed.hints import hint
from mpjax._base import compat

Cut = tuple[Sequence[int], Sequence[int], Sequence[int] | None]
"""Where a part of an array starts and ends on each axis, and its strides."""

_MANY = 32
"""A value cut into more parts is widened first: the parts are compared two by two."""


@hint("moved_low", lambda _: set[Any]())
def moved_low(eqns: Sequence[Any]) -> set[Any]:
    """Returns what the equations of a group move as it is held; what they make of it is widened."""
    return {v for v, readers in _readers(eqns).items() if _moves_once(*readers)}


@hint("moved_again", lambda *_: dict[Any, Any]())
def moved_again(eqns: Sequence[Any], inputs: Collection[Any]) -> dict[Any, Any]:
    """Returns what a group makes by moving inputs that it reads in other ways too, and of which.

    A norm reads its input as it is and, for the statistics of its channels, reshaped. Widened
    first, the two are one float32 value to XLA:TPU, which stores that and copies it from the one's
    layout to the other's. Widened last, each is read from the low value.
    """
    once = moved_low(eqns)
    return {
        eqn.outvars[0]: eqn.invars[0]
        for eqn in eqns
        if eqn.primitive.name in traits.PERMUTES - traits.CUTS
        and eqn.invars[0] in inputs
        and eqn.invars[0] not in once
    }


@hint("read_in_parts", lambda *_: dict[Any, Any]())
def read_in_parts(eqns: Sequence[Any], outputs: Collection[Any]) -> dict[Any, Any]:
    """Returns what a group computes part by part and reads only parts of, and what makes each.

    They are computed of the parts of their operands, which nothing else in the group reads.
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


@jax.custom_jvp
def valued(whole: jax.Array, part: jax.Array) -> jax.Array:
    """Returns `part`, computed of less or as it is held, to differentiate as `whole` is.

    `whole` is the same value. Of a sum it is the part that is cut out: XLA computes that for its
    cotangent's sake alone, which is stored as a whole, for the product whose result it is of.
    """
    del whole
    return part


@valued.defjvp
def _valued_jvp(primals: Any, tangents: Any) -> Any:
    return valued(*primals), tangents[0]


def _readers(eqns: Sequence[Any]) -> dict[Any, list[Any]]:
    readers: dict[Any, list[Any]] = {}
    for eqn in eqns:
        for v in compat.variables(eqn):
            readers.setdefault(v, []).append(eqn)
    return readers


def _cut_once(readers: Sequence[Any]) -> bool:
    return readers[0].primitive.name in traits.CUTS and _moves_once(*readers)


def cuts(eqn: Any) -> list[Cut]:
    """Returns what each result of a move that cuts is of its operand; nothing of any other."""
    if eqn.primitive.name not in traits.CUTS:
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
    """Returns the part of an array that goes into a part of what is broadcast to shape `of`."""
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


def as_result(eqn: Any, part: Any) -> Any:
    """Returns a part as the equation that cuts it gives it: an `unstack` drops the axis."""
    dropped = eqn.primitive.name == "unstack"
    return lax.squeeze(part, [eqn.params["axis"]]) if dropped else part


def _moves_once(eqn: Any, *others: Any) -> bool:
    """Whether all the readers of a value are moves of it that share no element."""
    if not others:
        return eqn.primitive.name in traits.PERMUTES | traits.CUTS
    slices = [eqn, *others]
    if len(slices) > _MANY or any(one.primitive.name != "slice" for one in slices):
        return False
    return all(_disjoint(a.params, b.params) for a, b in itertools.combinations(slices, 2))


def _disjoint(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Returns whether two slices of one array share no element: apart, or in turns, on an axis."""
    if a["strides"] == b["strides"] is not None:
        starts = zip(a["start_indices"], b["start_indices"], a["strides"], strict=True)
        if any((i - j) % stride for i, j, stride in starts):
            return True
    limits = (zip(x["start_indices"], y["limit_indices"], strict=True) for x, y in ((a, b), (b, a)))
    return any(start >= limit for start, limit in itertools.chain(*limits))
