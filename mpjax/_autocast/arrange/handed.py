"""Values that a group hands on, because it takes a total of them: a sum, or a mean.

The cotangent of a total comes back to all elements alike, and is rounded alike in each. Where it
cancels what other readers give back, as that of a mean does in `h - mean(h)`, one of them is in
another program: a checkpoint, a loop, behind a barrier. So the group returns the value as well,
and later readers take it from there: their cotangents enter the group, which adds up in float32
and rounds the sum once. The value is the same, and stored once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mpjax._autocast.arrange.plan import PlanStep
from mpjax._autocast.decide.states import Kind, State
from mpjax._autocast.known import totals
from mpjax._autocast.speed import FusedGroup
from mpjax._base import compat
from mpjax._jaxpr import structure
from mpjax._jaxpr.equation import Eqn, Jaxpr


def on(
    jaxpr: Jaxpr, steps: Sequence[PlanStep], states: dict[Any, State], out_states: Sequence[State]
) -> list[PlanStep]:
    """Returns the steps of a program, in which groups hand on what they take totals of.

    Args:
      jaxpr: open.
      steps: its steps, in order.
      states: the state of each value.
      out_states: the state of each output.
    """
    outputs = zip(jaxpr.outvars, out_states, strict=True)
    read = {v for v, s in outputs if not compat.is_literal(v) and s.kind == Kind.LOW}
    made: list[PlanStep] = []
    for step in reversed(steps):
        if step.group is None:
            eqns = (jaxpr.eqns[i] for i in step.members)
            read.update(v for eqn in eqns if _parts_kernels(eqn) for v in compat.variables(eqn))
        else:
            totalled = _totalled(step.group) & read
            more = [v for v in step.group.inputs if v in totalled and states[v].kind == Kind.LOW]
            if more:
                outputs = (*step.group.outputs, *((v, True, False) for v in more))
                step = replace(step, group=step.group._replace(outputs=outputs))
        made.append(step)
    return made[::-1]


def _parts_kernels(eqn: Eqn) -> bool:
    return structure.is_call(eqn) or eqn.primitive.name == "optimization_barrier"


def _totalled(group: FusedGroup) -> set[Any]:
    """Returns the values of a group of which it makes a total."""
    read: set[Any] = set()
    for eqn in reversed(group.eqns):
        if totals.is_total(eqn) or not read.isdisjoint(eqn.outvars):
            read.update(compat.variables(eqn))
    return read
