"""Operations whose results are linear in their operands: sums, scalings, moves, joins, updates.

Through these alone what is solved for, transformed or iterated is what a product made. A limit is
one of them, as `clip(y, -1e6, 1e6)` of an iteration; a relu, which is one at 0, is not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpjax._autocast.known import traits
from mpjax._base import compat
from mpjax._jaxpr.equation import Eqn
from mpjax._jaxpr.op_rules import MOVES

_LINEAR = (
    traits.HANDS_ON
    | MOVES
    | traits.STATISTIC
    | traits.PUTS_TOGETHER
    | traits.UPDATES
    | traits.GATHERS
    | {"cumsum", "reduce_window_sum"}
) - traits.DISTANCES


def is_linear(eqn: Eqn, is_made: Callable[[int], Any]) -> bool:
    """Whether an operation's results are linear in what it adds, moves or chooses.

    Args:
      eqn: the operation.
      is_made: says of an operand's place whether it is made of such values: no mask may be.
    """
    name = eqn.primitive.name
    if name not in traits.LIMITS:
        return name in _LINEAR
    return not (is_made(0) if name in traits.JOINS else any(map(_is_zero, eqn.invars)))


def _is_zero(atom: Any) -> bool:
    return compat.is_literal(atom) and not atom.aval.shape and atom.val == 0
