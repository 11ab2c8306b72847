"""Values that float16 may not hold, past 65504 or below 6e-8: exponentials, and products.

A softmax takes the maximum of a row off first, so that its exponentials reach 1 and not more. The
`exp(-cost / 0.01)` of a Sinkhorn iteration, and the `exp(scores) @ values` of an attention without
a maximum, do not. And a gate `a * b` is past 65504 where `a` and `b` are of a few hundred.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpjax._autocast.known import contraction, factors, roots, scopes, totals, traits
from mpjax._autocast.known.fact_flags import (
    CARRY,
    CONSTANT,
    DERIVED,
    FUNCTIONS,
    MUCH,
    PRODUCT,
    REPEATED,
    SCALAR,
    is_data,
    is_epsilon,
    scales_down,
    scales_up,
    union,
)
from mpjax._jaxpr.equation import Eqn
from mpjax._jaxpr.op_rules import MOVES, PRODUCTS

TOP = 1 << 19
"""The maximum of rows, or a sum with it, such as a logsumexp."""
UNDER = 1 << 20
"""A distance to such a maximum, or limited by a constant: its exponential is in range."""
EXPONENTIAL = 1 << 21
"""The exponential of another value, a power of it, or what it is a factor of; or a sum of such."""
CHANCES = 1 << 22
"""An exponential in range, or one that was divided by a sum: what a softmax makes. Or 0 and 1."""
CURVED = 1 << 23
"""A function made it, such as a sigmoid: all of its elements may be small, and none is 0."""
GROWN = 1 << 24
"""A product of two values that are not bounded, each element by one, or `x.T @ x`; a quotient."""
INVERSE = 1 << 25
"""1 over a value, or over its root, times weights: by a norm's, values become smaller."""
WEIGHED = 1 << 26
"""A product of `CURVED` values with others, as `k.T @ v` is, and no layer: it may be as small."""
LARGE = 1 << 27
"""Multiplied by a number of 64 or more, or an unknown one, as scores before a sharp softmax."""
POWERS = 1 << 28
"""A sum of squares, such as a mean squared error, but not its root; or a third or higher power."""
OUTSIDE = 1 << 29
"""Past 65504 or below 6e-5, where float16 has few bits: a constant array, or one times a number."""
UNHELD = POWERS | OUTSIDE
"""Of a product that has such an operand, the other one may be out of range, too."""
OF_CARRIES = EXPONENTIAL | CURVED | WEIGHED | UNHELD
"""Flags that a loop's result has if what a turn leaves has them."""
_CUMULATIVE = frozenset({"cumprod", "cumlogsumexp"})
_EXPONENTIALS = frozenset({"exp", "exp2", "sinh", "cosh"})
_MULTIPLY = traits.SCALES | PRODUCTS
_HAND_ON_SIZE = factors.HANDS_ON | _MULTIPLY
_LIMITED = frozenset({"min", "clamp"})
_ALIKE = SCALAR | REPEATED
_FAR = 2.0**12  # a value of 16, or of 1/4, is out of float16's range behind it
_ADD_UP = frozenset({"reduce_sum", "reduce_window_sum", "cumsum", "scatter-add"}) | traits.ACROSS
_HAND_ON_RANGE = MOVES | traits.ADDS | traits.SCALES | traits.LIMITS | traits.JOINS | {"neg"}
_HAND_ON_POWERS = _HAND_ON_RANGE | _ADD_UP


def of_operation(eqn: Eqn, floats: Sequence[Any]) -> int:
    """Returns these flags of an operation's results, given the facts of its float operands."""
    some, _ = union(floats)
    flags = _of_exponentials(eqn, floats, some) | _curved(eqn, some) | _weighed(eqn, floats, some)
    flags |= _grown(eqn, floats, some) | _inverse(eqn, floats, some)
    flags |= _large(eqn, floats, some) | _outside(eqn, floats, some)
    return flags | _powers(eqn, floats, some)


