"""How facts are found: forwards, through calls, branches and loops as if all were inlined."""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import Any

from mpjax._autocast.known import (
    arrays,
    chains,
    contraction,
    fact_flags,
    factors,
    positive,
    ranges,
    repeats,
    scopes,
    terms,
    totals,
    traits,
)
from mpjax._autocast.known import roots as made_of
from mpjax._autocast.known.fact_flags import (
    ALIKE,
    BY_A_CONSTANT,
    CARRY,
    CONSTANT,
    DERIVED,
    EITHER,
    ENTERED,
    OF_MATRICES,
    OFFSET,
    PRODUCT,
    REPEATED,
    SCALAR,
)
from mpjax._autocast.known.facts import (
    SOME_CONSTANT,
    Entered,
    Fact,
    Facts,
    adds_a_constant,
    hands_on_terms,
    is_difference,
    of_atom,
)
from mpjax._base import compat
from mpjax._jaxpr import structure
from mpjax._jaxpr.caches import by_program
from mpjax._jaxpr.equation import Eqn, Jaxpr
from mpjax._jaxpr.op_rules import MOVES, PRODUCTS, hands_on_each, has_effects, only_moves
from mpjax._jaxpr.sizes import is_number, size

_MOST_ROOTS = 8
_OF_TURNS = OF_MATRICES | ranges.EXPONENTIAL | ranges.UNHELD
"""Flags of a carry in each turn, if it has them in one."""
_PARTS = traits.SLICES | traits.PICKS
_OF_ITS_OPERANDS = traits.FUSIBLE | traits.OF_FEW | traits.UPDATES | MOVES | totals.ALONG_AXES
"""Each element of a result is of a few elements of the operands, unless it is a statistic."""


def unrelated(jaxpr: Jaxpr) -> tuple[Fact, ...]:
    """Returns the facts of inputs that have nothing in common."""
    return tuple(Fact(_if_number(v), roots=frozenset({i})) for i, v in enumerate(jaxpr.invars))


def entering(eqn: Eqn, part: structure.Part, facts: Facts) -> Entered:
    """Returns how facts enter a program inside an equation: asked often, told once."""
    key = id(eqn), id(part.program)
    if (entered := facts.entered.get(key)) is None:
        entered = facts.entered[key] = _entering(eqn, part, facts)
    return entered


def _entering(eqn: Eqn, part: structure.Part, facts: Facts) -> Entered:
    """A carry is a solved matrix, or a sum of exponentials, if it is one in some turn."""
    places = part.operands[part.carried]
    flags = [of_atom(eqn.invars[place], facts).flags & _OF_TURNS for place in places]
    while True:
        entered = _entered(eqn, part, facts, flags)
        if part.is_condition or not places:
            return entered
        turn = _outputs(part.program, entered.given)
        after = [f | out.flags & _OF_TURNS for f, out in zip(flags, turn, strict=False)]
        if after == flags:
            return entered
        flags = after


def _entered(eqn: Eqn, part: structure.Part, facts: Facts, flags: Sequence[int]) -> Entered:
    """A loop's carry differs by turn, and so has no number outside; these have some flags."""
    numbers: dict[int, int] = {}
    outside: dict[int, int] = {}
    is_loop = eqn.primitive.name in structure.LOOPS

    def number(n: int) -> int:
        if n not in numbers:
            numbers[n] = len(outside)
            outside[len(outside)] = n
        return numbers[n]

    inside: list[Fact] = []
    for i, place in enumerate(part.operands):
        if part.carried.start <= i < part.carried.stop:
            of_carry = CARRY | flags[i - part.carried.start]
            inside.append(Fact(of_carry, roots=frozenset({len(outside)})))
            outside[len(outside)] = -1
        else:
            fact = _renumbered(of_atom(eqn.invars[place], facts), number)
            if is_loop:
                alike = ALIKE if i < part.carried.start else 0
                fact = fact._replace(flags=fact.flags | ENTERED | alike)
            inside.append(repeats.entered(fact, eqn.invars[place], part, i))
    return Entered(tuple(inside), outside)


