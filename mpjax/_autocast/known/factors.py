"""How often a value is a factor of another: each rounding of it is repeated as often.

`z ** 100` has a hundred factors, and so has what a loop or a row of squarings makes of `z * z`.
Factors that differ, as those of a `prod`, are told by where they were cut out of one array.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpjax._autocast.known import roots, traits
from mpjax._autocast.known.fact_flags import CONSTANT, SCALAR
from mpjax._jaxpr.equation import Eqn
from mpjax._jaxpr.op_rules import MOVES

MANY = 8
"""A power of which each rounding of its base is worth three bits more."""
MULTIPLY = frozenset({"mul", "integer_pow", "square"})
HANDS_ON = (
    MOVES
    | traits.ADDS
    | traits.LIMITS
    | traits.ACCUMULATES
    | traits.UPDATES
    | traits.COMPLEX
    | {"abs", "div", "neg"}
)


def count(eqn: Eqn, facts: Sequence[Any]) -> int:
    """Returns how often a value is a factor of an operation's result, up to `MANY`; 0 if bounded.

    Args:
      eqn: the operation.
      facts: those of its float operands.
    """
    name = eqn.primitive.name
    if name == "mul":
        first, second = facts
        is_power = first.roots == second.roots and first.roots and not is_gated(facts)
        return min(sum(max(f.factors, 1) for f in facts), MANY) if is_power else _most(facts)
    if name in ("integer_pow", "square"):
        return min(max(facts[0].factors, 1) * max(abs(eqn.params.get("y", 2)), 1), MANY)
    if name in traits.SATURATES:
        return 0
    return _most(facts) if name in HANDS_ON else 1


def is_gated(facts: Sequence[Any]) -> bool:
    """Whether a value is multiplied by a bounded function of it, as in `z * sigmoid(z)`.

    One number is no gate: that of `k / a * a`, where `a` is `exp(log(trace))`.
    """
    first, second = facts
    if (first.flags ^ second.flags) & SCALAR:
        return False
    return bool(first.factors) != bool(second.factors) and roots.meet(first.roots, second.roots)


def _most(facts: Sequence[Any]) -> int:
    return max((f.factors for f in facts if not f.flags & CONSTANT), default=1)


def makes_many(eqn: Eqn, facts: Sequence[Any]) -> bool:
    """Whether one of `MULTIPLY` makes a product of so many factors that their roundings add up.

    JAX differentiates a `prod` as products of halves of products of halves.
    """
    if count(eqn, facts) == MANY:
        return True
    return eqn.primitive.name == "mul" and roots.are_halves(*(f.roots for f in facts), at_least=2)
