"""Exponentials: which are chances, and which float16 may not hold, past 65504 or below 6e-8.

A softmax takes the maximum of a row off first, so that its exponentials reach 1 and not more. The
`exp(-cost / 0.01)` of a Sinkhorn iteration, and the `exp(scores) @ values` of an attention without
a maximum, do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpjax._autocast.known import traits
from mpjax._autocast.known.fact_flags import CONSTANT, SCALAR, union
from mpjax._jaxpr.equation import Eqn
from mpjax._jaxpr.op_rules import MOVES

TOP = 1 << 19
"""The maximum of rows, or a sum with it, such as a logsumexp."""
UNDER = 1 << 20
"""A distance to such a maximum, or limited by a constant: its exponential is in range."""
EXPONENTIAL = 1 << 21
"""The exponential of another value, or a multiple of it."""
CHANCES = 1 << 22
"""An exponential in range, or one that was divided by a sum: what a softmax makes. Or 0 and 1."""
_EXPONENTIALS = frozenset({"exp", "exp2"})
_LIMITED = frozenset({"min", "clamp"})


def of_operation(eqn: Eqn, floats: Sequence[Any]) -> int:
    """Returns these flags of an operation's results, given the facts of its float operands."""
    name = eqn.primitive.name
    some, _ = union(floats)
    if name in _EXPONENTIALS:
        return CHANCES if some & UNDER else EXPONENTIAL
    if name in traits.EXTREME:
        return TOP
    if name in _LIMITED and any(f.flags & CONSTANT for f in floats):
        return UNDER
    if name in MOVES or name in traits.JOINS or name in traits.LIMITS:
        return some & (TOP | UNDER | EXPONENTIAL | CHANCES)
    if name == "sub" and floats[-1].flags & TOP:
        return UNDER
    if name in traits.ADDS:
        return some & (TOP | UNDER)
    if name in traits.SCALES:
        is_by_a_number = any(f.flags & (CONSTANT | SCALAR) for f in floats)
        if is_by_a_number:
            return some & (UNDER | EXPONENTIAL | CHANCES)
        return CHANCES if name == "div" and floats[0].flags & (EXPONENTIAL | CHANCES) else 0
    return some & UNDER if name == "neg" else 0


def of_logic(eqn: Eqn) -> int:
    """Returns `CHANCES` of booleans that are made floats, such as one-hot rows."""
    is_converted = eqn.primitive.name == "convert_element_type"
    return CHANCES if is_converted and eqn.invars[0].aval.dtype == np.bool_ else 0
