"""Ill-conditioned readers: operations that read how far a value is from a constant.

A probability of 0.9999 is 1 in bfloat16. A product does not mind; `log(1 - q)` reads the distance
to 1, of which nothing is left. So a value that such an operation reads is not rounded, whatever
lies between: moves, choices, arithmetic, sums, calls. The way back ends at a product, whose own
result may be rounded, and at a function that saturates, such as a sigmoid: what such a function
reads may be rounded, since `log(1 - sigmoid(z))` is a smooth function of `z`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from mpjax._autocast.decide.read_flags import (
    AGAIN,
    BELOW,
    CANCELS,
    DIFFERENCE,
    DIVIDED,
    FORWARD,
    NEAR,
    OUTPUT,
    RELATIVE,
    RESULT,
    RUINED,
    SCALED,
    SOLUTION,
    TESTED,
)
from mpjax._autocast.known import (
    differences,
    fact_flags,
    factors,
    facts,
    linear,
    ranges,
    roots,
    scopes,
    totals,
    traits,
)
from mpjax._base import compat
from mpjax._jaxpr import structure
from mpjax._jaxpr.equation import Eqn
from mpjax._jaxpr.op_rules import OP_RULES, PRODUCTS
from mpjax._jaxpr.sizes import is_float32, is_number

_STOP_A_DIFFERENCE = PRODUCTS | (traits.LOOKS - traits.FUSIBLE)
"""Through all others a difference that is taken of results is taken of operands, too."""
_STOP_A_DISTANCE = _STOP_A_DIFFERENCE | traits.SATURATES
"""Through all others a distance that is read of results is read of operands, too."""
_WITHOUT_A_CLASS = traits.LOOKS | traits.HANDS_ON
_HANDED_ON = NEAR | CANCELS | RUINED | DIFFERENCE | AGAIN | RESULT | SOLUTION | RELATIVE | DIVIDED


def how_read(eqn: Eqn, out_read: int, known: facts.Facts) -> int:
    """Returns how an operation, or a later reader of its results, reads its operands.

    Args:
      eqn: the operation.
      out_read: how its results are read.
      known: the facts of its program.
    """
    read = of_itself(eqn, out_read, known)
    if not out_read & _HANDED_ON:
        return read
    name = eqn.primitive.name
    if name not in _STOP_A_DISTANCE:
        read |= out_read & (NEAR | RESULT)
    if name not in _STOP_A_DIFFERENCE:
        read |= out_read & (DIFFERENCE | AGAIN)
    if name not in PRODUCTS and name not in fact_flags.FUNCTIONS:
        read |= out_read & DIVIDED
    if facts.hands_on_terms(eqn):
        read |= out_read & (CANCELS | BELOW)
    elif out_read & CANCELS:
        read |= RUINED  # all terms of the difference are of the same, unrounded values
    if name in traits.OF_FEW or totals.is_along_one(eqn):
        read |= out_read & RUINED
    if out_read & (SOLUTION | RELATIVE):
        read |= out_read & _of_a_matrix(eqn, known)
    return read


def _of_a_matrix(eqn: Eqn, known: facts.Facts) -> int:
    """Returns the flags of what is solved for or transformed, where an operation hands them on."""
    name = eqn.primitive.name
    if name in traits.POWERS:
        return SOLUTION | RELATIVE
    if name == "abs":
        return RELATIVE
    operands = [facts.of_atom(v, known) for v in eqn.invars]
    if name in traits.SCALES and factors.is_gated(operands):
        return 0
    is_linear = linear.is_linear(eqn, lambda i: operands[i].flags & fact_flags.PRODUCT)
    return SOLUTION | RELATIVE if is_linear else 0


def of_a_test(eqn: Eqn) -> list[int]:
    """Returns how a loop's stop test reads the operands of an operation whose result it reads.

    All that its floats are made of, products included: rounded anew in each turn, a change need
    never fall below a tolerance. Integers end the way: a decoder stops at a token.
    """
    return [TESTED if _is_compared(v.aval) else 0 for v in eqn.invars]


def _is_compared(aval: Any) -> bool:
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and (
        jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.bool_)
    )


def of_itself(eqn: Eqn, out_read: int, known: facts.Facts) -> int:
    """Returns how an operation reads its operands, whoever reads its results."""
    name = eqn.primitive.name
    if name in traits.SOLVES or (name == "fft" and out_read & (NEAR | RELATIVE | SOLUTION)):
        return SOLUTION
    if name in traits.ANGLES or name in traits.DISTANCES:
        return NEAR | RESULT
    if name in factors.MULTIPLY:
        many = factors.makes_many(eqn, [facts.of_atom(v, known) for v in eqn.invars])
        return NEAR | RESULT if many else _of_a_mean(eqn, known)
    if read := decides(eqn, out_read, known):
        return read
    if name in traits.SCATTERS:
        return _of_a_scattered_sum(eqn, known)
    if name not in traits.ADDS:
        return DIFFERENCE if differences.is_weighted_sum(eqn, known) else _of_a_mean(eqn, known)
    read = 0
    if _adds_a_point(eqn, known):  # `1 + scale` may be near 0 by chance, `1 - cosine` is by design
        read = NEAR | RESULT if name == "sub" else NEAR
    # In a network, norms are written as `mean(h²) - mean(h)²`, too, of values that are stored low.
    if terms := facts.cancelling(eqn, known, of_sums=not out_read & FORWARD):
        read |= CANCELS | RUINED | (BELOW if any(t.is_summed for t in terms) else 0)
    if facts.is_difference(eqn, known):
        read |= DIFFERENCE | (RESULT if differences.is_of_one(eqn, known) else 0)
    if differences.is_of_products(eqn, known):
        read |= DIFFERENCE | RESULT
    if data := differences.data_taken_off(eqn, known):
        read |= DIFFERENCE | RESULT if data.terms else OUTPUT
    return read | (NEAR | RESULT if _is_sharp(eqn, known) else 0)


def _of_a_scattered_sum(eqn: Eqn, known: facts.Facts) -> int:
    """Returns how `x.at[i].add(-y)` reads `x` and `y`: as `x - y` does."""
    first, _, added = (facts.of_atom(v, known) for v in eqn.invars)
    if differences.is_weighted_sum(eqn, known) or facts.is_difference(eqn, known):
        return DIFFERENCE | (RESULT if differences.is_of_one(eqn, known) else 0)
    is_moved = first.flags & fact_flags.OFFSET and added.flags & fact_flags.CONSTANT
    return NEAR | RESULT if is_moved and not scopes.is_transposed(eqn) else 0


def _is_sharp(eqn: Eqn, known: facts.Facts) -> bool:
    """Whether a maximum is taken off large multiples, as in `softmax(1000 * counts)`.

    Their distance to it may be less than the last place of the largest.
    """
    if eqn.primitive.name != "sub":
        return False
    first, second = (facts.of_atom(v, known).flags for v in eqn.invars)
    return bool(first & ranges.LARGE and second & ranges.TOP)


def _of_a_mean(eqn: Eqn, known: facts.Facts) -> int:
    return DIVIDED if differences.is_weighted_mean(eqn, known) else 0


def ruins(eqn: Eqn) -> bool:
    """Whether an operation needs its operands unrounded: a factorisation, or one without a rule."""
    name = eqn.primitive.name
    if name in traits.UNFORGIVING or structure.applies_function(eqn):
        return True
    return name not in OP_RULES and name not in _WITHOUT_A_CLASS


def of_levels(eqn: Eqn, out_read: int, known: facts.Facts) -> list[int]:
    """Returns how a difference reads the level of a value with an offset: `u - weights @ u`.

    Operands that are rounded would lose what the difference leaves. In a network, whose later
    layers read it, a person who casts by hand rounds them too. Of the level, products and sums read
    all but the value so: `weights`, if a product made them.
    """
    if out_read & BELOW and facts.adds_up(eqn):
        to_result, *to = (facts.of_atom(v, known).added for v in (eqn.outvars[0], *eqn.invars))
        if not any(a.by_product for a in to_result):
            return [CANCELS] * len(to)
        return [0 if any(not a.by_product for a in each) else CANCELS | BELOW for each in to]
    if out_read & FORWARD:
        return []
    levels = differences.are_levels(eqn, known)
    own = CANCELS | BELOW | DIFFERENCE | RESULT
    return [own if is_level else DIFFERENCE * any(levels) for is_level in levels]


def of_factors(eqn: Eqn, known: facts.Facts) -> list[int]:
    """Returns how a `mul` or `div` reads its operands.

    `h = h * decay`, of a loop's carry: a rounding of `decay` is repeated in each turn. And what is
    scaled may be out of float16's range, as in `h.T @ h / 2048` or `(x @ w8) * scale`. The gradient
    of a variance, `2 * h * c - 2 * h.mean() * c`, cancels an offset of `h`.
    """
    floats = [facts.of_atom(v, known) for v in eqn.invars]
    if scopes.is_transposed(eqn):
        reads = _of_a_derivative(eqn, floats)
    else:
        reads = [SCALED if _scales(eqn, floats) else 0] * len(floats)
    if not any(f.flags & fact_flags.CARRY for f in floats):
        return reads
    in_a_loop = fact_flags.CARRY | fact_flags.ENTERED
    entered = [f.flags & in_a_loop == fact_flags.ENTERED for f in floats]
    return [NEAR | r if e else r for e, r in zip(entered, reads, strict=True)]


def _of_a_derivative(eqn: Eqn, floats: Sequence[facts.Fact]) -> list[int]:
    """Returns how a `mul` or `div` reads what it scales by a cotangent that several elements share.

    Such is that of a mean; the offset is no part of a derivative.
    """
    shape = eqn.outvars[0].aval.shape
    is_shared = any(
        f.flags & fact_flags.DERIVED and (f.flags & fact_flags.REPEATED or v.aval.shape != shape)
        for v, f in zip(eqn.invars, floats, strict=True)
    )
    has_offset = (
        f.flags & (fact_flags.BY_A_BIAS | fact_flags.BY_A_CONSTANT)
        and not f.flags & (fact_flags.DERIVED | fact_flags.STREAM)
        for f in floats
    )
    return [DIFFERENCE if is_shared and has else 0 for has in has_offset]


def _scales(eqn: Eqn, floats: Sequence[facts.Fact]) -> bool:
    """Whether a value is scaled by a known number that is far from 1, or by one not known."""
    made = fact_flags.PRODUCT | fact_flags.CONSTANT
    is_by_data = any(not f.flags & made for f in floats)  # a parameter or an input
    if is_by_data and any(f.flags & fact_flags.PRODUCT for f in floats):
        return True
    if fact_flags.scales_down(eqn, floats, 1 / fact_flags.MUCH):
        return True
    return fact_flags.scales_up(eqn, floats, fact_flags.MUCH)


def decides(eqn: Eqn, out_read: int, known: facts.Facts) -> int:
    """Returns how an operation that compares, sorts or counts reads its operands, or 0.

    Of what a product made, rounding makes different values equal, or moves an integer: `z > kth`,
    `argmax(z)`, `z.astype(int)`. Values with an offset are close to each other beside it:
    `300 + z > c`; there a product's own result may be rounded.
    """
    name = eqn.primitive.name
    is_count = name == "convert_element_type" and not is_number(eqn.outvars[0])
    if not (is_count or name in traits.DECIDES) or scopes.is_transposed(eqn):
        return 0
    floats = [facts.of_atom(v, known) for v in eqn.invars if is_float32(v)]
    if any(compat.is_literal(v) and v.val == 0 for v in eqn.invars):
        return 0  # a sign, as of a relu
    read = NEAR if any(f.flags & fact_flags.OFFSET for f in floats) else 0
    made = fact_flags.PRODUCT | fact_flags.DERIVED
    of_products = any(f.flags & made == fact_flags.PRODUCT for f in floats)
    return read | RUINED if of_products and _may_tie(eqn, out_read, floats) else read


def _may_tie(eqn: Eqn, out_read: int, floats: Sequence[facts.Fact]) -> bool:
    """Whether a decision is another one where rounding makes two values equal."""
    if eqn.primitive.name in traits.EQUALS:
        return len(floats) < 2 or not _asks_what_was_chosen(out_read, floats)
    if eqn.primitive.name in traits.SELECTS:
        return len(eqn.outvars) > 1  # or a sort of values alone
    # Near a constant threshold few values change sides.
    return len(eqn.invars) == 1 or not any(f.flags & fact_flags.CONSTANT for f in floats)


def _asks_what_was_chosen(out_read: int, floats: Sequence[facts.Fact]) -> bool:
    """Whether an equality is one of JAX's derivatives: of a maximum, or of one of two values.

    They are read by a backward pass alone; all of several equal values get its cotangent.
    """
    if roots.meet(floats[0].roots, floats[1].roots):  # `z == maximum(z, y)`
        return True
    is_extreme = any(f.flags & fact_flags.EXTREME for f in floats)  # `z == z.max()`
    return is_extreme and not out_read & (FORWARD | OUTPUT)


def _adds_a_point(eqn: Eqn, known: facts.Facts) -> bool:
    """Whether a constant is added that the other term may come close to.

    Positions or a mask, added to logits, are no such point, and a constant and a small step cancel
    nothing.
    """
    if not facts.adds_a_constant(eqn, known):
        return False
    return not any(facts.of_atom(v, known).flags & fact_flags.STEP for v in eqn.invars)
