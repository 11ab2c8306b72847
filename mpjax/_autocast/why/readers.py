"""Finds the operation for whose sake a value stays in float32: rounding would hurt its result.

`reads` gives flags without names, since calls whose results are read differently share a plan.
`explain` looks the name up, for one place in the program.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import Any

from mpjax._autocast.arrange.plan import Plan
from mpjax._autocast.decide import read_flags
from mpjax._autocast.decide.decided import Action, Decision
from mpjax._autocast.decide.must import conditioned
from mpjax._autocast.known import fusible, scopes, traits
from mpjax._base import compat
from mpjax._jaxpr import structure
from mpjax._jaxpr.equation import Eqn


@dataclass(frozen=True)
class Reader:
    """An operation, and its place in the source."""

    name: str
    where: str
    of_an_angle: bool = False  # it is a sine, a remainder, or a function that holds one

    def __str__(self) -> str:
        return f"{self.name}, {self.where}" if self.where else self.name


Readers = list[Reader | None]


def of(plan: Plan, outside: Readers) -> dict[Any, Reader]:
    """Returns, for each value that must not be rounded, the operation that needs it so.

    Args:
      plan: of the program.
      outside: for each output, the operation outside that needs it unrounded, or None.
    """
    readers: dict[Any, Reader] = {}

    def add(atom: Any, reader: Reader | None) -> None:
        if reader is None or compat.is_literal(atom):
            return
        if plan.reads.get(atom, 0) & read_flags.UNROUNDED:
            readers.setdefault(atom, reader)

    for atom, reader in zip(plan.jaxpr.jaxpr.outvars, outside, strict=True):
        add(atom, reader)
    for decision in reversed(plan.decisions):
        outs = [readers.get(v) for v in decision.eqn.outvars]
        for atom, reader in zip(decision.eqn.invars, _operands(plan, decision, outs), strict=True):
            add(atom, reader)
    return readers


def inside(decision: Decision, readers: dict[Any, Reader]) -> list[Readers]:
    """Returns the readers of the outputs of each program of a call, in the order of its plans."""
    outs = [readers.get(v) for v in decision.eqn.outvars]
    return [
        [None] if part.is_condition else _turn(part, inner, outs)
        for part, inner in zip(structure.parts(decision.eqn), decision.call.programs, strict=True)
    ]


def _turn(part: structure.Part, inner: Plan, outs: Readers) -> Readers:
    """Returns the readers of a body's outputs: in the next iteration, or those of the results."""
    if not part.carries:
        return outs
    at_start = of(inner, outs)
    carried = inner.jaxpr.jaxpr.invars[part.carried]
    asked = [outer or at_start.get(v) for outer, v in zip(outs, carried, strict=False)]
    return [*asked, *outs[len(asked) :]]


def _operands(plan: Plan, decision: Decision, outs: Readers) -> Readers:
    eqn = decision.eqn
    first = next((r for r in outs if r is not None), None)
    if decision.call is not None:
        return _of_call(decision, outs)
    own = _reader(eqn)
    if fusible.is_fusible_function(eqn):
        return [first or own] * len(eqn.invars)
    out_read = functools.reduce(operator.or_, (plan.reads.get(v, 0) for v in eqn.outvars), 0)
    if first is not None and first.of_an_angle and eqn.primitive.name in traits.HANDS_ON:
        return [first] * len(eqn.invars)  # a shift by 300 matters to the sine behind it
    is_own = bool(conditioned.of_itself(eqn, out_read, plan.facts)) or conditioned.ruins(eqn)
    stops = decision.action is Action.PRODUCT
    return [own if is_own else None if stops else first] * len(eqn.invars)


def _of_call(decision: Decision, outs: Readers) -> Readers:
    by_operand: Readers = [None] * len(decision.eqn.invars)
    known = {v: r for v, r in zip(decision.eqn.outvars, outs, strict=True) if r is not None}
    programs = zip(
        structure.parts(decision.eqn),
        decision.call.programs,
        inside(decision, known),
        strict=True,
    )
    for part, inner, asked in programs:
        by = of(inner, asked)
        for place, v in zip(part.operands, inner.jaxpr.jaxpr.invars, strict=True):
            by_operand[place] = by_operand[place] or by.get(v)
    return by_operand


def _reader(eqn: Eqn) -> Reader:
    is_function = structure.single_program(eqn) is not None
    name = structure.function_name(eqn) if is_function else eqn.primitive.name
    inside = fusible.operations(eqn) if fusible.is_fusible_function(eqn) else {name}
    return Reader(name, _where(eqn), not traits.ANGLES.isdisjoint(inside))


def _where(eqn: Eqn) -> str:
    """Returns the file and line of an equation, without the function's name."""
    return scopes.short(scopes.location(eqn))
