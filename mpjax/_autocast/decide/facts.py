"""Facts of values: whether they are made of constants alone, of which values, of which sums.

Found forwards, through calls, branches and loops as if all were inlined. A value's *roots* are what
it is an elementwise function of; its *terms* are the products and sums that it is a sum of. From
terms it shows that a difference cancels: `|a|² + |b|² - 2ab` adds up a sum over the elements of `a`
and a product of `a` with `b`, both large, and leaves a distance that may be small.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpjax._autocast.decide import contraction, scopes, traits
from mpjax._autocast.decide.states import copies, is_float32, size
from mpjax._base import compat
from mpjax._jaxpr import structure
from mpjax._jaxpr.caches import by_program
from mpjax._jaxpr.equation import Eqn, Jaxpr
from mpjax._jaxpr.op_rules import MOVES, PRODUCTS, only_moves

_MOST_ROOTS, _MOST_TERMS = 8, 8
_EPSILON = 1 / 64
"""A smaller number that is added guards a division or a root; it cancels nothing."""
_POWERS = frozenset({"sqrt", "square", "integer_pow"})
_CHOICES = frozenset({"max", "min", "clamp", "select_n"})
_PARTS = frozenset({"slice", "split", "gather", "dynamic_slice"})
_SCALES = frozenset({"mul", "div", "neg", "convert_element_type"})
_HANDS_ON_TERMS = _POWERS | _CHOICES | _SCALES | MOVES | traits.ADDS | traits.ACCUMULATES
_KEEPS_AN_OFFSET = (
    _POWERS | _CHOICES | MOVES | traits.ADDS | traits.ACCUMULATES | traits.EXTREME
) | {"neg", "reduce_sum"}
_OF_ITS_OPERANDS = (traits.FUSIBLE | traits.UPDATES | MOVES) - traits.STATISTIC
"""Each element of a result is of a few elements of the operands."""
_HANDS_ON_DERIVED = MOVES & _OF_ITS_OPERANDS


class Term(NamedTuple):
    """A product, or a sum of elements: what it is over, and which one it is."""

    roots: frozenset[int]
    number: int
    is_product: bool
    is_power: bool = False  # squared, or the root of it, on the way to where it is added


class Fact(NamedTuple):
    """One value: numbers stand for other values, and are those of one program."""

    constant: bool = False  # no float argument went into it: a literal, a mask, a one-hot label
    least: float = 0.0  # what the magnitudes of a constant lie between, where they are known
    most: float = math.inf
    scalar: bool = False  # one number, or copies of it
    repeated: bool = False  # by a broadcast
    extreme: bool = False  # a maximum of rows, or made of nothing else
    step: bool = False  # multiplied by a small number, or by one that is not known: a step size
    product: bool = False  # a product's result went into it
    offset: int = 0  # what was added to such a value, which a difference may take off again
    derived: bool = False  # made by a derivative that is taken inside the program
    roots: frozenset[int] = frozenset()
    terms: frozenset[Term] = frozenset()


CONSTANT = Fact(constant=True)
_EXTREME, _REPEATED, _STEP = map(operator.attrgetter, ("extreme", "repeated", "step"))
_SCALAR, _DERIVED, _TERMS = map(operator.attrgetter, ("scalar", "derived", "terms"))
_OFFSET, _PRODUCT = map(operator.attrgetter, ("offset", "product"))
BY_DATA, BY_A_CONSTANT = 1, 2
"""Offsets. A statistic of rows, such as their mean, need not have that of an array of data."""
SMALL_STEP = 1 / 32
"""Times this a change counts as a step: each one is worth 5 bits less."""
Facts = Mapping[Any, Fact]


def of_program(jaxpr: Jaxpr, given: Sequence[Fact] | None = None) -> dict[Any, Fact]:
    """Returns the fact of each variable of an open jaxpr.

    Args:
      jaxpr: the program.
      given: facts of its inputs, in numbers from 0 up; by default each is a root of its own.
    """
    given = unrelated(jaxpr) if given is None else given
    return _Walk(jaxpr, given).facts


def unrelated(jaxpr: Jaxpr) -> tuple[Fact, ...]:
    """Returns the facts of inputs that have nothing in common."""
    return tuple(
        Fact(roots=frozenset({i}), scalar=_is_number(v)) for i, v in enumerate(jaxpr.invars)
    )


def of_atom(atom: Any, facts: Facts) -> Fact:
    """Returns the fact of a variable or of a literal."""
    if not compat.is_literal(atom):
        return facts[atom]
    if np.ndim(atom.val) or not is_float32(atom):
        return CONSTANT
    magnitude = abs(float(atom.val))
    return Fact(constant=True, least=magnitude, most=magnitude, scalar=True)


def is_epsilon(fact: Fact) -> bool:
    """Whether a constant is smaller than anything that it would cancel."""
    return fact.constant and fact.most < _EPSILON


def cancels(eqn: Eqn, facts: Facts) -> bool:
    """Whether a sum is of terms that are over the same values, a product among them."""
    if eqn.primitive.name not in traits.ADDS or scopes.is_transposed(eqn.source_info.name_stack):
        return False  # a derivative's sums are of what JAX adds up, and no formula of the author's
    first, second = (of_atom(v, facts).terms for v in eqn.invars)
    return any(
        a.number != b.number
        and (a.is_product != b.is_product or (a.is_product and a.is_power != b.is_power))
        and (a.roots <= b.roots or b.roots <= a.roots)
        for a, b in itertools.product(first, second)
    )


def is_difference(eqn: Eqn, facts: Facts) -> bool:
    """Whether an equation subtracts values that may be almost the same.

    They are made of the same, element by element, as `f(z + 0.01)` and `f(z)`. Or something was
    added to both, as to `300 + z` and its mean; or it was added and is taken off, as `y + z - y`.
    """
    if eqn.primitive.name != "sub" or scopes.is_transposed(eqn.source_info.name_stack):
        return False
    first, second = (of_atom(v, facts) for v in eqn.invars)
    if first.constant or second.constant:
        return False
    if first.roots & second.roots:
        return True
    both = sorted((first, second), key=_OFFSET)
    return both[1].offset > 0 and (both[0].offset > 0 or not both[0].product)


def adds_a_constant(eqn: Eqn, facts: Facts) -> bool:
    """Whether an equation adds a known number, or takes it off, that is not small."""
    if eqn.primitive.name not in ("add", "sub"):
        return False
    operands = [of_atom(v, facts) for v in eqn.invars]
    constants = [f for f in operands if f.constant]
    return len(constants) == 1 and not is_epsilon(constants[0]) and constants[0].most < math.inf


def hands_on_terms(eqn: Eqn) -> bool:
    """Whether an operation's result may be a sum of what its operands are sums of."""
    return eqn.primitive.name in _HANDS_ON_TERMS


