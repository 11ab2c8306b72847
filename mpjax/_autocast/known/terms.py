"""Terms: the products and sums that a value is a sum of, and when two of them cancel.

`|a|² + |b|² - 2ab` is of three: two sums over the elements of `a` and `b`, and a product over both.
`E[x y] - E[x] E[y]` is of a product, and of a power of sums over the same values, and the distance
of two means, `E[a aᵀ] + E[b bᵀ] - 2 E[a bᵀ]`, is of products alone. In each case the terms are
large, and what is left of them may be small.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeAlias

from mpjax._autocast.known import roots as made_of

_MOST = 8


class Term(NamedTuple):
    """A product, or a sum of elements: what it is over, and which one it is."""

    roots: made_of.Roots
    number: int
    is_product: bool
    is_power: bool = False  # squared, or the root of it, on the way to where it is added
    is_summed: bool = False  # a product or a sum was taken of it, as by the second of two blurs
    is_gram: bool = False  # of a value with itself: a product `a @ a.T`, or a sum of squares
    factors: frozenset[int] = frozenset()  # of `t * x`: the numbers of those that are products


Terms: TypeAlias = frozenset[Term]
NONE: Terms = frozenset()


def few(terms: Iterable[Term]) -> Terms:
    """Returns terms; of many, as a Python loop over batches adds up, one for all of a kind."""
    some = frozenset(terms)
    return some if len(some) <= _MOST else _of_kinds(some, lambda t: t.number)


def cancelling(first: Terms, second: Terms, *, of_sums: bool = False) -> list[Term]:
    """Returns the terms of two values that cancel when these are added.

    Args:
      first: the terms of one value.
      second: those of the other.
      of_sums: whether sums over a product count too, as in `trace(g)² - sum(g²)`.
    """
    over_a_gram = of_sums and _are_over_a_gram(first, second)
    pairs = itertools.product(first, second)
    cancel = (
        (a, b)
        for a, b in pairs
        if _cancel(a, b) or (of_sums and _cancel_as_sums(a, b, over_a_gram=over_a_gram))
    )
    return [term for pair in cancel for term in pair]


def _are_over_a_gram(first: Terms, second: Terms) -> bool:
    """Whether both values are of sums over one product of a value with itself.

    A few directions make most of it. What is left of a sum without these is small beside it.
    """
    summed = [
        {t.number: t for t in terms if t.is_product and t.is_summed} for terms in (first, second)
    ]
    both = summed[0].keys() & summed[1].keys()
    return any(terms[number].is_gram for terms in summed for number in both)


def _cancel_as_sums(a: Term, b: Term, *, over_a_gram: bool) -> bool:
    """Whether one of two terms is a power of a sum, and the other a sum over the same values.

    Or the trace of a product with itself, `trace(g)² - trace(g @ g)`.
    """
    if a.is_power == b.is_power:
        return False
    power, other = (a, b) if a.is_power else (b, a)
    is_trace = other.is_product and other.is_gram and other.is_summed
    if power.is_product or not (is_trace or (over_a_gram and not other.is_product)):
        return False
    return made_of.among(a.roots, b.roots) and made_of.among(b.roots, a.roots)


def _cancel(a: Term, b: Term) -> bool:
    """Whether terms are over the same values, in two ways, and one of them is a product."""
    if a.number == b.number or a.number in b.factors or b.number in a.factors:
        return False  # as `t + t * x ** 2`, a derivative, or `shift + scale * sum(x)`
    if (a.is_product, a.is_power) == (b.is_product, b.is_power):
        return _is_gram_beside(a, b) or _is_gram_beside(b, a)
    if not (a.is_product or b.is_product) or a.is_summed != b.is_summed:
        return False
    if b.is_power:
        a, b = b, a
    first, second = map(made_of.unless_constant, (a.roots, b.roots))  # a constant weights a sum
    within, around = made_of.among(first, second), made_of.among(second, first)
    # What else a product is over weights it: `w` in `E[x y]`. But `x y - x` does not cancel.
    if a.is_product and b.is_product:
        return within and (around or not a.is_summed)
    if not a.is_summed:
        return within or around
    if (b if a.is_product else a).is_gram:  # as by batches: `|a|²` and `|b|²`, of values of `2ab`
        return within if b.is_product else around
    return within and around


def _is_gram_beside(gram: Term, other: Term) -> bool:
    """Whether one product is of a value with itself, and the other of it with another value.

    As in `mean(a @ a.T) + mean(b @ b.T) - 2 * mean(a @ b.T)`, the square of a difference of means.
    """
    if not (gram.is_gram and gram.is_product) or other.is_gram or gram.is_power:
        return False
    if gram.is_summed != other.is_summed:
        return False
    return made_of.among(gram.roots, other.roots)


def over_one(first: Iterable[Term], second: Iterable[Term]) -> bool:
    """Whether two products, each one of some terms, are over one value: `a @ w` and `b @ w`."""
    pairs = itertools.product(*(filter(_is_plain_product, terms) for terms in (first, second)))
    return any(
        made_of.meet(*(made_of.unless_constant(t.roots) for t in (a, b)))
        for a, b in pairs
        if a.number != b.number
    )


def is_normalised(first: Iterable[Term], second: Iterable[Term], *, by_power: bool) -> bool:
    """Whether a product is over one of its operands a sum is over: `w.T @ x` and `w.sum(0)`.

    Args:
      first: the terms of what the product is in.
      second: those of what the sum is in.
      by_power: whether that is a power of the sum, as 1 over it is.
    """
    products = (t for t in first if t.is_product and not t.is_power)
    sums = (t for t in second if t.is_power == by_power)
    return any(
        made_of.meet(*(made_of.unless_constant(t.roots) for t in pair))
        for pair in itertools.product(products, sums)
        if pair[0].number != pair[1].number and pair[0].is_summed == pair[1].is_summed
    )


def _is_plain_product(term: Term) -> bool:
    return term.is_product and not (term.is_power or term.is_summed)


def of_branches(terms: Iterable[Term], number: Callable[[], int]) -> Terms:
    """Returns one term in place of all of a kind: which branch runs is not known."""
    return _of_kinds(terms, lambda _: number())


def _of_kinds(terms: Iterable[Term], number: Callable[[Term], int]) -> Terms:
    """Returns one term in place of all of a kind, over the values of all, with a number."""
    kinds: dict[Term, list[Term]] = {}
    for term in terms:
        kind = term._replace(roots=frozenset(), number=0, factors=frozenset())
        kinds.setdefault(kind, []).append(term)
    return frozenset(
        kind._replace(
            roots=frozenset[made_of.Root]().union(*(t.roots for t in of)),
            number=number(min(of, key=lambda t: t.number)),
        )
        for kind, of in kinds.items()
    )


def multiplied(first: Terms, second: Terms, number: Callable[[], int]) -> Terms:
    """Returns the terms of `E[x] E[y]`: over both, as `E[x y]` is, and powers as `E[x]²` is."""
    factors = _factors(first | second)
    return few(
        a._replace(
            roots=a.roots | b.roots,
            number=a.number if a == b else number(),  # the square of one is no other sum
            is_product=a.is_product and b.is_product,
            is_power=True,
            is_gram=False,
            factors=a.factors if a == b else factors,
        )
        for a, b in itertools.product(first, second)
        if a.is_summed == b.is_summed
    )


def _factors(terms: Terms) -> frozenset[int]:
    """Returns the numbers of products that are multiplied, perhaps by sums; none of many."""
    every = frozenset(t.number for t in terms if t.is_product).union(*(t.factors for t in terms))
    return every if len(every) <= _MOST else frozenset()


def powers(terms: Terms) -> Terms:
    """Returns the terms of a power of a sum, or of a root of it."""
    return frozenset(t._replace(is_power=True) for t in terms)


def summed(terms: Iterable[Term]) -> Terms:
    """Returns terms after one more sum: `h.sum(0)` of `h`. What was summed twice is no term."""
    return frozenset(t._replace(is_summed=True) for t in terms if not t.is_summed)


def diagonals(terms: Terms, number: Callable[[], int]) -> Terms:
    """Returns the sums on the diagonals of products: that of `a aᵀ` is over the elements of `a`."""
    grams = [t for t in terms if t.is_product and len(t.roots) == 1]
    return frozenset(Term(t.roots, number(), is_product=False) for t in grams)


def renumbered(terms: Terms, number: Callable[[int], int]) -> Terms:
    """Returns the same terms in other numbers, asked for in order."""
    ordered = sorted(terms, key=lambda t: (t.number, t.is_product, t.is_power))
    return frozenset(
        t._replace(
            roots=made_of.renumbered(t.roots, number),
            number=number(t.number),
            factors=frozenset([number(n) for n in sorted(t.factors)]),
        )
        for t in ordered
    )
