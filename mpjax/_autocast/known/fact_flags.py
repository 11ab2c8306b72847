"""Flags of facts: what is so of a value, as `facts` tells forwards through a program."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mpjax._autocast.known import contraction, totals, traits
from mpjax._jaxpr.equation import Eqn
from mpjax._jaxpr.op_rules import MOVES, PRODUCTS
from mpjax._jaxpr.sizes import copies

CONSTANT = 1 << 0
"""No float argument went into it: a literal, a mask, a one-hot label."""
SCALAR = 1 << 1
"""It is one number, or copies of it."""
REPEATED = 1 << 2
"""A broadcast made it."""
EXTREME = 1 << 3
"""It is a maximum of rows, or made of nothing else."""
STEP = 1 << 4
"""It was multiplied by a small number, or by one that is not known: a step size."""
PRODUCT = 1 << 5
"""A product's result went into it."""
DERIVED = 1 << 6
"""A derivative that is taken inside the program made it."""
BY_DATA, BY_A_CONSTANT, BY_A_BIAS = 1 << 7, 1 << 8, 1 << 9
"""It has an offset, which was added to what a product made, and a difference may take off again.

What was added by a bias repeats, over examples. One by data, a statistic of rows, such as their
mean, need not have, nor one by a bias a statistic of several axes: a bias of 1, -2, 1 has no mean.
"""
OFFSET = BY_DATA | BY_A_CONSTANT | BY_A_BIAS
NEGATED = 1 << 10
"""Its sign was turned: adding it to another value subtracts."""
CARRY, ENTERED = 1 << 11, 1 << 12
"""Inside a loop: it is made of what the loop carries by no product, or is what comes from outside.

The latter also after functions of each element, unless they saturate.
"""
EITHER = 1 << 13
"""Its sign is not one: of weights as 1, -2, 1, of values joined with negated ones, or of a
difference that may have left some of an offset, as `-2 * u + u[1:]`.
"""
STREAM = 1 << 14
"""It is a sum of values that products made, or of one and data, as a residual stream is."""
SOLVED = 1 << 15
"""A factorisation or a solve made it, as `solve(k, y)`, or it is a product of such values alone."""
ASSEMBLED = 1 << 16
"""It was put together of parts, as a rotation of cosines and sines, or is a constant with a 0."""
STENCIL = 1 << 17
"""A constant whose elements add up to 0, as those of a Laplacian, or that a difference made, as
`eye(n) - 1 / n`: a sum over it subtracts.
"""
AMOUNTS = 1 << 18
"""Constants that are no layer's weights, such as coordinates and prices; made of these alone."""
BEHIND = 1 << 30
"""It is a product of what a solve made with any other value, as `gain @ observed`."""
POSITIVE = 1 << 31
"""It is 0 or more: see `positive`."""
ALIKE = 1 << 32
"""Each turn of a loop has the same: it comes from outside, and is not cut into turns."""
OF_MATRICES = SOLVED | BEHIND | ASSEMBLED
"""A branch's result has them if one branch has, and a loop's carry if one turn has."""
# The flags from `1 << 19` to `1 << 29` are those of `ranges`.
_EPSILON = 1 / 64
"""A smaller number that is added guards a division or a root; it cancels nothing."""
MUCH = 64.0
"""A value that is scaled by so much may be out of float16's range; caps of logits are by 50."""
SMALL_STEP = 1 / 32
"""Times this a change counts as a step: each one is worth 5 bits less."""
_POOLS = frozenset({"reduce_window_max", "reduce_window_min"})  # of copies they may make one
_PRESERVE_SUMS = traits.ADDS | traits.SCALES | traits.POWERS | traits.LIMITS | traits.ACCUMULATES
_MOVE_SUMS = MOVES | traits.ACROSS | traits.COMPLEX | {"neg", "convert_element_type"}
FUNCTIONS = (traits.OF_FEW | traits.LOOKS) - _PRESERVE_SUMS - _MOVE_SUMS
"""A function of a sum is no sum, and has no offset of it; others move elements, or add up."""
_END_A_STREAM = FUNCTIONS | PRODUCTS
_END_A_MATRIX = traits.SATURATES | traits.LOOKS
_ASSEMBLE = traits.PUTS_TOGETHER & traits.JOINS | traits.UPDATES
_PRESERVE_AMOUNTS = MOVES | traits.JOINS | traits.SHIFTS | traits.SCALES | {"neg"}
_MAKE_A_SIGN = FUNCTIONS | PRODUCTS | traits.POWERS | traits.ADDS
_REPEATING = traits.ADDS | traits.SCALES
_PRESERVE_ENTERED = (MOVES | traits.OF_FEW | traits.JOINS | traits.UPDATES) - traits.SATURATES
_PRESERVE_DERIVED = MOVES - traits.STATISTIC


