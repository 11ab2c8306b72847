"""Values that are 0 or more, such as squares and their sums: the sum of two cancels nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mpjax._autocast.known import traits
from mpjax._autocast.known.fact_flags import CONSTANT, EITHER, NEGATED, POSITIVE
from mpjax._jaxpr.equation import Eqn
from mpjax._jaxpr.op_rules import MOVES

_OTHERS = "add add_any min reduce_sum reduce_max reduce_min psum convert_element_type"
_OF_ALL = MOVES - {"neg", "sign"} | traits.JOINS | traits.SCALES | frozenset(_OTHERS.split())
"""Their results are 0 or more if all operands are."""


def of_operation(eqn: Eqn, floats: Sequence[Any]) -> int:
    """Returns `POSITIVE` if all results of an operation are 0 or more.

    Args:
      eqn: the operation.
      floats: the facts of its float operands.
    """
    name = eqn.primitive.name
    if name in traits.POSITIVE or _is_square(eqn):
        return POSITIVE
    positive = map(is_so, floats)
    if name == "max":
        return POSITIVE * any(positive)
    return POSITIVE * (name in _OF_ALL and all(positive))


def is_so(fact: Any) -> bool:
    """Whether a value is known to be 0 or more."""
    is_known = fact.flags & CONSTANT and fact.most < math.inf
    return bool(fact.flags & POSITIVE or (is_known and not fact.flags & (NEGATED | EITHER)))


def _is_square(eqn: Eqn) -> bool:
    """Whether an operation multiplies a value by itself: `x * x`, `x ** 4`, `row @ row`."""
    if eqn.primitive.name == "integer_pow":
        return eqn.params["y"] % 2 == 0
    is_to_one = eqn.primitive.name == "dot_general" and not eqn.outvars[0].aval.shape
    return (is_to_one or eqn.primitive.name == "mul") and eqn.invars[0] is eqn.invars[1]
