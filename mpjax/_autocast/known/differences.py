"""Differences and quotients of what products made, and sums that are differences."""

from __future__ import annotations

from mpjax._autocast.known import ranges, repeats, scopes, terms, totals, traits
from mpjax._autocast.known import roots as made_of
from mpjax._autocast.known.fact_flags import CONSTANT, EITHER, OFFSET, PRODUCT, is_data
from mpjax._autocast.known.facts import Fact, Facts, may_subtract, of_atom, summands
from mpjax._jaxpr.equation import Eqn


def is_of_products(eqn: Eqn, facts: Facts) -> bool:
    """Whether a difference is of two products over one value, or of a value and a product over it.

    As `b @ w - a @ w` is, which is as the difference of two rows of one product; or `x - blur(x)`.
    """
    pairs = _subtracted(eqn, facts)
    return any(terms.over_one(a.terms, b.terms) for a, b in pairs[:1]) or any(
        _is_over(a, b) for a, b in pairs
    )


def are_levels(eqn: Eqn, facts: Facts) -> list[bool]:
    """Returns, for both terms of a difference, whether it is the level of what it is taken off.

    As in `u - weights @ u` of `u = x @ w + b`. Nothing for other operations.
    """
    return [repeats.is_level(a, b) for a, b in _subtracted(eqn, facts)]


def _is_over(product: Fact, value: Fact) -> bool:
    if value.flags & CONSTANT:
        return False
    return terms.over_one(product.terms, [terms.Term(value.roots, -1, is_product=True)])


def data_taken_off(eqn: Eqn, facts: Facts) -> Fact | None:
    """Returns the fact of data that are taken off what a product made, or it off them.

    They may be what an earlier call made of the same: `logp(w, x) - old`, which PPO exponentiates.
    """
    pairs = _subtracted(eqn, facts)
    return next((b for a, b in pairs if a.flags & PRODUCT and is_data(b)), None)


def _subtracted(eqn: Eqn, facts: Facts) -> list[tuple[Fact, Fact]]:
    """Returns the two values of a difference that its author wrote, in both orders, or nothing."""
    name = eqn.primitive.name
    if name not in traits.SHIFTS or scopes.is_transposed(eqn):
        return []
    first, second = (of_atom(v, facts) for v in eqn.invars)
    return [(first, second), (second, first)] if may_subtract(name, first, second) else []


def is_of_one(eqn: Eqn, facts: Facts) -> bool:
    """Whether a difference is of two functions of one value, or of two of its places.

    As `exp(s) - 1 - s`: where a product made `s`, the cotangents of both cancel in its result. Or
    `c[-1] - c`, `c[:, None] - c`.
    """
    return made_of.meet(*(of_atom(v, facts).roots for v in summands(eqn)))


def is_weighted_mean(eqn: Eqn, facts: Facts) -> bool:
    """Whether a quotient is a product over a sum of its weights: `w.T @ x / w.sum(0)`.

    Or a product times 1 over that sum.
    """
    name = eqn.primitive.name
    if name not in traits.SCALES or scopes.is_transposed(eqn):
        return False
    first, second = (of_atom(v, facts) for v in eqn.invars)
    pairs = [(first, second)] if name == "div" else [(first, second), (second, first)]
    by_power = name == "mul"
    return any(
        terms.is_normalised(a.terms, _sums_of_weights(b), by_power=by_power) for a, b in pairs
    )


def _sums_of_weights(fact: Fact) -> list[terms.Term]:
    """Returns the terms of a value that may be sums of weights: `q @ k.sum(0)`, and no spread.

    A `softplus(h @ w)` and a `1 + abs(h @ w)` do not become smaller as `h` does.
    """
    has_more = fact.flags & (ranges.CURVED | OFFSET)
    return [t for t in fact.terms if not (t.is_product and has_more)]


def is_weighted_sum(eqn: Eqn, facts: Facts) -> bool:
    """Whether an equation adds up values with an offset, some of them negated."""
    if eqn.primitive.name in traits.SCATTERS:
        added_up = eqn.invars[2]
    elif totals.is_total(eqn):
        added_up = eqn.invars[0]
    else:
        return False
    flags = of_atom(added_up, facts).flags
    return bool(flags & EITHER and flags & OFFSET)