def union(facts: Sequence[Any]) -> tuple[int, int]:
    """Returns the flags that some of several facts have, and those that all have."""
    some, every = 0, -1
    for f in facts:
        some |= f.flags
        every &= f.flags
    return some, every


def of_operation(eqn: Eqn, floats: Sequence[Any], some: int, every: int) -> int:
    """Returns the flags of all results of an operation.

    Args:
      eqn: the operation.
      floats: the facts of its float operands, of which not all are constants.
      some: the flags that some of these have.
      every: those that all have.
    """
    name = eqn.primitive.name
    flags = some & PRODUCT | signs(eqn, floats) | _of_matrices(eqn, floats, some, every)
    if name not in PRODUCTS:
        flags |= some & (CARRY | ENTERED if name in _PRESERVE_ENTERED else CARRY)
    if name not in _END_A_STREAM:
        joins = name in traits.ADDS and joins_a_stream(floats)
        flags |= STREAM if joins else some & STREAM
    if name in _PRESERVE_DERIVED:
        flags |= some & DERIVED
    if some & CONSTANT:
        some, every = union([f for f in floats if not f.flags & CONSTANT])
    flags |= every & ALIKE | (EXTREME if name in traits.EXTREME else every & EXTREME)
    if name in MOVES:
        handed_on = STEP if name in _POOLS else REPEATED | STEP
        flags |= every & STENCIL
        return flags | some & handed_on | (REPEATED if repeats(eqn) else 0)
    if some & STENCIL and name in traits.SCALES and any(f.flags & SCALAR for f in floats):
        flags |= STENCIL
    return flags | STEP if _makes_a_step(eqn, floats) else flags


def _of_matrices(eqn: Eqn, floats: Sequence[Any], some: int, every: int) -> int:
    """Returns `SOLVED` and `ASSEMBLED`, as far as an operation's results are."""
    name = eqn.primitive.name
    if name in traits.SOLVES:
        return SOLVED
    if name in _END_A_MATRIX:
        return 0
    amounts = _amounts(floats) if name in _PRESERVE_AMOUNTS else 0
    if name in PRODUCTS:
        assembled = some if contraction.adds_few(eqn) else every
        behind = BEHIND if some & (SOLVED | BEHIND) else 0
        return every & SOLVED | behind | assembled & ASSEMBLED
    if name in traits.ADDS:
        if not all(map(_may_join_a_solution, floats)):
            some &= ~(SOLVED | BEHIND)
        elif some & BEHIND and any(map(_is_a_known_matrix, floats)):
            some |= SOLVED  # `eye(n) - gain @ observed`, a projection
    if name in traits.SCALES:  # by a norm that an SVD made: the rest is as it was
        some, _ = union([f for f in floats if not f.flags & SCALAR])
    return amounts | some & OF_MATRICES | (ASSEMBLED if name in _ASSEMBLE else 0)


def _amounts(floats: Sequence[Any]) -> int:
    """Returns `AMOUNTS` where an operation's operands are such, beside constants and numbers."""
    some, every = union([f for f in floats if not f.flags & (CONSTANT | SCALAR)])
    return some & every & AMOUNTS


def of_a_difference(eqn: Eqn, floats: Sequence[Any]) -> int:
    """Returns `STENCIL` for the difference of constants, of which one is an array."""
    is_of_an_array = not all(f.flags & SCALAR for f in floats)
    return STENCIL if eqn.primitive.name == "sub" and is_of_an_array else 0


