"""A plan: what was decided of a program, and in which steps it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from mpjax._autocast.decide.decided import Decided


@dataclass(slots=True)
class Step:
    """Equations that run together: one, or a group in float32.

    `outputs` are the variables read elsewhere, each with whether its low form, its float32 form,
    or both are wanted.
    """

    members: list[int]
    group: bool = False
    inputs: tuple[Any, ...] = ()
    outputs: tuple[tuple[Any, bool, bool], ...] = ()
    checkpoint: bool = False
    native: bool = False
    repeated: frozenset[Any] = frozenset()  # what `broadcast_in_dim` makes inside the group
    several: frozenset[Any] = frozenset()  # values whose cotangents are read in several passes
    dear: frozenset[Any] = frozenset()  # those of them whose cotangents XLA would not compute twice
    apart: frozenset[Any] = frozenset()  # terms whose cotangents are sums, taken in a pass each
    convolved: frozenset[Any] = frozenset()  # sums that cuDNN adds up as it convolves
    rows: Any = None  # the input whose rows a GPU holds in one kernel, and again for the gradient
    stored: frozenset[Any] = frozenset()  # outputs that a GPU is to hold low, whoever reads them
    attention: Any = None  # an `attention.steps.Attended`, run in place of the steps that it is of


@dataclass(slots=True, eq=False, kw_only=True)
class Plan(Decided):
    """Everything that running a jaxpr needs to know."""

    steps: list[Step]
    compiled: dict[Any, Any] = field(default_factory=dict)  # `jit` functions made from it


def of(decided: Decided, steps: Sequence[Step]) -> Plan:
    """Returns the plan that runs what was decided in these steps."""
    known = {f.name: getattr(decided, f.name) for f in fields(decided)}
    return Plan(**known, steps=list(steps))
