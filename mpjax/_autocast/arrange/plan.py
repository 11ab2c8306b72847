"""A plan: the decisions for a program, and the steps in which it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from mpjax._autocast.decide.decided import Decided, Decision
from mpjax._autocast.speed import FusedGroup


@dataclass(slots=True)
class PlanStep:
    """Equations that run together: a single one, a group in float32, or an attention."""

    members: list[int]
    group: FusedGroup | None = None
    inputs: tuple[Any, ...] = ()  # of an attention
    attention: Any = None  # an `attention.steps.Attended`, which runs in place of several steps


@dataclass(slots=True, eq=False, kw_only=True)
class Plan(Decided):
    """Everything that running a jaxpr needs to know."""

    steps: list[PlanStep]
    compiled: dict[Any, Any] = field(default_factory=dict)  # `jit` functions made from it


def of(decided: Decided, decisions: list[Decision], steps: Sequence[PlanStep]) -> Plan:
    """Returns the plan of what was decided, with the steps that carry it out.

    `decisions` are those decided of, with the plans of programs inside and the names of kernels.
    """
    known: dict[str, Any] = {f.name: getattr(decided, f.name) for f in fields(decided)}
    known["decisions"] = decisions
    return Plan(**known, steps=list(steps))