def entering(eqn: Eqn, part: structure.Part, facts: Facts) -> tuple[tuple[Fact, ...], list[int]]:
    """Returns the facts of the inputs of a program inside an equation, numbered from 0 up.

    The second result says, for each of these numbers, which one it is outside; -1 where it is of a
    loop's carry, which differs by turn.
    """
    numbers: dict[int, int] = {}
    outside: list[int] = []

    def number(n: int) -> int:
        if n not in numbers:
            numbers[n] = len(outside)
            outside.append(n)
        return numbers[n]

    inside: list[Fact] = []
    for i, place in enumerate(part.operands):
        if part.carried.start <= i < part.carried.stop:
            inside.append(Fact(roots=frozenset({len(outside)})))
            outside.append(-1)
        else:
            inside.append(_renumbered(of_atom(eqn.invars[place], facts), number))
    return tuple(inside), outside


def _renumbered(fact: Fact, number: Any) -> Fact:
    terms = sorted(fact.terms, key=lambda t: (t.number, t.is_product, t.is_power))
    if not (fact.roots or terms):
        return fact
    return fact._replace(
        roots=frozenset(number(n) for n in sorted(fact.roots)),
        terms=frozenset(
            t._replace(roots=frozenset(number(n) for n in sorted(t.roots)), number=number(t.number))
            for t in terms
        ),
    )


@by_program
def inside(program: Any, given: tuple[Fact, ...]) -> Facts:
    """Returns the facts of a program inside another, given those of its inputs."""
    return of_program(compat.closed(program).jaxpr, given)


def _outputs(program: Any, given: tuple[Fact, ...]) -> list[Fact]:
    facts = inside(program, given)
    return [of_atom(v, facts) for v in compat.closed(program).jaxpr.outvars]


def _constant(eqn: Eqn, floats: Sequence[Fact]) -> Fact:
    """The fact of what is made of constants alone."""
    name = eqn.primitive.name
    if not floats:
        return CONSTANT
    if only_moves(eqn):
        return floats[0]._replace(repeated=floats[0].repeated or _repeats(eqn))
    scalar = all(f.scalar for f in floats)
    if name == "mul":
        least, most = (
            math.prod(sizes) for sizes in zip(*((f.least, f.most) for f in floats), strict=True)
        )
        return Fact(constant=True, least=least, most=most, scalar=scalar)
    if name == "div" and 0 < floats[1].least <= floats[1].most < math.inf:
        first, second = floats
        least, most = first.least / second.most, first.most / second.least
        return Fact(constant=True, least=least, most=most, scalar=scalar)
    return Fact(constant=True, scalar=scalar)


def _repeats(eqn: Eqn) -> bool:
    """Whether an operation is a broadcast that makes its operand larger."""
    return eqn.primitive.name == "broadcast_in_dim" and copies(eqn) > 1


