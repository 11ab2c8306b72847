"""The data of a check's result: the checks by name, findings, memory, times."""

from __future__ import annotations

import dataclasses
from typing import Literal, TypeAlias

Severity: TypeAlias = Literal["error", "warning"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong, or probably not meant."""

    check: str  # a key of CHECKS: 'weights', 'gradients', ...
    severity: Severity  # an error makes the report not ok
    what: str  # the fault, with dtype, size and place
    culprit: str  # the parameter's path or the source line
    fix: str  # the code to type instead

    def __str__(self) -> str:
        return f"{self.severity}: {self.what}\n    {self.fix}"


CHECKS = {
    "callbacks": "nothing in the step waits for the host",
    "agreement": "all processes trace the same program",
    "hashing": "the program does not follow PYTHONHASHSEED",
    "precision": "the accelerator is fast in the policy's dtypes",
    "memory": "the step fits",
    "batch": "every axis of the mesh has its own part of the work",
    "copies": "what devices hold copies of stays equal",
    "weights": "weights are gathered in the compute dtype",
    "gradients": "gradients are reduced in float32, once a step",
    "activations": "no activations are sent in float32, or gathered whole",
    "unknown": "every collective is one that the check knows",
    "replication": "optimizer state is sharded as its parameters are",
    "donation": "the state is donated",
}
"""The checks, in order; the key is a finding's `check`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes a device."""

    peak: int  # at the worst moment of the step
    arguments: int
    outputs: int
    aliased: int  # outputs that take the memory of donated arguments
    temporaries: int  # all of them; at one moment they may be fewer
    limit: int  # that a program may use; 0 if it is not known

    @property
    def headroom(self) -> float | None:
        """The part of the memory that is left, 0.25 for a quarter; None without a limit."""
        return 1 - self.peak / self.limit if self.limit else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds that a step takes at least, if only one thing counted; 0.0 where nothing is known."""

    compute: float
    hbm: float
    network: float

    @property
    def bound(self) -> str:
        """The longest of the three, 'compute', 'hbm' or 'network'; 'unknown' on a CPU."""
        times = dataclasses.asdict(self)
        return max(times, key=lambda name: times[name]) if any(times.values()) else "unknown"