def of_constants(eqn: Eqn, floats: Sequence[Any]) -> int:
    """Returns which of these flags are told of what constants alone make, such as counts."""
    some, _ = union(floats)
    return _of_exponentials(eqn, floats, some) & TOP | _large(eqn, floats, some)


def _curved(eqn: Eqn, some: int) -> int:
    """Returns `CURVED` of what a function made since the last product, or of a sum with it."""
    name = eqn.primitive.name
    if name in PRODUCTS:
        return 0
    return CURVED if name in FUNCTIONS or name in _CUMULATIVE else some & CURVED


def _weighed(eqn: Eqn, floats: Sequence[Any], some: int) -> int:
    name = eqn.primitive.name
    if name not in PRODUCTS:
        return 0 if name in FUNCTIONS else some & WEIGHED
    return WEIGHED if some & (CURVED | WEIGHED) and not _is_layer(eqn, floats) else 0


def _is_layer(eqn: Eqn, floats: Sequence[Any]) -> bool:
    """Whether a product adds up the features of an operand, by what no product made: parameters."""
    if len(floats) < 2:
        return False
    first, second = (bool(f.flags & PRODUCT) for f in floats[:2])
    if contraction.sums_last(eqn, 0) and not second:
        return True
    return contraction.sums_last(eqn, 1) and second and not first


def _grown(eqn: Eqn, floats: Sequence[Any], some: int) -> int:
    """Returns `GROWN` of a product or quotient, and of what is linear in one.

    Cotangents grow by the loss scale, which falls where they do not fit.
    """
    name = eqn.primitive.name
    if some & DERIVED or (name in _LIMITED and some & CONSTANT):
        return 0
    if name in PRODUCTS and not contraction.adds_nothing(eqn):
        return GROWN if is_gram(floats) else 0
    handed_on = some & GROWN if name in _HAND_ON_SIZE else 0
    if name not in _MULTIPLY or not all(map(_is_of_any_size, floats)):
        return handed_on
    return handed_on if name == "div" and is_by_its_own(*floats) else GROWN


def is_gram(floats: Sequence[Any]) -> bool:
    """Whether a product is of a value with itself, as `x.T @ x` is."""
    return len(floats) > 1 and floats[0].roots == floats[1].roots


def _inverse(eqn: Eqn, floats: Sequence[Any], some: int) -> int:
    """Returns `INVERSE` of what divides, such as a `rsqrt`, and of it times weights."""
    name = eqn.primitive.name
    if name == "rsqrt" or (name == "integer_pow" and eqn.params["y"] < 0):
        return INVERSE
    if name == "div" and floats[0].flags & CONSTANT:
        return INVERSE
    is_by_weights = name == "mul" and not all(f.flags & PRODUCT for f in floats)
    return some & INVERSE if name in MOVES or is_by_weights else 0


def _large(eqn: Eqn, floats: Sequence[Any], some: int) -> int:
    """Returns `LARGE` of what a number multiplies, and of what is moved, added to or limited."""
    name = eqn.primitive.name
    if name in traits.SCALES and (scales_up(eqn, floats, MUCH) or _has_a_temperature(eqn, floats)):
        return LARGE
    return some & LARGE if name in _HAND_ON_RANGE else 0


def _has_a_temperature(eqn: Eqn, floats: Sequence[Any]) -> bool:
    """Whether a parameter scales all that a product made, or rows of it: it may be 64, too."""
    if scopes.is_transposed(eqn) or not any(f.flags & PRODUCT for f in floats):
        return False
    return any(f.flags & _ALIKE and not f.flags & (PRODUCT | CONSTANT) for f in floats)


def _outside(eqn: Eqn, floats: Sequence[Any], some: int) -> int:
    """Returns `OUTSIDE` of what a number takes out of range, as in `(x * 1e-9) @ w`.

    Not of cotangents, which a mean over a million elements divides: a loss scale multiplies them.
    """
    name = eqn.primitive.name
    if name in traits.SCALES and not scopes.is_transposed(eqn):
        is_far = scales_up(eqn, floats, _FAR) or scales_down(eqn, floats, 1 / _FAR)
        return OUTSIDE if is_far else 0
    return some & OUTSIDE if name in MOVES else 0


