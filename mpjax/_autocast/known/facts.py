"""Facts of values: whether they are made of constants alone, of which values, of which sums.

`walk` finds them. A value's *roots* are what it is an elementwise function of; its *terms* are the
products and sums that it is a sum of. Roots show that a difference is of almost the same
(`is_difference`), terms that a formula such as `|a|² + |b|² - 2ab` cancels (`cancelling`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from mpjax._autocast.known import (
    chains,
    fact_flags,
    repeats,
    scopes,
    terms,
    totals,
    traits,
)
from mpjax._autocast.known import roots as made_of
from mpjax._autocast.known.fact_flags import (
    CONSTANT,
    EITHER,
    NEGATED,
    OFFSET,
    POSITIVE,
    PRODUCT,
    SCALAR,
)
from mpjax._base import compat
from mpjax._jaxpr.equation import Eqn
from mpjax._jaxpr.op_rules import PRODUCTS
from mpjax._jaxpr.sizes import is_float32


class Fact(NamedTuple):
    """One value: numbers stand for other values, and are those of one program."""

    flags: int = 0
    least: float = 0.0  # what the magnitudes of a constant lie between, where they are known
    most: float = math.inf
    roots: made_of.Roots = frozenset()
    terms: terms.Terms = terms.NONE
    along: int = 0  # axes along which it repeats: see `repeats`
    added: frozenset[repeats.Added] = frozenset()  # what was added to it, and repeats
    chain: chains.Chain = chains.NONE  # which matrices it was multiplied by
    factors: int = 1  # how often a value is multiplied by itself in it


SOME_CONSTANT = Fact(CONSTANT)


class Entered(NamedTuple):
    """How facts enter a program inside an equation."""

    given: tuple[Fact, ...]  # of its inputs, numbered from 0 up
    outside: dict[int, int]  # for each number inside, which one it is outside: -1 if it has none


class Facts(dict[Any, Fact]):
    """The fact of each variable of a program."""

    def __init__(self, known: Iterable[tuple[Any, Fact]]) -> None:
        super().__init__(known)
        self.entered: dict[tuple[int, int], Entered] = {}  # by an equation's and a program's `id`


def of_atom(atom: Any, facts: Facts) -> Fact:
    """Returns the fact of a variable or of a literal."""
    if not compat.is_literal(atom):
        return facts[atom]
    if atom.aval.shape or not is_float32(atom):
        return SOME_CONSTANT
    value = float(atom.val)
    return Fact(CONSTANT | SCALAR | (NEGATED if value < 0 else 0), abs(value), abs(value))


def cancelling(eqn: Eqn, facts: Facts, *, of_sums: bool = False) -> list[terms.Term]:
    """Returns the terms of a sum that cancel: see `terms.cancelling`."""
    if eqn.primitive.name not in traits.ADDS or scopes.is_transposed(eqn):
        return []  # a derivative's sums are of what JAX adds up, and no formula of the author's
    first, second = (of_atom(v, facts) for v in eqn.invars)
    if eqn.primitive.name != "sub" and first.flags & second.flags & POSITIVE:
        return []
    return terms.cancelling(first.terms, second.terms, of_sums=of_sums)


def is_difference(eqn: Eqn, facts: Facts) -> bool:
    """Whether an equation subtracts values that may be almost the same.

    They are made of the same, element by element, as `f(z + 0.01)` and `f(z)`. Or something was
    added to both, as to `300 + z` and its mean, or as a bias to examples and their mean; or it was
    added and is taken off, as `y + z - y`, also by a table: `300 + z - grid[i]`. A sum subtracts
    where a sign was turned, or where it is not known, as of the weights of a stencil.
    """
    if scopes.is_transposed(eqn) or not (atoms := summands(eqn)):
        return False
    name = "sub" if eqn.primitive.name.endswith("sub") else "add"
    first, second = (of_atom(v, facts) for v in atoms)
    if (first.flags | second.flags) & CONSTANT:
        is_table = second.flags & (CONSTANT | SCALAR) == CONSTANT
        return name == "sub" and is_table and bool(first.flags & OFFSET)
    some = first.flags | second.flags
    if not (may_subtract(name, first, second) or (some & EITHER and some & OFFSET)):
        return False
    if made_of.meet(first.roots, second.roots) or repeats.shared(first, second):
        return True
    without = [f for f in (first, second) if not f.flags & OFFSET]
    return len(without) < 2 and not any(f.flags & (PRODUCT | EITHER) == PRODUCT for f in without)


def summands(eqn: Eqn) -> Sequence[Any]:
    """Returns the two values that an author adds or subtracts, also by `x.at[i].add(y)`."""
    name = eqn.primitive.name
    if name in traits.SHIFTS:
        return eqn.invars
    return (eqn.invars[0], eqn.invars[2]) if name in traits.SCATTERS else ()


def may_subtract(name: str, first: Fact, second: Fact) -> bool:
    """Whether a sum or a difference takes one value off the other, as far as signs are known."""
    return (name == "add") == bool((first.flags ^ second.flags) & NEGATED)


def adds_a_constant(eqn: Eqn, facts: Facts) -> bool:
    """Whether an equation adds a known number, or takes it off, that is not small."""
    if eqn.primitive.name not in traits.SHIFTS:
        return False
    operands = [of_atom(v, facts) for v in eqn.invars]
    known = [f for f in operands if f.flags & CONSTANT]
    return len(known) == 1 and not fact_flags.is_epsilon(known[0]) and known[0].most < math.inf


def hands_on_terms(eqn: Eqn) -> bool:
    """Whether an operation's result may be a sum of what its operands are sums of."""
    return eqn.primitive.name not in fact_flags.FUNCTIONS and not adds_up(eqn)


def adds_up(eqn: Eqn) -> bool:
    """Whether an operation's result is a term of its own."""
    name = eqn.primitive.name
    return name in PRODUCTS or name == "reduce_window_sum" or totals.is_total(eqn)
