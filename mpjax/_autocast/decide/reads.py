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
from mpjax._autocast.decide.must import conditioned, meetings, of_losses, proportions, weights
from mpjax._autocast.decide.read_flags import (
    ABSOLUTE,
    ACCUMULATOR,
    AGAIN,
    CARRIED,
    COTANGENTS,
    DIFFERENCE,
    DIVIDED,
    FORWARD,
    GRADIENT,
    LATER,
    MEET,
    NEAR,
    OUTPUT,
    PRODUCT,
    PROPORTION,
    READ,
    RELATIVE,
    RESULT,
    RUINED,
    SCALED,
    SMALL,
    SOLUTION,
    TESTED,
    TURNS,
    UNHELD,
    UNROUNDED,
    WHOLE,
)
from mpjax._autocast.known import (
    contraction,
    fact_flags,
    facts,
    fusible,
    named_attention,
    ranges,
    scopes,
    traits,
    walk,
    ways,
)
from mpjax._autocast.known.activations import is_activation, is_in_a_derivative
from mpjax._base import compat
from mpjax._jaxpr import structure
from mpjax._jaxpr.caches import by_program
from mpjax._jaxpr.equation import Eqn, Jaxpr
from mpjax._jaxpr.op_rules import MOVES, PRODUCTS, hands_on_each, only_moves
from mpjax._jaxpr.sizes import is_float32


@dataclass(frozen=True)
class Others:
    """How values are read beside the operations of their program."""

    full: frozenset[str] = frozenset()  # operations that the user's `rules=` hold in float32
    of_values: frozenset[tuple[Any, int]] = frozenset()  # values, and flags for each


def of(
    jaxpr: Jaxpr, out_reads: tuple[int, ...], others: Others, known: facts.Facts
) -> dict[Any, int]:
    """Returns how each variable of an open jaxpr is read, in the flags of `read_flags`.

    Args:
      jaxpr: the program.
      out_reads: how its outputs are read.
      others: how values are read beside.
      known: the facts of its variables.
    """
    reads: dict[Any, int] = {}
    for v, flags in others.of_values:
        if v in known:
            reads[v] = reads.get(v, 0) | flags
    for atom, out_read in zip(jaxpr.outvars, out_reads, strict=True):
        if out_read and not compat.is_literal(atom):
            reads[atom] = meetings.joined(reads.get(atom, 0), out_read)
    for eqn in reversed(jaxpr.eqns):
        if eqn.primitive.name in PRODUCTS:
            read = reads.get(eqn.outvars[0], 0)
            reads[eqn.outvars[0]] = read | of_losses.how_read(eqn, read, known)
        outs = [reads.get(v, 0) for v in eqn.outvars]
        out_read = outs[0] if len(outs) == 1 else functools.reduce(operator.or_, outs, 0)
        _add(reads, eqn, out_read, _of_operands(eqn, outs, out_read, others, known), known)
    return reads


def _add(
    reads: dict[Any, int],
    eqn: Eqn,
    out_read: int,
    operand_reads: Sequence[int],
    known: facts.Facts,
) -> None:
    """Adds how an equation reads its operands to how they are read."""
    place = scopes.place(eqn)
    backward = place.is_transposed
    hands_on = backward or only_moves(eqn) or structure.is_call(eqn)
    own, handed_on = meetings.how_read(eqn, place, out_read)
    repeated = meetings.in_each_turn(eqn)
    for i, (atom, operand_read) in enumerate(zip(eqn.invars, operand_reads, strict=True)):
        if compat.is_literal(atom):
            continue
        read = operand_read & ~COTANGENTS
        if i in repeated and operand_read & READ:
            read |= MEET | TURNS
        if is_float32(atom):
            read |= operand_read & handed_on | own
        if backward:
            read &= ~FORWARD
        if not hands_on and known[atom].flags & fact_flags.DERIVED:
            read |= GRADIENT
        if read:
            reads[atom] = meetings.joined(reads.get(atom, 0), read)


def _of_operands(
    eqn: Eqn, outs: list[int], out_read: int, others: Others, known: facts.Facts
) -> list[int]:
    """Returns how an equation reads its operands.

    Args:
      eqn: the equation.
      outs: how each result is read.
      out_read: how one of them is.
      others: how values are read beside.
      known: the facts of its program.
    """
    if structure.is_call(eqn):
        return _of_call(eqn, outs, others, known)
    reads = _of_operation(eqn, outs, out_read, others, known)
    if not out_read & TESTED:
        return reads
    return [r | t for r, t in zip(reads, conditioned.of_a_test(eqn), strict=True)]


def _of_call(eqn: Eqn, outs: list[int], others: Others, known: facts.Facts) -> list[int]:
    is_function, full = fusible.is_fusible_function(eqn), others.full
    later = functools.reduce(operator.or_, outs, 0) & (LATER | FORWARD)
    if is_function and full and fusible.operations(eqn) & full:
        return [later | RUINED] * len(eqn.invars)
    if is_in_a_derivative(eqn):
        return [later] * len(eqn.invars)
    reads = control.operand_reads(eqn, tuple(outs), Inner(eqn, others, known))
    return _of_activation(eqn, outs, reads) if is_function and is_activation(eqn) else reads