def _may_join_a_solution(fact: Any) -> bool:
    """Whether a term of a sum is one, or constant: `x + solve(a, x)` is a stream like others."""
    return bool(fact.flags & (CONSTANT | SOLVED | BEHIND)) or _is_a_known_matrix(fact)


def _is_a_known_matrix(fact: Any) -> bool:
    """Whether an array is constant, or was put together of no layer's results."""
    if fact.flags & (CONSTANT | SCALAR) == CONSTANT:
        return True
    return fact.flags & (ASSEMBLED | PRODUCT) == ASSEMBLED


def signs(eqn: Eqn, floats: Sequence[Any]) -> int:
    """Returns `NEGATED` if a result turns the sign of a value, `EITHER` if that is not known."""
    name = eqn.primitive.name
    some, every = union(floats)
    if name in traits.ADDS:
        return some & EITHER
    if name in _MAKE_A_SIGN:
        return 0
    if name in traits.SCALES:
        turned = sum(bool(f.flags & NEGATED) for f in floats)
        return _of_factors(floats) if some & EITHER else NEGATED * (turned % 2)
    if not every & CONSTANT:  # a zero beside a value that is put into it has no sign
        some, every = union([f for f in floats if not f.flags & CONSTANT])
    sign = _of_several(some, every)
    return sign ^ NEGATED if name == "neg" and sign != EITHER else sign


def _of_several(some: int, every: int) -> int:
    """Returns the sign of what is one of several, given the flags that some, and that all, have."""
    return EITHER if some & EITHER or some & ~every & NEGATED else every & NEGATED


def _of_factors(floats: Sequence[Any]) -> int:
    """Returns `EITHER` for what weights of either sign scale, and for it, scaled by numbers."""
    others = [f.flags for f in floats if not f.flags & EITHER]
    by_weights = any(f.flags & (EITHER | PRODUCT) == EITHER for f in floats)
    return EITHER if by_weights or all(f & (CONSTANT | SCALAR) for f in others) else 0


def repeats(eqn: Eqn) -> bool:
    """Whether an operation is a broadcast that makes its operand larger."""
    return eqn.primitive.name == "broadcast_in_dim" and copies(eqn) > 1


def _makes_a_step(eqn: Eqn, floats: Sequence[Any]) -> bool:
    """Whether an equation multiplies a whole array by a small number, or by an unknown one."""
    if eqn.primitive.name not in traits.SCALES or len(floats) != 2:
        return False
    if not eqn.outvars[0].aval.shape:  # a ratio of two sums is no step
        return scales_down(eqn, floats)
    first, second = (f.flags & (CONSTANT | SCALAR) for f in floats)
    if not (first | second) & CONSTANT and first != second:  # a number, and a whole array
        return True
    return scales_down(eqn, floats)


def is_epsilon(fact: Any) -> bool:
    """Whether a constant is smaller than anything that it would cancel."""
    return bool(fact.flags & CONSTANT) and fact.most < _EPSILON


def scales_down(eqn: Eqn, floats: Sequence[Any], by: float = SMALL_STEP) -> bool:
    """Whether an equation, a `mul` or a `div`, makes a value smaller by a known number."""
    if eqn.primitive.name == "mul":
        return any(0 < f.least <= f.most <= by for f in floats if f.flags & CONSTANT)
    return bool(floats[1].flags & CONSTANT) and floats[1].least >= 1 / by


def scales_up(eqn: Eqn, floats: Sequence[Any], by: float) -> bool:
    """Whether an equation, a `mul` or a `div`, makes a value larger by a known number."""
    if eqn.primitive.name == "mul":
        return any(by <= f.least < math.inf for f in floats if f.flags & CONSTANT)
    return bool(floats[1].flags & CONSTANT) and 0 < floats[1].most <= 1 / by