def _powers(eqn: Eqn, floats: Sequence[Any], some: int) -> int:
    """Returns `POWERS` of a sum of squares, a cube, and what is linear in one."""
    name = eqn.primitive.name
    if name in PRODUCTS:
        return POWERS if contraction.only_sums(eqn) and is_gram(floats) else 0
    if not scopes.is_transposed(eqn):
        is_statistic = totals.is_statistic(eqn) and floats[0].factors > 1
        if is_statistic or (name in factors.MULTIPLY and factors.count(eqn, floats) > 2):
            return POWERS
    if (name in _LIMITED and some & CONSTANT) or (name == "div" and not _is_a_number(floats[1])):
        return 0
    return some & POWERS if name in _HAND_ON_POWERS else 0


def _is_by_constants(floats: Sequence[Any]) -> bool:
    """Whether a product adds an operand up, by constants such as ones."""
    return any(f.flags & CONSTANT for f in floats[:2])


def _is_a_number(fact: Any) -> bool:
    return bool(fact.flags & (CONSTANT | SCALAR))


def _is_of_any_size(fact: Any) -> bool:
    """Whether a value is data or made by products, and not bounded, as a sigmoid is."""
    if not fact.factors or fact.flags & (CONSTANT | SCALAR | CHANCES | INVERSE):
        return False
    return bool(fact.flags & PRODUCT) or is_data(fact)


def is_by_its_own(first: Any, second: Any) -> bool:
    """Whether a quotient is by a statistic, or by a function of the value: `h / (1 + |h|)`."""
    return bool(second.flags & REPEATED) or roots.meet(first.roots, second.roots)


def _of_exponentials(eqn: Eqn, floats: Sequence[Any], some: int) -> int:
    name = eqn.primitive.name
    if name in _EXPONENTIALS or (name == "pow" and floats[0].flags & CONSTANT):
        return CHANCES if some & UNDER else EXPONENTIAL
    if name in traits.EXTREME:
        return TOP | some & EXPONENTIAL
    if name in _ADD_UP or (name in PRODUCTS and _is_by_constants(floats)):
        return some & EXPONENTIAL
    if name in _LIMITED and any(f.flags & CONSTANT for f in floats):
        return UNDER
    if name in MOVES or name in traits.JOINS or name in traits.LIMITS:
        return some & (TOP | UNDER | EXPONENTIAL | CHANCES)
    if name == "sub" and floats[-1].flags & TOP:
        return UNDER
    if name in traits.ADDS:
        # The carry of a loop that adds up is what is added to it.
        _, every = union([f for f in floats if not (is_epsilon(f) or f.flags & CARRY)])
        return some & (TOP | UNDER | every & EXPONENTIAL)
    if name in traits.SCALES:
        if any(map(_is_a_number, floats)):
            return some & (UNDER | EXPONENTIAL | CHANCES)
        if name == "mul":  # a loss scale falls where a cotangent does not fit
            return 0 if some & DERIVED else some & EXPONENTIAL
        return CHANCES if floats[0].flags & (EXPONENTIAL | CHANCES) else 0
    if name in traits.POWERS:
        return some & EXPONENTIAL
    return some & UNDER if name == "neg" else 0


def of_branches(some: int, every: int) -> int:
    """Returns these flags of one of several values, `where(c, a, b)`: of those of some, of all."""
    return some & (EXPONENTIAL | CURVED | WEIGHED | GROWN | LARGE | UNHELD) | every & (
        TOP | UNDER | CHANCES | INVERSE
    )


def of_logic(eqn: Eqn) -> int:
    """Returns `CHANCES` of booleans that are made floats, such as one-hot rows."""
    is_converted = eqn.primitive.name == "convert_element_type"
    return CHANCES if is_converted and eqn.invars[0].aval.dtype == np.bool_ else 0
