"""Times the stages of a run, such as compiling, and shows each one while it runs."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Generator

from mpjax._base.errors import message

Progress = bool | Callable[[str], None] | None


class Clock:
    """Adds up the seconds of stages by name, and says which one runs.

    Args:
      where: the function that asks, for the lines and for messages.
      progress: True for lines on stderr, False for none, None for lines where a person looks (a
        terminal, a notebook); or a function that is given each line.

    Raises:
      TypeError: `progress` is none of these.
    """

    def __init__(self, where: str, progress: Progress = False) -> None:
        if not (progress is None or isinstance(progress, bool) or callable(progress)):
            got = f"got {progress!r}."
            fix = "Allowed: True, False, None (where a person looks), or a function of a line."
            raise TypeError(message(f"{where}(progress)", got, fix))
        self.where = where
        self.seconds: dict[str, float] = {}
        self._say = progress if callable(progress) else _shown(progress)

    @contextlib.contextmanager
    def __call__(self, stage: str, detail: str = "") -> Generator[None]:
        """Times a `with` block as one stage; a stage around it is charged for the rest alone."""
        self._say(f"{self.where}: {stage}{detail and f' {detail}'} ...")
        started, inner = time.perf_counter(), sum(self.seconds.values())
        try:
            yield
        finally:
            took = time.perf_counter() - started - (sum(self.seconds.values()) - inner)
            self.seconds[stage] = self.seconds.get(stage, 0.0) + took

    def __str__(self) -> str:
        return spent(self.seconds)


def spent(seconds: dict[str, float]) -> str:
    """Returns stages and their seconds as one line, the longest first."""
    stages = sorted(seconds.items(), key=lambda pair: -pair[1])
    parts = ", ".join(f"{stage} {took:.1f} s" for stage, took in stages)
    return f"took {sum(seconds.values()):.1f} s: {parts}"


def _shown(progress: bool | None) -> Callable[[str], None]:
    if progress or (progress is None and _is_looked_at()):
        return lambda line: print(line, file=sys.stderr, flush=True)  # noqa: T201
    return lambda _: None


def _is_looked_at() -> bool:
    """Whether stderr is a terminal, or a notebook's."""
    return sys.stderr.isatty() or "ipykernel" in type(sys.stderr).__module__
