"""Finds how each value of a jaxpr is read: by a product, by an output, by neither.

Found backwards, through the operations that move values without rounding. It tells where rounding
costs nothing (a product would round anyway) and where it would be seen (an output).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mpjax._autocast.decide import control, reasons
from mpjax._autocast.decide.must import conditioned, meetings
from mpjax._autocast.decide.reads import (
    ABSOLUTE,
    AGAIN,
    CARRIED,
    COTANGENTS,
    DIFFERENCE,
    EXACT,
    FORWARD,
    FULL,
    GRADIENT,
    LARGE,
    LATER,
    NEAR,
    OUTPUT,
    PRODUCT,
    RESULT,
    TESTED,
    UNROUNDED,
    WHOLE,
)
from mpjax._autocast.known import contraction, facts, fusible, named_attention, scopes, traits, ways
from mpjax._autocast.known.activations import is_activation
from mpjax._base import compat
from mpjax._jaxpr import structure
from mpjax._jaxpr.caches import by_program
from mpjax._jaxpr.equation import Eqn, Jaxpr
from mpjax._jaxpr.op_rules import MOVES, PRODUCTS, hands_on_each, only_moves
from mpjax._jaxpr.sizes import is_float32


@dataclass(frozen=True)
class Demanded:
    """Demands beside those of readers."""

    full: frozenset[str] = frozenset()  # operations that the user's `rules=` hold in float32
    asked: frozenset[tuple[Any, int]] = frozenset()  # flags of values


def of(
    jaxpr: Jaxpr, wants: tuple[int, ...], demanded: Demanded, known: facts.Facts
) -> dict[Any, int]:
    """Returns the flags of each variable of an open jaxpr.

    Args:
      jaxpr: the program.
      wants: the flags of its outputs.
      demanded: what is asked beside.
      known: the facts of its variables.
    """
    flags: dict[Any, int] = {}
    for v, flag in demanded.asked:
        if v in known:
            flags[v] = flags.get(v, 0) | flag
    for atom, want in zip(jaxpr.outvars, wants, strict=True):
        if want and not compat.is_literal(atom):
            flags[atom] = meetings.joined(flags.get(atom, 0), want)
    for eqn in reversed(jaxpr.eqns):
        outs = [flags.get(v, 0) for v in eqn.outvars]
        union = outs[0] if len(outs) == 1 else functools.reduce(operator.or_, outs, 0)
        _add(flags, eqn, union, _reads(eqn, outs, union, demanded, known), known)
    return flags


def _add(
    flags: dict[Any, int],
    eqn: Eqn,
    union: int,
    wants: Sequence[int],
    known: facts.Facts,
) -> None:
    """Adds how an equation reads its operands to their flags."""
    place = scopes.place(eqn)
    backward = place.is_transposed
    hands_on = backward or only_moves(eqn) or structure.is_call(eqn)
    own, handed_on = meetings.asks(eqn, place, union)
    for atom, asked in zip(eqn.invars, wants, strict=True):
        if compat.is_literal(atom):
            continue
        want = asked & ~COTANGENTS
        if is_float32(atom):
            want |= asked & handed_on | own
        if backward:
            want &= ~FORWARD
        if not hands_on and known[atom].flags & facts.DERIVED:
            want |= GRADIENT
        if want:
            flags[atom] = meetings.joined(flags.get(atom, 0), want)


def _reads(
    eqn: Eqn, outs: list[int], union: int, demanded: Demanded, known: facts.Facts
) -> list[int]:
    """Returns how an equation reads its operands."""
    if structure.is_call(eqn):
        return _of_call(eqn, outs, demanded, known)
    wants = _operands(eqn, outs, union, demanded, known)
    if not union & TESTED:
        return wants
    return [w | t for w, t in zip(wants, conditioned.of_a_test(eqn), strict=True)]


def _of_call(eqn: Eqn, outs: list[int], demanded: Demanded, known: facts.Facts) -> list[int]:
    is_function, full = fusible.is_fusible_function(eqn), demanded.full
    if is_function and full and fusible.operations(eqn) & full:
        later = functools.reduce(operator.or_, outs, 0) & (LATER | FORWARD)
        return [later | EXACT] * len(eqn.invars)
    wants = control.operand_reads(eqn, tuple(outs), Inner(eqn, demanded, known))
    return _of_activation(eqn, outs, wants) if is_function and is_activation(eqn) else wants


def _operands(
    eqn: Eqn, outs: list[int], union: int, demanded: Demanded, known: facts.Facts
) -> list[int]:
    """Returns how an operation reads its operands but for a loop's stop test."""
    name = eqn.primitive.name
    later = union & (LATER | FORWARD)
    if named_attention.is_attention(eqn):
        return _of_attention(eqn, later)
    if hands_on_each(eqn, sorts=True):  # a sort also compares the keys
        keys, asked = eqn.params.get("num_keys", 0), conditioned.decides(eqn, union, known)
        return [want | asked if i < keys else want for i, want in enumerate(outs)]
    asked = conditioned.asks(eqn, union, known)
    if conditioned.ruins(eqn) or name in demanded.full:
        return [later | EXACT | asked] * len(eqn.invars)
    wants = _by_rule(eqn, union, later)
    if name in traits.SCALES:
        wants = [w | of for w, of in zip(wants, conditioned.of_factors(eqn, known), strict=True)]
    return [want | asked for want in wants] if asked else wants


