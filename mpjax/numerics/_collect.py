"""Base classes of the instruments that gather a row from each operation and judge none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from mpjax._jaxpr.binding import bind
from mpjax._jaxpr.equation import Eqn
from mpjax.numerics._run import TrackedValue

_NOTHING = np.int32(0)


class Collecting:
    """An instrument whose rows mean the same in every iteration of a loop."""

    def is_news(self, now: Any, before: Any) -> Any:
        """Returns false for each row."""
        del before
        return jnp.zeros(now.shape[:1], jnp.bool_)


class Unmeasured(Collecting):
    """Measures nothing; runs a program operation by operation for its outputs."""

    width = 0
    sums = 0
    shadows = False

    def frame(self, spread: Callable[[Any], Any]) -> UnmeasuredFrame:
        """Returns the frame of one function body."""
        return UnmeasuredFrame(spread)

    def outputs(self, outs: Sequence[TrackedValue]) -> None:
        """Returns nothing."""
        del outs


class CollectingFrame:
    """A frame that gathers rows; it knows nothing of values, unless a subclass does."""

    def __init__(self, spread: Callable[[Any], Any]) -> None:
        self.spread = spread
        self.collected: list[Any] = []

    def enter(self, extra: Any) -> Any:
        return extra

    def leave(self, extra: Any) -> Any:
        return extra

    def fresh(self, value: Any) -> Any:
        del value
        return jnp.zeros((), jnp.int32)

    def same(self, eqn: Eqn, operands: Sequence[TrackedValue]) -> list[TrackedValue]:
        return [TrackedValue(out) for out in bind(eqn, [t.value for t in operands])]

    def rows(self) -> Any:
        return jnp.stack(self.collected)


class UnmeasuredFrame(CollectingFrame):
    """A frame whose rows are empty."""

    def constant(self, value: Any) -> Any:
        self.collected.append(None)
        return self.fresh(value)

    def fresh(self, value: Any) -> Any:
        del value
        return _NOTHING

    def measure(self, eqn: Eqn, operands: Sequence[TrackedValue]) -> list[TrackedValue]:
        self.collected.append(None)
        return self.same(eqn, operands)

    def rows(self) -> Any:
        return self.spread(jnp.zeros((len(self.collected), 0), jnp.float32))
