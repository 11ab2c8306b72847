"""Time of steps on a device: many enqueued, waited for once, variants in turns."""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

import jax

from .jobs import Row, attempted, failed

MOST_STEPS = 5000  # of one sample: what is enqueued is held


class Timed(Protocol):
    """A variant that is ready to run; between `open` and `close` it holds the device's memory."""

    facts: Row  # what goes into its row beside the time
    multiple: int  # of what the steps of a sample are a multiple

    def open(self) -> None:
        """Puts its arrays on the device."""

    def run(self, steps: int) -> float:
        """Runs so many steps and returns their seconds, the wait for the last one included."""

    def close(self) -> None:
        """Gives the memory back."""


@dataclasses.dataclass(frozen=True)
class Patience:
    """How long to look."""

    sample_s: float = 0.3
    samples: int = 5


class JaxStep:
    """A compiled program that is called again and again.

    Args:
      program: `jax.stages.Compiled`.
      start: returns its arguments, made on the device.
      facts: for its row.
      carries: whether the first result is the next call's first argument, as in a train step whose
        state is donated.
      multiple: of what the steps of a sample are a multiple.
    """

    def __init__(
        self,
        program: Any,
        start: Callable[[], tuple[Any, ...]],
        facts: Row,
        *,
        carries: bool = False,
        multiple: int = 1,
    ) -> None:
        self.program, self.start, self.facts = program, start, facts
        self.carries, self.multiple = carries, multiple
        self.args: tuple[Any, ...] = ()

    def open(self) -> None:
        """Makes the arguments."""
        self.args = jax.block_until_ready(self.start())

    def run(self, steps: int) -> float:
        """Enqueues the steps, waits once."""
        started = time.perf_counter()
        for _ in range(steps):
            out = self.program(*self.args)
            if self.carries:
                self.args = (out[0], *self.args[1:])
        jax.block_until_ready(out)
        return time.perf_counter() - started

    def close(self) -> None:
        """Lets go of the arguments."""
        self.args = ()


def in_turns(prepared: dict[str, Timed | Exception], patience: Patience) -> dict[str, Row]:
    """Returns a row for each variant: milliseconds a step, the median of samples taken in turns.

    A variant that finds no memory beside the others is measured again alone.
    """
    rows = {name: failed(p) for name, p in prepared.items() if isinstance(p, Exception)}
    alive = {name: p for name, p in prepared.items() if not isinstance(p, Exception)}
    rows |= _measured(alive, patience)
    for name in alive if len(alive) > 1 else ():
        if "out_of_memory" in rows[name]:
            rows[name] = {**_measured({name: alive[name]}, patience)[name], "alone": True}
    return {name: rows[name] for name in prepared}


def _measured(alive: dict[str, Timed], patience: Patience) -> dict[str, Row]:
    rows: dict[str, Row] = {}
    steps: dict[str, int] = {}
    seconds: dict[str, list[float]] = {name: [] for name in alive}

    def tried(name: str, what: Callable[[], Any]) -> Any:
        result = attempted(what)
        if isinstance(result, Exception):
            rows[name] = {**failed(result), **alive[name].facts}
            alive[name].close()
        return result

    for name, timed in alive.items():
        found = tried(name, lambda timed=timed: _steps_of_a_sample(timed, patience))
        steps[name] = found if isinstance(found, int) else 0
    for _ in range(patience.samples):
        for name in (name for name in alive if name not in rows):
            took = tried(name, lambda name=name: alive[name].run(steps[name]))
            if isinstance(took, float):
                seconds[name].append(took / steps[name])
    for name, timed in alive.items():
        timed.close()
        if name not in rows:
            rows[name] = {**_summary(seconds[name]), "steps": steps[name], **timed.facts}
    return rows


def _steps_of_a_sample(timed: Timed, patience: Patience) -> int:
    """Opens and warms a variant; returns how many steps take as long as a sample should."""
    timed.open()
    timed.run(2)
    each = max(timed.run(3) / 3, 1e-7)
    wanted = min(math.ceil(patience.sample_s / each), MOST_STEPS)
    return math.ceil(wanted / timed.multiple) * timed.multiple


def _summary(seconds: list[float]) -> Row:
    milliseconds = [1e3 * s for s in seconds]
    return {
        "ms": statistics.median(milliseconds),
        "low": min(milliseconds),
        "high": max(milliseconds),
        "samples": len(milliseconds),
    }