def _makes_a_step(eqn: Eqn, floats: Sequence[Fact]) -> bool:
    """Whether an equation multiplies a whole array by a small number, or by an unknown one."""
    if eqn.primitive.name not in ("mul", "div") or len(floats) != 2:
        return False
    numbers = [f.scalar and not f.constant for f in floats]
    constants = [f.constant for f in floats]
    if any(numbers) and not all(numbers) and not any(constants):
        return True
    if eqn.primitive.name == "mul":
        return any(0 < f.least <= f.most <= SMALL_STEP for f in floats if f.constant)
    return constants[1] and floats[1].least >= 1 / SMALL_STEP


def _is_data(fact: Fact) -> bool:
    """Whether a value is an array that no product made: a bias that is repeated adds no offset."""
    return not (fact.constant or fact.product or fact.scalar or fact.repeated)


def _is_number(var: Any) -> bool:
    return not getattr(var.aval, "shape", ())


class _Walk:
    """One pass over a program, in order."""

    def __init__(self, jaxpr: Jaxpr, given: Sequence[Fact]) -> None:
        numbers = [n for f in given for n in (*f.roots, *(t.number for t in f.terms))]
        numbers += [n for f in given for t in f.terms for n in t.roots]
        self.next = max(numbers, default=-1) + 1
        self.parts: dict[Any, int] = {}
        self.facts: dict[Any, Fact] = dict(zip(jaxpr.invars, given, strict=True))
        self.facts.update((v, self.fresh(v)) for v in jaxpr.constvars)
        for eqn in jaxpr.eqns:
            derived = scopes.is_transposed(eqn.source_info.name_stack)
            made = self.results(eqn, derived=derived)
            if derived:
                made = [f if f.derived else f._replace(derived=True) for f in made]
            self.facts.update(zip(eqn.outvars, made, strict=True))

    def number(self) -> int:
        self.next += 1
        return self.next - 1

    def fresh(self, var: Any) -> Fact:
        return Fact(roots=frozenset({self.number()}), scalar=_is_number(var))

    def results(self, eqn: Eqn, *, derived: bool) -> Sequence[Fact]:
        if structure.is_call(eqn):
            return self.call(eqn)
        operands = [of_atom(v, self.facts) for v in eqn.invars]
        floats = [f for v, f in zip(eqn.invars, operands, strict=True) if is_float32(v)]
        name = eqn.primitive.name
        if eqn.effects or name == "bitcast_convert_type":
            return [self.fresh(v) for v in eqn.outvars]
        made = [f for f in floats if not f.constant]
        if not made:
            return [_constant(eqn, floats)] * len(eqn.outvars)
        moves = name in MOVES
        if moves and len(eqn.outvars) == len(eqn.invars) > 1:
            return operands  # a barrier
        told = {
            "extreme": name in traits.EXTREME or all(map(_EXTREME, made)),
            "repeated": moves and (_repeats(eqn) or any(map(_REPEATED, made))),
            "step": any(map(_STEP, made)) if moves else _makes_a_step(eqn, floats),
            "derived": derived or (name in _HANDS_ON_DERIVED and any(map(_DERIVED, floats))),
            "product": any(map(_PRODUCT, floats)),
            "offset": self.offset(eqn, floats),
        }
        return [self.result(eqn, floats, made, v, told) for v in eqn.outvars]

    def offset(self, eqn: Eqn, floats: Sequence[Fact]) -> int:
        """The kind of offset that was added to a product and is still in an equation's results."""
        name, before = eqn.primitive.name, max(map(_OFFSET, floats))
        if name in ("add", "sub") and not any(f.derived for f in floats):
            if adds_a_constant(eqn, self.facts):
                return BY_A_CONSTANT
            if any(map(_PRODUCT, floats)) and any(map(_is_data, floats)):
                return BY_A_CONSTANT if before == BY_A_CONSTANT else BY_DATA
        if not before or is_difference(eqn, self.facts):
            return 0
        if name in ("mul", "div"):
            factors = [f for f in floats if not (f.constant or f.scalar)]
            if not all(f.offset for f in factors if f.product):
                return 0
            return min(before, BY_DATA) if any(map(_is_data, factors)) else before
        if name in traits.STATISTIC and before == BY_DATA:
            return 0
        return before if name in _KEEPS_AN_OFFSET else 0

    def result(
        self,
        eqn: Eqn,
        floats: Sequence[Fact],
        made: Sequence[Fact],
        out: Any,
        told: dict[str, Any],
    ) -> Fact:
        """The fact of one result, of which `told` says what is so of all.

        Of the float operands, `floats`, those in `made` are no constants.
        """
        name = eqn.primitive.name
        if name in PRODUCTS:
            return self.product(eqn, floats, told)
        if name == "reduce_sum":
            return self.total(made[0], told)
        if name not in _OF_ITS_OPERANDS:
            return Fact(roots=frozenset({self.number()}), scalar=_is_number(out), **told)
        roots = made[0].roots.union(*(f.roots for f in made[1:]))
        is_whole = size(out.aval.shape) == size(eqn.invars[0].aval.shape)  # in another order
        if name in _PARTS and not is_whole:
            roots = frozenset({self.part(eqn, roots, out)})
        elif len(roots) > _MOST_ROOTS:
            roots = frozenset({self.number()})
        return Fact(
            roots=roots,
            terms=self.terms(eqn, floats),
            scalar=_is_number(out) or all(map(_SCALAR, floats)),
            **told,
        )

    def part(self, eqn: Eqn, roots: frozenset[int], out: Any) -> int:
        """The number of a part of a value: the same part has the same number."""
        key = (eqn.primitive.name, roots, str(eqn.params), eqn.outvars.index(out))
        indices = tuple(None if compat.is_literal(v) else v for v in eqn.invars[1:])
        if (*key, indices) not in self.parts:
            self.parts[*key, indices] = self.number()
        return self.parts[*key, indices]

    def terms(self, eqn: Eqn, floats: Sequence[Fact]) -> frozenset[Term]:
        """The terms that an operation hands on: unscaled, or scaled by one number."""
        if not hands_on_terms(eqn) or not any(map(_TERMS, floats)):
            return frozenset()
        if eqn.primitive.name in ("mul", "div"):
            whole = [f for f in floats if not (f.constant or f.scalar)]
            if len(whole) != 1 or (eqn.primitive.name == "div" and whole[0] is not floats[0]):
                return frozenset()
            return whole[0].terms
        terms = frozenset[Term]().union(*(f.terms for f in floats))
        if eqn.primitive.name in _POWERS:
            terms = frozenset(t._replace(is_power=True) for t in terms)
        if eqn.primitive.name in ("gather", "slice", "dynamic_slice"):
            terms |= {self.of_gram(t) for t in terms if t.is_product and len(t.roots) == 1}
        return terms if len(terms) <= _MOST_TERMS else frozenset()

    def of_gram(self, term: Term) -> Term:
        """The diagonal of `a aᵀ` is a sum over the elements of `a`."""
        return Term(term.roots, self.number(), is_product=False)

    def product(self, eqn: Eqn, floats: Sequence[Fact], told: dict[str, Any]) -> Fact:
        roots = frozenset[int]().union(*(f.roots for f in floats[:2]))
        is_product = not contraction.only_sums(eqn)
        term = Term(roots, self.number(), is_product)
        if contraction.adds_nothing(eqn):
            return Fact(roots=frozenset({term.number}), **told)
        if is_product:
            told = {**told, "product": True, "offset": 0}
        return Fact(roots=frozenset({self.number()}), terms=frozenset({term}), **told)

    def total(self, of: Fact, told: dict[str, Any]) -> Fact:
        terms = {Term(of.roots, self.number(), is_product=False)}
        terms |= {self.of_gram(t) for t in of.terms if t.is_product and len(t.roots) == 1}
        return Fact(roots=frozenset({self.number()}), terms=frozenset(terms), **told)

    def call(self, eqn: Eqn) -> Sequence[Fact]:
        made: list[list[Fact]] = []
        for part in structure.parts(eqn):
            if part.is_condition:
                continue
            given, outside = entering(eqn, part, self.facts)
            names = dict(enumerate(outside))
            made.append([self.leaving(f, names) for f in _outputs(part.program, given)])
        return [self.joined(outs, v) for v, *outs in zip(eqn.outvars, *made, strict=True)]

    def leaving(self, fact: Fact, names: dict[int, int]) -> Fact:
        """The fact of an output of a program, in the numbers outside.

        `names` says what a number inside is outside; what is made inside gets a new one there.
        """
        used = {n for t in fact.terms for n in (*t.roots, t.number)} | fact.roots
        for n in sorted(used - names.keys()):
            names[n] = self.number()
        if any(names[n] < 0 for n in used):
            fresh = frozenset({self.number()})  # of a loop's carry: another in each turn
            return Fact(roots=fresh, product=fact.product, offset=fact.offset)
        return _renumbered(fact, names.__getitem__)

    def joined(self, outs: Sequence[Fact], var: Any) -> Fact:
        first = outs[0]
        if all(f == first for f in outs):
            return first
        if all(f.constant for f in outs):
            return CONSTANT
        terms = frozenset[Term]().union(*(f.terms for f in outs))
        terms = terms if len(terms) <= _MOST_TERMS else frozenset()
        return self.fresh(var)._replace(
            terms=terms, product=any(map(_PRODUCT, outs)), offset=max(map(_OFFSET, outs))
        )
