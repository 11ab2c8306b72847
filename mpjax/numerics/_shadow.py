"""The instrument of `compare`: runs the reference dtype beside each value, as its shadow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from mpjax._jaxpr.binding import bind
from mpjax._jaxpr.equation import Eqn
from mpjax.numerics._collect import Collecting, CollectingFrame
from mpjax.numerics._plan import is_inexact
from mpjax.numerics._reference import in_reference, widened
from mpjax.numerics._run import TrackedValue

# The columns, sums of magnitudes: of an error, of the result that it is of, of a sum's terms.
LOCAL, LOCAL_SIZE, TOTAL, TOTAL_SIZE, TERMS = range(5)
SUM = "reduce_sum"


class Shadow(Collecting):
    """Measures two errors of each operation, as sums of magnitudes.

    The local error is against the reference operation on the same operands: this operation's own
    share. The accumulated error is against a run that is in the reference dtype throughout.
    """

    width = 5
    sums = 5
    shadows = True

    def __init__(self, dtype: Any) -> None:
        self.dtype = jnp.dtype(dtype)

    def frame(self, spread: Callable[[Any], Any]) -> _ShadowFrame:
        """Returns the frame of one function body."""
        return _ShadowFrame(self.dtype, spread)

    def outputs(self, outs: Sequence[TrackedValue]) -> Any:
        """Returns the accumulated error of each output, and its size."""
        return jnp.stack([jnp.stack(_error(t.value, t.extra)) for t in outs])


class _ShadowFrame(CollectingFrame):
    def __init__(self, dtype: Any, spread: Callable[[Any], Any]) -> None:
        super().__init__(spread)
        self.dtype = dtype

    def fresh(self, value: Any) -> Any:
        return widened(value, self.dtype)

    def constant(self, value: Any) -> Any:
        self.collected.append(self.spread(jnp.zeros((Shadow.width,), jnp.float32)))
        return self.fresh(value)

    def same(self, eqn: Eqn, operands: Sequence[TrackedValue]) -> list[TrackedValue]:
        outs, shadows, _ = self._both(eqn, operands)
        return self._tracked(eqn, outs, shadows)

    def measure(self, eqn: Eqn, operands: Sequence[TrackedValue]) -> list[TrackedValue]:
        outs, shadows, locally = self._both(eqn, operands)
        row = jnp.zeros((TERMS,), jnp.float32)
        for var, out, local, shadow in zip(eqn.outvars, outs, locally, shadows, strict=True):
            if is_inexact(var):
                row = row + jnp.stack([*_error(out, local), *_error(out, shadow)])
        terms = jnp.zeros((), jnp.float32)
        if eqn.primitive.name == SUM and (summed := operands[0].extra) is not None:
            terms = jnp.sum(jnp.abs(summed)).astype(jnp.float32)
        self.collected.append(self.spread(jnp.append(row, terms)))
        return self._tracked(eqn, outs, shadows)

    def _both(self, eqn: Eqn, operands: Sequence[TrackedValue]) -> tuple[list[Any], ...]:
        """Returns the results, their shadows, and the reference's results on the same operands."""
        outs = bind(eqn, [t.value for t in operands])
        wide = [t.value if t.extra is None else widened(t.value, self.dtype) for t in operands]
        shadows = [t.value if t.extra is None else t.extra for t in operands]
        return (
            outs,
            in_reference(eqn, shadows, outs, self.dtype),
            in_reference(eqn, wide, outs, self.dtype),
        )

    def _tracked(self, eqn: Eqn, outs: Sequence[Any], shadows: Sequence[Any]) -> list[TrackedValue]:
        return [
            TrackedValue(out, shadow if is_inexact(var) else None)
            for var, out, shadow in zip(eqn.outvars, outs, shadows, strict=True)
        ]


def _error(out: Any, reference: Any) -> tuple[Any, Any]:
    """Returns the sum of the magnitudes of a difference, and of the reference.

    Behind a barrier: XLA:GPU deletes a rounding whose result it widens again, and with it the
    error that is looked for (`xla_allow_excess_precision`).
    """
    stored = lax.optimization_barrier(out)
    difference = jnp.abs(stored.astype(reference.dtype) - reference)
    total = jnp.sum(difference, dtype=difference.dtype), jnp.sum(jnp.abs(reference))
    return total[0].astype(jnp.float32), total[1].astype(jnp.float32)