def offset(eqn: Eqn, floats: Sequence[Any], some: int, *, cancels: bool) -> int:
    """Returns the offset of an operation's results, unless it adds a constant.

    Args:
      eqn: the operation.
      floats: the facts of its float operands.
      some: the flags that some of these have.
      cancels: whether it is a difference that takes an offset off.
    """
    name = eqn.primitive.name
    before = larger_offset(some)
    if name in traits.SHIFTS and not some & DERIVED:
        if some & PRODUCT and any(map(is_data, floats)):
            return before or BY_DATA
        if adds_a_bias(floats):
            return before or BY_A_BIAS
        if before == BY_A_BIAS and joins_a_stream(floats):
            return 0
    if not before or cancels:
        return 0
    if name in traits.SCALES:
        return _scaled_offset(floats, before)
    if before != BY_A_CONSTANT and totals.is_statistic(eqn):
        is_kept = before == BY_A_BIAS and not some & STREAM and _is_of_one_axis(eqn)
        return before if is_kept else 0
    return 0 if name in FUNCTIONS else before


def _is_of_one_axis(eqn: Eqn) -> bool:
    """Whether a statistic is of one axis, as a layer norm's and a softmax's are: of all channels.

    One of several is a group norm's of images, whose sum with a bias would be stored in float32.
    """
    return len(totals.removed_axes(eqn)) == 1


def _scaled_offset(floats: Sequence[Any], before: int) -> int:
    if before == BY_A_BIAS:  # by an array, that of each element is another one
        return before if any(f.flags & SCALAR for f in floats) else 0
    factors = [f for f in floats if not f.flags & (CONSTANT | SCALAR)]
    if not all(f.flags & (BY_DATA | BY_A_CONSTANT) for f in factors if f.flags & PRODUCT):
        return 0
    return BY_DATA if any(map(is_data, factors)) else before


def repeated(eqn: Eqn, floats: Sequence[Any]) -> Sequence[Any]:
    """Returns the facts of operands, with those repeated that JAX 0.12 lets an operation repeat.

    Beside what a product made of one example alone, data are taken for a bias.
    """
    if eqn.primitive.name not in _REPEATING or len(floats) != len(eqn.invars):
        return floats
    shape = eqn.outvars[0].aval.shape
    shapes = [v.aval.shape for v in eqn.invars]
    adds = eqn.primitive.name in traits.SHIFTS
    if not (adds and len(shape) == 1) and all(own == shape for own in shapes):  # most
        return floats
    return [
        f._replace(flags=f.flags | REPEATED)
        if len(own) == len(shape) and (own != shape or (adds and may_be_a_bias_of_one(f, shape)))
        else f
        for own, f in zip(shapes, floats, strict=True)
    ]


def may_be_a_bias_of_one(fact: Any, shape: Sequence[Any]) -> bool:
    """Whether data are added to one example alone: a bias, which repeats along no axis there."""
    return len(shape) == 1 and not fact.flags & (PRODUCT | CARRY | DERIVED | CONSTANT)


def is_data(fact: Any) -> bool:
    """Whether a value is an array that no product made: a bias that is repeated adds no offset."""
    return not (fact.flags & (CONSTANT | PRODUCT | SCALAR | REPEATED | ALIKE) or fact.along)


def adds_a_bias(floats: Sequence[Any]) -> bool:
    """Whether a number or a parameter that repeats is added to a product, and to no stream."""
    data = [f for f in floats if not f.flags & (CONSTANT | PRODUCT) and not is_data(f)]
    return bool(data) and any(f.flags & (PRODUCT | STREAM) == PRODUCT for f in floats)


def joins_a_stream(floats: Sequence[Any]) -> bool:
    """Whether all terms of a sum were made by products, or are data."""
    return len(floats) > 1 and all(f.flags & PRODUCT or is_data(f) for f in floats)


def of_branches(some: int, every: int) -> int:
    """Returns the flags of one of several values, `where(c, a, b)`: of those of some, of all."""
    kept = some & (PRODUCT | STREAM | OF_MATRICES) | every & (STENCIL | AMOUNTS | POSITIVE)
    return kept | _of_several(some, every) | larger_offset(some)


def larger_offset(some: int) -> int:
    """Returns the offset of a value that has those in some flags."""
    return next((o for o in (BY_A_CONSTANT, BY_DATA, BY_A_BIAS) if some & o), 0)
