"""What a group moves before it is widened: the gates of a cell, a gate and what it lets through.

Widened first, and split then, the whole is a float32 value that several kernels of a TPU read, and
XLA stores it. Each element must have one reader: a value's gradient is the sum over its readers,
and of what is held low it would be added up in low precision.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from mpjax import _compat
from mpjax._autocast import traits
from mpjax._autocast.hints import hint

_MANY = 32
"""A value cut into more parts is widened first: the parts are compared two by two."""


@hint("moved_low", lambda _: set[Any]())
def moved_low(eqns: Sequence[Any]) -> set[Any]:
    """Returns what the equations of a group move as it is held; what they make of it is widened."""
    readers: dict[Any, list[Any]] = {}
    for eqn in eqns:
        for v in _compat.variables(eqn):
            readers.setdefault(v, []).append(eqn)
    return {v for v, (eqn, *others) in readers.items() if _moves_once(eqn, others)}


def _moves_once(eqn: Any, others: Sequence[Any]) -> bool:
    """Whether all the readers of a value are moves of it that share no element."""
    if not others:
        return eqn.primitive.name in traits.PERMUTES | {"slice"}
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
