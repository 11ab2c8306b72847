"""The instrument of `compare`: beside each value, the one that the reference dtype gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from mpjax._jaxpr.binding import bind
from mpjax.numerics._collect import Collecting, CollectingFrame
from mpjax.numerics._plan import is_inexact
from mpjax.numerics._reference import in_reference, widened
from mpjax.numerics._run import Tracked

# The columns, sums of magnitudes: of errors, of what they are of, and of the terms of a sum.
LOCAL, LOCAL_SIZE, TOTAL, TOTAL_SIZE, TERMS = range(5)
SUM = "reduce_sum"


class Shadow(Collecting):
    """Measures two errors of each operation, as sums of magnitudes.

    The local one is against the reference operation on the very operands that it had: what this
    operation adds. The accumulated one is against a run that is in the reference dtype throughout.
    """

    width = 5
    sums = 5
    shadows = True

    def __init__(self, dtype: Any) -> None:
        self.dtype = jnp.dtype(dtype)

    def frame(self, spread: Callable[[Any], Any]) -> _Frame:
        """Returns what measures one function body."""
        return _Frame(self.dtype, spread)

    def outputs(self, outs: Sequence[Tracked]) -> Any:
        """Returns the accumulated error of each output, and its size."""
        return jnp.stack([jnp.stack(_error(t.value, t.extra)) for t in outs])


class _Frame(CollectingFrame):
    def __init__(self, dtype: Any, spread: Callable[[Any], Any]) -> None:
        super().__init__(spread)
        self.dtype = dtype

    def fresh(self, value: Any) -> Any:
        return widened(value, self.dtype)

    def constant(self, value: Any) -> Any:
        self.collected.append(self.spread(jnp.zeros((Shadow.width,), jnp.float32)))
        return self.fresh(value)

    def same(self, eqn: Any, operands: Sequence[Tracked]) -> list[Tracked]:
        outs, shadows, _ = self._both(eqn, operands)
        return self._tracked(eqn, outs, shadows)

    def measure(self, eqn: Any, operands: Sequence[Tracked]) -> list[Tracked]:
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

    def _both(self, eqn: Any, operands: Sequence[Tracked]) -> tuple[list[Any], ...]:
        """Returns the results, those of the shadows, and the reference's on the same operands."""
        outs = bind(eqn, [t.value for t in operands])
        wide = [t.value if t.extra is None else widened(t.value, self.dtype) for t in operands]
        shadows = [t.value if t.extra is None else t.extra for t in operands]
        return (
            outs,
            in_reference(eqn, shadows, outs, self.dtype),
            in_reference(eqn, wide, outs, self.dtype),
        )

    def _tracked(self, eqn: Any, outs: Sequence[Any], shadows: Sequence[Any]) -> list[Tracked]:
        return [
            Tracked(out, shadow if is_inexact(var) else None)
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