def _renumbered(fact: Fact, number: Any) -> Fact:
    if not (fact.roots or fact.terms or fact.chain):
        return fact
    return fact._replace(
        roots=made_of.renumbered(fact.roots, number),
        added=repeats.renumbered(fact.added, number),
        terms=terms.renumbered(fact.terms, number),
        chain=chains.renumbered(fact.chain, number),
    )


@by_program
def inside(program: Any, given: tuple[Fact, ...]) -> Facts:
    """Returns the facts of a program, given those of its inputs, in numbers from 0 up."""
    closed = compat.closed(program)
    return _Walk(closed.jaxpr, closed.consts, given).facts


def _outputs(program: Any, given: tuple[Fact, ...]) -> list[Fact]:
    facts = inside(program, given)
    return [of_atom(v, facts) for v in compat.closed(program).jaxpr.outvars]


def _constant(eqn: Eqn, floats: Sequence[Fact]) -> Fact:
    """The fact of what is made of constants alone."""
    name = eqn.primitive.name
    if not floats:
        return SOME_CONSTANT
    flags = CONSTANT | ranges.of_constants(eqn, floats)
    if only_moves(eqn):
        flags |= floats[0].flags | (REPEATED if fact_flags.repeats(eqn) else 0)
        return floats[0]._replace(flags=flags)
    flags |= fact_flags.signs(eqn, floats) | fact_flags.of_a_difference(eqn, floats)
    flags |= positive.of_operation(eqn, floats)
    flags |= SCALAR if all(f.flags & SCALAR for f in floats) else 0
    if name == "mul":
        return Fact(flags, math.prod(f.least for f in floats), math.prod(f.most for f in floats))
    if name == "div" and 0 < floats[1].least <= floats[1].most < math.inf:
        first, second = floats
        return Fact(flags, first.least / second.most, first.most / second.least)
    return Fact(flags)


def _if_number(var: Any) -> int:
    return 0 if getattr(var.aval, "shape", ()) else SCALAR


