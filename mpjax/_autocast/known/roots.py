"""Roots of values: what a value is an elementwise function of, at the same places or at others.

A number stands for a value. A part that was cut out of values, such as `z[1:]`, is a root of its
own: the same cut of the same roots is equal to it, in whichever program it is made. So
`f(z)[1:] - g(z)[1:]` is a difference of two functions of one root, and `z[1:] - z[:-1]` of two.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from mpjax._autocast.known import totals, traits
from mpjax._base import compat
from mpjax._jaxpr import keys
from mpjax._jaxpr.equation import Eqn

_DEEPEST = 4
_CONSTANT = "constant"
TOPS = traits.EXTREME & traits.STATISTIC
"""Take the largest or the smallest of several elements."""


class Excerpt(NamedTuple):
    """Stands for what an operation took out of values: a slice, or the largest of a row.

    Or for a constant that a program holds, which is of no other value.
    """

    how: tuple[Hashable, ...]  # the operation's name first
    of: tuple[Roots, ...]  # the roots of its operands, the indices' among them
    depth: int  # how many parts it is taken out of, one after another


Root: TypeAlias = "int | Excerpt"
Roots: TypeAlias = frozenset[Root]


def part(
    eqn: Eqn, out: Any, of: Roots, operands: Sequence[Any], where: tuple[Any, ...] | None = None
) -> Excerpt | None:
    """Returns what an operation takes out of values, None where that would be too deep.

    Args:
      eqn: the operation.
      out: its result.
      of: the roots of the values.
      operands: the facts of the operation's operands; those behind the first are indices.
      where: what tells this part from others; without it, all of the operation's parameters.
    """
    depth = 1 + max((r.depth for r in of if isinstance(r, Excerpt)), default=0)
    if depth > _DEEPEST:
        return None
    literals = (str(v) for v in eqn.invars[1:] if compat.is_literal(v))
    where = keys.printed_params(eqn) if where is None else where
    how = (eqn.primitive.name, where, eqn.outvars.index(out), *literals)
    if eqn.primitive.name in TOPS:
        how = (*how, len(totals.removed_axes(eqn)))
    return Excerpt(how, (of, *(f.roots for f in operands[1:])), depth)


def is_below_its_maximum(roots: Roots) -> bool:
    """Whether a value is a function of others, and of their maximum along one axis: `z - max(z)`.

    So one of its elements along that axis is 1, if it is the exponential of that distance.
    """
    tops = [r for r in roots if isinstance(r, Excerpt) and r.how[0] in TOPS and r.how[-1] == 1]
    return any(roots - {top} == top.of[0] for top in tops)


def constant(value: Any) -> Excerpt:
    """Returns the root of a constant that the program holds: the same in all programs inside."""
    return Excerpt((_CONSTANT, id(value)), (), 0)


def constant_number(value: float) -> Excerpt:
    """Returns the root of a number that is known: the same wherever it is."""
    return Excerpt((_CONSTANT, "number", value), (), 0)


def is_constant(root: Root) -> bool:
    """Whether a root is that of a constant."""
    return isinstance(root, Excerpt) and root.how[0] == _CONSTANT


def unless_constant(roots: Roots) -> Roots:
    """Returns roots but for those of constants, or all if there are no others."""
    return frozenset(r for r in roots if not is_constant(r)) or roots


def numbers(roots: Roots) -> Iterator[int]:
    """Yields the numbers that roots are made of."""
    for root in roots:
        if isinstance(root, Excerpt):
            for of in root.of:
                yield from numbers(of)
        else:
            yield root


def in_fact(fact: Any) -> Iterator[int]:
    """Yields the numbers that a fact holds."""
    yield from numbers(fact.roots)
    yield from numbers(frozenset(a.root for a in fact.added))
    for roots, _ in fact.chain:
        yield from numbers(roots)
    for term in fact.terms:
        yield term.number
        yield from term.factors
        yield from numbers(term.roots)


def renumbered(roots: Roots, number: Callable[[int], int]) -> Roots:
    """Returns the same roots in other numbers, asked for in order."""
    for n in sorted(numbers(roots)):
        number(n)
    return frozenset(
        r._replace(of=tuple(renumbered(of, number) for of in r.of))
        if isinstance(r, Excerpt)
        else number(r)
        for r in roots
    )


def meet(first: Roots, second: Roots) -> bool:
    """Whether values may be of the same elements, in the same places.

    A value that was joined with others and cut out again, as by `stack([z, y])[0]`, is a part of
    what `z` is a root of. Two different parts of one value are no such pair.
    """
    if not first.isdisjoint(second):
        return True
    return not (first.isdisjoint(_cut_from(second)) and second.isdisjoint(_cut_from(first)))


def among(some: Roots, others: Roots) -> bool:
    """Whether each root is one of the others, or a part of one (`z[0]` of `z`), or holds one."""
    return some <= others or all(meet(frozenset({root}), others) for root in some)


def are_halves(first: Roots, second: Roots, at_least: int) -> bool:
    """Whether values are different parts of one value, cut out of cut ones `at_least` so deep."""
    if len(first) != 1 or len(second) != 1 or first == second:
        return False
    (a,), (b,) = first, second
    if not (isinstance(a, Excerpt) and isinstance(b, Excerpt)):
        return False
    return min(a.depth, b.depth) >= at_least and a.of[0] == b.of[0]


def _cut_from(roots: Roots) -> Roots:
    """Returns the roots of the values that parts were cut out of; a maximum is of other places."""
    parts = (r for r in roots if isinstance(r, Excerpt) and r.of)
    cut = [r.of[0] for r in parts if r.how[0] not in traits.EXTREME]
    return frozenset[Root]().union(*cut, *map(_cut_from, cut))
