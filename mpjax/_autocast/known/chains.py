"""Chains of products: how often a value was multiplied by the same matrix, linearly.

`matrix_power(m, 64)` is a chain of 64 factors `m`, and `v = r + p @ v`, written out 20 times, is
one of 20 factors `p`. Nothing in a chain forgets: an error of one factor is multiplied by all later
ones. The same in a loop is what `iterations` tells. A layer that reads the chain's result reads it
as any other: its own result is no part of the chain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from mpjax._autocast.known import roots as made_of
from mpjax._autocast.known import traits
from mpjax._autocast.known.fact_flags import PRODUCT
from mpjax._autocast.known.linear import is_linear
from mpjax._jaxpr.equation import Eqn
from mpjax._jaxpr.op_rules import PRODUCTS

Chain: TypeAlias = "frozenset[tuple[made_of.Roots, int]]"
"""The factors of a value, by their roots, and how often each is one."""
NONE: Chain = frozenset()
MANY = 16
"""The errors of fewer factors are those of as many layers."""
_MOST = 4


def after(eqn: Eqn, operands: Sequence[Any]) -> Chain:
    """Returns the chain of an operation's results, given the facts of its operands."""
    name = eqn.primitive.name
    if name in PRODUCTS:
        return _multiplied(*operands[:2])
    others = [f for f in operands if not f.chain]
    if len(others) == len(operands):
        return NONE
    if not is_linear(eqn, lambda i: operands[i].flags & PRODUCT):
        return NONE
    # A norm, by which a value is divided, is made of it: the quotient is not linear in it.
    if name in traits.SCALES and (len(others) != 1 or others[0].flags & PRODUCT):
        return NONE
    return joined(f.chain for f in operands)


def _multiplied(first: Any, second: Any) -> Chain:
    """Returns the chain of a product. One by a matrix that is no factor of a long chain ends it."""
    counts = [_factors(f) for f in (first, second)]
    if counts[0].keys().isdisjoint(counts[1]):
        counts = [c for c, f in zip(counts, (first, second), strict=True) if not is_long(f.chain)]
    return _few(sum(counts, Counter()))


def joined(several: Iterable[Chain]) -> Chain:
    """Returns the chain of a sum, or of one of several values: the longest ones."""
    longest: Counter[made_of.Roots] = Counter()
    for chain in several:
        longest |= Counter(dict(chain))
    return _few(longest)


def is_long(chain: Chain) -> bool:
    """Whether a value was multiplied by one matrix many times."""
    return any(count >= MANY for _, count in chain)


def renumbered(chain: Chain, number: Callable[[int], int]) -> Chain:
    """Returns the same chain in other numbers, asked for in order."""
    ordered = sorted(chain, key=lambda link: (sorted(made_of.numbers(link[0])), link[1]))
    return frozenset((made_of.renumbered(roots, number), count) for roots, count in ordered)


def _factors(fact: Any) -> Counter[made_of.Roots]:
    return Counter(dict(fact.chain) if fact.chain else {fact.roots: 1})


def _few(counts: Counter[made_of.Roots]) -> Chain:
    """Returns factors; of many, those that are there more than once, or none."""
    links = [(roots, min(count, MANY)) for roots, count in counts.items() if roots]
    if len(links) > _MOST:
        links = [link for link in links if link[1] > 1]
    return frozenset(links) if len(links) <= _MOST else NONE