class _Walk:
    """One pass over a program, in order."""

    def __init__(self, jaxpr: Jaxpr, consts: Sequence[Any], given: Sequence[Fact]) -> None:
        self.next = max((n for f in given for n in made_of.in_fact(f)), default=-1) + 1
        self.facts = Facts(zip(jaxpr.invars, given, strict=True))
        for v, value in zip(jaxpr.constvars, consts, strict=True):
            flags = _if_number(v) | arrays.flags(value)
            self.facts[v] = Fact(flags, roots=frozenset({made_of.constant(value)}))
        for eqn in jaxpr.eqns:
            derived = DERIVED if scopes.is_transposed(eqn) else 0
            made = self.results(eqn, derived)
            for v, fact in zip(eqn.outvars, made, strict=True):
                if derived and not fact.flags & DERIVED:
                    fact = fact._replace(flags=fact.flags | DERIVED)
                self.facts[v] = fact

    def number(self) -> int:
        self.next += 1
        return self.next - 1

    def root(self) -> made_of.Roots:
        """The roots of a value that is its own."""
        return frozenset({self.number()})

    def fresh(self, var: Any) -> Fact:
        return Fact(_if_number(var), roots=self.root())

    def results(self, eqn: Eqn, derived: int) -> Sequence[Fact]:
        if structure.is_call(eqn):
            return self.call(eqn)
        facts = self.facts
        operands = [of_atom(v, facts) if compat.is_literal(v) else facts[v] for v in eqn.invars]
        floats = [f for v, f in zip(eqn.invars, operands, strict=True) if is_number(v)]
        name, results = eqn.primitive.name, eqn.outvars
        if has_effects(eqn) or name == "bitcast_convert_type":
            return [self.fresh(v) for v in results]
        some, every = fact_flags.union(floats)
        if not floats:  # integers; of constants when they are made floats
            roots = frozenset[made_of.Root]().union(*(f.roots for f in operands))
            flags = CONSTANT | ranges.of_logic(eqn)
            return [Fact(flags, roots=self.few(roots))] * len(results)
        if every & CONSTANT:
            return [_constant(eqn, floats)] * len(results)
        if hands_on_each(eqn, sorts=True):
            return operands
        cancels = is_difference(eqn, facts)
        beside = fact_flags.repeated(eqn, floats)
        flags = fact_flags.of_operation(eqn, beside, some, every) | derived
        flags |= ranges.of_operation(eqn, beside) | positive.of_operation(eqn, floats)
        if adds_a_constant(eqn, facts) and not some & DERIVED:
            flags |= BY_A_CONSTANT
        else:
            flags |= fact_flags.offset(eqn, beside, some, cancels=cancels)
        flags |= EITHER if cancels and some & OFFSET else 0
        outs = [self.result(eqn, floats, v, flags, every) for v in results]
        if chain := chains.after(eqn, operands):
            outs = [f._replace(chain=chain) for f in outs]
        if derived or not repeats.may_tell(eqn, operands):
            return outs
        told = (repeats.told(eqn, v, operands, cancels=cancels) for v in results)
        return [
            f._replace(along=along, added=added)
            for f, (along, added) in zip(outs, told, strict=True)
        ]

    def result(self, eqn: Eqn, floats: Sequence[Fact], out: Any, flags: int, every: int) -> Fact:
        """The fact of one result: it has some flags; `every` are those that all operands have."""
        name = eqn.primitive.name
        if name in PRODUCTS:
            return self.product(eqn, floats, flags)
        if totals.is_total(eqn):
            return self.total(floats[0], flags)
        if name == "reduce_window_sum":  # its operand is stored, as a product's is
            term = terms.Term(floats[0].roots, self.number(), is_product=True)
            return self.summed(term, flags, floats)
        is_statistic = totals.is_statistic(eqn)
        if is_statistic and name in made_of.TOPS:
            return Fact(flags | _if_number(out), roots=self.part(eqn, floats[0].roots, out))
        if is_statistic or name not in _OF_ITS_OPERANDS:
            fact = Fact(flags | _if_number(out), roots=self.root())
            return fact._replace(terms=self.terms(eqn, floats))
        return self.elementwise(eqn, floats, out, flags | every & SCALAR)

    def elementwise(self, eqn: Eqn, floats: Sequence[Fact], out: Any, flags: int) -> Fact:
        roots = floats[0].roots
        if len(floats) > 1:
            roots = roots.union(*(f.roots for f in floats[1:]))
        if eqn.primitive.name in _PARTS and size(out.aval.shape) != size(eqn.invars[0].aval.shape):
            roots = self.part(eqn, roots, out)
        flags |= _if_number(out)
        made = Fact(flags, roots=self.few(roots), terms=self.terms(eqn, floats))
        many = factors.count(eqn, floats)
        return made if many == made.factors else made._replace(factors=many)

    def few(self, roots: made_of.Roots) -> made_of.Roots:
        """Some roots, or a new one where they are many."""
        return roots if len(roots) <= _MOST_ROOTS else self.root()

    def part(self, eqn: Eqn, roots: made_of.Roots, out: Any) -> made_of.Roots:
        """The root of a part of values: the same part has the same root."""
        operands = [of_atom(v, self.facts) for v in eqn.invars]
        made = made_of.part(eqn, out, self.few(roots), operands)
        return self.root() if made is None else frozenset({made})

    def terms(self, eqn: Eqn, floats: Sequence[Fact]) -> terms.Terms:
        """The terms that an operation hands on: unscaled, or scaled by one number."""
        if not any(f.terms for f in floats) or not hands_on_terms(eqn):
            return terms.NONE
        name = eqn.primitive.name
        if name in traits.SCALES:
            first, second = (f.terms for f in floats)
            if name == "mul" and first and second:
                return terms.multiplied(first, second, self.number)
            if name == "div" and second and floats[0].flags & CONSTANT:
                return terms.powers(second)
            of, by = floats if first else reversed(floats)
            is_scaled = by.flags & (CONSTANT | SCALAR) and (first or name == "mul")
            return of.terms if is_scaled else terms.NONE
        every = terms.NONE.union(*(f.terms for f in floats))
        if name in traits.POWERS:
            every = terms.powers(every)
        if name in _PARTS:
            every |= terms.diagonals(every, self.number)
        return terms.few(every)

    def product(self, eqn: Eqn, floats: Sequence[Fact], flags: int) -> Fact:
        roots = frozenset[made_of.Root]().union(*(f.roots for f in floats[:2]))
        is_product = not contraction.only_sums(eqn)
        is_gram = is_product and ranges.is_gram(floats)
        term = terms.Term(roots, self.number(), is_product, is_gram=is_gram)
        if contraction.adds_nothing(eqn):
            return Fact(flags, roots=frozenset({term.number}))
        if is_product:
            flags = flags & ~OFFSET | PRODUCT
        return self.summed(term, flags, floats[:2])

    def summed(self, term: terms.Term, flags: int, of: Sequence[Fact]) -> Fact:
        """The fact of a sum over the elements of some values, and over their terms."""
        below = terms.summed(t for f in of for t in f.terms)
        return Fact(flags, roots=self.root(), terms=terms.few(below | {term}))

    def total(self, of: Fact, flags: int) -> Fact:
        term = terms.Term(of.roots, self.number(), is_product=False, is_gram=of.factors > 1)
        fact = self.summed(term, flags, [of])
        diagonals = terms.diagonals(of.terms, self.number)
        return fact._replace(terms=fact.terms | diagonals) if diagonals else fact

    def call(self, eqn: Eqn) -> Sequence[Fact]:
        made: list[list[Fact]] = []
        for part in structure.parts(eqn):
            if part.is_condition:
                continue
            given, names = entering(eqn, part, self.facts)
            turns = collections.defaultdict[int, int](self.number)
            outs = [self.leaving(f, names, turns) for f in _outputs(part.program, given)]
            if eqn.primitive.name in structure.LOOPS:
                outs = self.after_turns(outs, [eqn.invars[i] for i in part.operands[part.carried]])
            made.append(repeats.left(outs, eqn.outvars, part))
        return [self.joined(outs, v) for v, *outs in zip(eqn.outvars, *made, strict=True)]

    def after_turns(self, outs: Sequence[Fact], start: Sequence[Any]) -> list[Fact]:
        """The facts of a loop's results: carries hold what they began with, and what was added."""
        before = [of_atom(v, self.facts).terms for v in start] + [terms.NONE] * len(outs)
        return [
            f._replace(flags=f.flags & ~(ALIKE | CARRY | ENTERED), terms=terms.few(f.terms | begun))
            for f, begun in zip(outs, before, strict=False)
        ]

    def leaving(self, fact: Fact, names: dict[int, int], turns: dict[int, int]) -> Fact:
        """The fact of an output of a program, in the numbers outside.

        `names` says what a number inside is outside; what is made inside gets a new one. That of a
        loop's carry is less than 0: of a value of each turn, and `turns` numbers all of these.
        """
        for n in sorted(set(made_of.in_fact(fact)) - names.keys()):
            names[n] = self.number()
        if all(names[n] >= 0 for n in made_of.in_fact(fact)):
            return _renumbered(fact, names.__getitem__)
        kept = PRODUCT | OFFSET | OF_MATRICES | ranges.OF_CARRIES
        left = terms.renumbered(fact.terms, lambda n: names[n] if names[n] >= 0 else turns[n])
        return Fact(fact.flags & kept, roots=self.root(), terms=left)

    def joined(self, outs: Sequence[Fact], var: Any) -> Fact:
        first = outs[0]
        if all(f == first for f in outs):
            return first
        some, every = fact_flags.union(outs)
        if every & CONSTANT:
            return SOME_CONSTANT
        return Fact(
            _if_number(var) | fact_flags.of_branches(some, every) | ranges.of_branches(some, every),
            roots=self.few(frozenset[made_of.Root]().union(*(f.roots for f in outs))),
            terms=terms.of_branches((t for f in outs for t in f.terms), self.number),
            added=frozenset[repeats.Added]().union(*(f.added for f in outs)),
            chain=chains.joined(f.chain for f in outs),
            factors=max(f.factors for f in outs),
        )