def _of_operation(
    eqn: Eqn, outs: list[int], out_read: int, others: Others, known: facts.Facts
) -> list[int]:
    """Returns how an operation reads its operands but for a loop's stop test."""
    name = eqn.primitive.name
    later = out_read & (LATER | FORWARD)
    if named_attention.is_attention(eqn):
        return _of_attention(eqn, later)
    if hands_on_each(eqn, sorts=True):  # a sort also compares the keys
        keys, compared = eqn.params.get("num_keys", 0), conditioned.decides(eqn, out_read, known)
        return [r | compared if i < keys else r for i, r in enumerate(outs)]
    unrounded = conditioned.how_read(eqn, out_read, known)
    if conditioned.ruins(eqn) or name in others.full:
        return [later | RUINED | unrounded | out_read & PROPORTION] * len(eqn.invars)
    reads = _by_rule(eqn, out_read, later, known)
    if name in traits.SCALES:
        reads = [r | of for r, of in zip(reads, conditioned.of_factors(eqn, known), strict=True)]
    reads = [r | unrounded for r in reads] if unrounded else reads
    if levels := conditioned.of_levels(eqn, out_read, known):
        reads = [r | level for r, level in zip(reads, levels, strict=True)]
    small = proportions.how_read(eqn, out_read, known)
    reads = [r | s for r, s in zip(reads, small, strict=True)]
    return weights.of_operands(eqn, reads, known) if out_read & DIVIDED else reads


def _of_attention(eqn: Eqn, later: int) -> list[int]:
    if scopes.is_as_written(eqn):
        return [later] * len(eqn.invars)
    product = PRODUCT | LATER | FORWARD | WHOLE
    return [product if low else LATER | FORWARD for low in named_attention.operands_low(eqn)]


def _by_rule(eqn: Eqn, out_read: int, later: int, known: facts.Facts) -> list[int]:
    name = eqn.primitive.name
    if name in PRODUCTS:
        flags = DIVIDED if weights.are_divided(eqn, out_read, known) else 0
        is_unheld = any(facts.of_atom(v, known).flags & ranges.UNHELD for v in eqn.invars[:2])
        if is_unheld or proportions.may_be_lost(eqn, out_read, known):
            flags |= UNHELD
        return [read | flags for read in _of_product(eqn, out_read, later)]
    if name in MOVES:
        moved = out_read & ~WHOLE if name in traits.RESIZES else out_read
        return [moved] * len(eqn.invars)
    if name in traits.HANDS_ON:
        passed = OUTPUT | LATER | FORWARD | ACCUMULATOR | CARRIED | RUINED | ABSOLUTE | SCALED
        if name not in traits.SCALES or any(map(compat.is_literal, eqn.invars)):
            passed |= GRADIENT
        return [out_read & passed] * len(eqn.invars)
    if name in traits.ACCUMULATES:
        passed = LATER | FORWARD | ACCUMULATOR | RUINED | ABSOLUTE | SCALED
        return [out_read & passed] * len(eqn.invars)
    if name in traits.ABSOLUTE:
        return [later | ABSOLUTE]
    return [later] * len(eqn.invars)


def _of_product(eqn: Eqn, out_read: int, later: int) -> list[int]:
    if contraction.only_sums(eqn):
        return [later | out_read & (NEAR | DIFFERENCE | AGAIN | RESULT)] * len(eqn.invars)
    if contraction.adds_nothing(eqn):
        passed = OUTPUT | LATER | FORWARD | ACCUMULATOR | CARRIED | ABSOLUTE | UNROUNDED
        return [out_read & passed] * len(eqn.invars)
    handed_on = out_read & AGAIN  # equal products are of operands rounded alike
    if not reasons.has_default_precision(eqn):
        return [later | handed_on | RUINED] * len(eqn.invars)
    handed_on |= RELATIVE if out_read & (NEAR | RELATIVE) else 0
    if flag := of_losses.keeps_from_low(out_read):
        small = flag == SMALL and not out_read & NEAR
        kept = NEAR if small else RUINED | out_read & SOLUTION
        return [later | handed_on | kept] * len(eqn.invars)
    if reasons.as_written(eqn) or scopes.is_as_written(eqn):
        return [later | handed_on] * len(eqn.invars)
    return [PRODUCT | LATER | FORWARD | WHOLE | handed_on] * 2 + [0] * (len(eqn.invars) - 2)


def _of_activation(eqn: Eqn, outs: list[int], inside: list[int]) -> list[int]:
    """An activation is one operation: what it reads inside is not read by a product outside."""
    reads = [r & (LATER | FORWARD | UNROUNDED | COTANGENTS) for r in inside]
    for out, made in zip(outs, ways.of_equation(eqn), strict=True):
        for i in ways.places(made.direct):
            reads[i] |= out & ACCUMULATOR
    return reads


class Inner:
    """Says how the programs of an equation read their inputs."""

    def __init__(self, eqn: Eqn, others: Others, known: facts.Facts) -> None:
        self.eqn, self.others, self.known = eqn, others, known

    def __call__(self, part: structure.Part, out_reads: tuple[int, ...]) -> tuple[int, ...]:
        given = walk.entering(self.eqn, part, self.known).given
        reads = inside(part.program, out_reads, self.others, given)
        return tuple(reads.get(v, 0) for v in compat.closed(part.program).jaxpr.invars)


@by_program
def inside(
    program: Any, out_reads: tuple[int, ...], others: Others, given: tuple[facts.Fact, ...]
) -> dict[Any, int]:
    """Returns how each variable of a program is read, given the facts of its inputs."""
    return of(compat.closed(program).jaxpr, out_reads, others, walk.inside(program, given))
