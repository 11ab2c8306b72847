"""Small values, under float16, of which a reader needs the digits and not the size.

`log(theta @ beta)` of a topic model is as exact at 1e-12 as at 1, and so is `x / (w @ h)`. Float16
holds 0 in place of a `beta` below 6e-8: the product is 0, its logarithm infinite. So a product that
is read so is float32 under float16, unless its operands are data and parameters, taken to be in
range. What a norm, a softmax or a maximum divides by is as large as the largest of its row, and
`1 + y` is no less than 1.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpjax._autocast.decide.read_flags import NEAR, PROPORTION
from mpjax._autocast.known import (
    contraction,
    fact_flags,
    factors,
    facts,
    linear,
    ranges,
    scopes,
    traits,
)
from mpjax._jaxpr.equation import Eqn
from mpjax._jaxpr.op_rules import PRODUCTS

_MADE = fact_flags.PRODUCT | ranges.CURVED | ranges.WEIGHED
_LOGARITHMS = frozenset({"log", "log2"})
_LINEAR_AT_ZERO = frozenset({"expm1", "log1p"})
_READERS = traits.RELATIVE | {"div", "integer_pow"}
_NUMBER_OR_MAXIMUM = fact_flags.CONSTANT | fact_flags.SCALAR | fact_flags.EXTREME


def how_read(eqn: Eqn, out_read: int, known: facts.Facts) -> list[int]:
    """Returns `PROPORTION` for each operand that an operation, or a later reader, reads so.

    Args:
      eqn: the operation.
      out_read: how its results are read.
      known: the facts of its program.
    """
    if not (out_read & PROPORTION or eqn.primitive.name in _READERS):
        return [0] * len(eqn.invars)
    operands = [facts.of_atom(v, known) for v in eqn.invars]
    if out_read & PROPORTION and _hands_on(eqn, out_read, operands):
        return [PROPORTION] * len(operands)
    return _of_itself(eqn, operands)


def may_be_lost(eqn: Eqn, read: int, known: facts.Facts) -> bool:
    """Whether float16 might hold 0 in place of what a product reads, and that matters.

    Args:
      eqn: the product.
      read: how its result is read.
      known: the facts of its program.
    """
    if not read & PROPORTION or not contraction.is_product(eqn):
        return False
    flags = (facts.of_atom(v, known).flags for v in eqn.invars[:2])
    return any(f & _MADE and not f & fact_flags.CONSTANT for f in flags)


def _of_itself(eqn: Eqn, operands: Sequence[facts.Fact]) -> list[int]:
    name = eqn.primitive.name
    reads = [0] * len(operands)
    if scopes.is_transposed(eqn):
        return reads  # what it is the derivative of reads the same
    if name in traits.RELATIVE or _is_a_reciprocal(eqn):
        is_norm = _is_of_powers(operands[0]) and name not in _LOGARITHMS
        reads[0] = 0 if is_norm else PROPORTION
    elif name == "div" and not _is_by_a_row(eqn, *operands):
        reads[1] = PROPORTION
    return reads


def _is_a_reciprocal(eqn: Eqn) -> bool:
    """Whether an equation is a power below 0, but for that of the derivative of a quotient."""
    if eqn.primitive.name != "integer_pow" or eqn.params["y"] >= 0:
        return False
    return eqn.params["y"] != -2 or not scopes.place(eqn).is_differentiated


def _is_by_a_row(eqn: Eqn, first: facts.Fact, second: facts.Fact) -> bool:
    """Whether a quotient is by a known number, a sum of squares, or a statistic of rows."""
    if second.flags & _NUMBER_OR_MAXIMUM or _is_of_powers(second):
        return True
    shapes = {v.aval.shape for v in eqn.invars}
    is_of_fewer = len(shapes) > 1 and not first.flags & fact_flags.CONSTANT
    return is_of_fewer or ranges.is_by_its_own(first, second)


def _is_of_powers(fact: facts.Fact) -> bool:
    """Whether a value is a power, or a sum of squares, as in a norm."""
    return fact.factors > 1 or bool(fact.flags & ranges.POWERS)


def _hands_on(eqn: Eqn, out_read: int, operands: Sequence[facts.Fact]) -> bool:
    """Whether operands are as small as an operation's result, and count as much."""
    name = eqn.primitive.name
    if name == "sqrt" and _is_of_powers(operands[0]):  # a norm
        return bool(out_read & NEAR)
    if name in PRODUCTS or name in traits.POWERS or name in _LINEAR_AT_ZERO or name == "abs":
        return True
    if name in traits.ADDS:
        constants = [f for f in operands if f.flags & fact_flags.CONSTANT]
        return all(map(fact_flags.is_epsilon, constants))
    if name in traits.SCALES and factors.is_gated(operands):
        return False
    return linear.is_linear(eqn, lambda i: operands[i].flags & fact_flags.PRODUCT)