def _of_attention(eqn: Eqn, later: int) -> list[int]:
    if scopes.is_as_written(eqn):
        return [later] * len(eqn.invars)
    product = PRODUCT | LATER | FORWARD | WHOLE
    return [product if low else LATER | FORWARD for low in named_attention.operands_low(eqn)]


def _by_rule(eqn: Eqn, union: int, later: int) -> list[int]:
    name = eqn.primitive.name
    if name in PRODUCTS:
        return _of_product(eqn, union, later)
    if name in MOVES:
        moved = union & ~WHOLE if name in traits.RESIZES else union
        return [moved] * len(eqn.invars)
    if name in traits.HANDS_ON:
        passed = OUTPUT | LATER | FORWARD | FULL | CARRIED | EXACT | ABSOLUTE | LARGE
        if name not in traits.SCALES or any(map(compat.is_literal, eqn.invars)):
            passed |= GRADIENT
        return [union & passed] * len(eqn.invars)
    if name in traits.ACCUMULATES:
        return [union & (LATER | FORWARD | FULL | EXACT | ABSOLUTE | LARGE)] * len(eqn.invars)
    if name in traits.ABSOLUTE:
        return [later | ABSOLUTE]
    return [later] * len(eqn.invars)


def _of_product(eqn: Eqn, union: int, later: int) -> list[int]:
    if contraction.only_sums(eqn):
        return [later | union & (NEAR | DIFFERENCE | AGAIN | RESULT)] * len(eqn.invars)
    if contraction.adds_nothing(eqn):
        passed = OUTPUT | LATER | FORWARD | FULL | CARRIED | ABSOLUTE | UNROUNDED
        return [union & passed] * len(eqn.invars)
    if not reasons.has_default_precision(eqn):
        return [later | EXACT] * len(eqn.invars)
    if conditioned.keeps_from_low(eqn, union):
        return [later | EXACT] * len(eqn.invars)
    if reasons.as_written(eqn) or scopes.is_as_written(eqn):
        return [later] * len(eqn.invars)
    again = union & AGAIN  # equal products are of operands that are rounded alike
    return [PRODUCT | LATER | FORWARD | WHOLE | again] * 2 + [0] * (len(eqn.invars) - 2)


def _of_activation(eqn: Eqn, outs: list[int], inside: list[int]) -> list[int]:
    """An activation is one operation: what it reads inside is not read by a product outside."""
    wants = [w & (LATER | FORWARD | UNROUNDED | COTANGENTS) for w in inside]
    for out, made in zip(outs, ways.of_equation(eqn), strict=True):
        for i in ways.places(made.direct):
            wants[i] |= out & FULL
    return wants


class Inner:
    """Says how the programs of an equation read their inputs."""

    def __init__(self, eqn: Eqn, demanded: Demanded, known: facts.Facts) -> None:
        self.eqn, self.demanded, self.known = eqn, demanded, known

    def __call__(self, part: structure.Part, wants: tuple[int, ...]) -> tuple[int, ...]:
        given = facts.entering(self.eqn, part, self.known).given
        flags = inside(part.program, wants, self.demanded, given)
        return tuple(flags.get(v, 0) for v in compat.closed(part.program).jaxpr.invars)


@by_program
def inside(
    program: Any, wants: tuple[int, ...], demanded: Demanded, given: tuple[facts.Fact, ...]
) -> dict[Any, int]:
    """Returns the flags of each variable of a program, given the facts of its inputs."""
    return of(compat.closed(program).jaxpr, wants, demanded, facts.inside(program, given))
