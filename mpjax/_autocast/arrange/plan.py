"""A plan: what was decided of a program, and in which steps it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from mpjax._autocast.decide.decided import Decided
from mpjax._autocast.speed import FusedGroup


@dataclass(slots=True)
class PlanStep:
    """Equations that run together: one, or a group in float32."""

    members: list[int]
    group: FusedGroup | None = None
    inputs: tuple[Any, ...] = ()  # of an attention
    attention: Any = None  # an `attention.steps.Attended`, run in place of the steps that it is of


@dataclass(slots=True, eq=False, kw_only=True)
class Plan(Decided):
    """Everything that running a jaxpr needs to know."""

    steps: list[PlanStep]
    compiled: dict[Any, Any] = field(default_factory=dict)  # `jit` functions made from it


def of(decided: Decided, steps: Sequence[PlanStep]) -> Plan:
    """Returns the plan that runs what was decided in these steps."""
    known = {f.name: getattr(decided, f.name) for f in fields(decided)}
    return Plan(**known, steps=list(steps))
