"""The instrument of `diagnose`: counts inf and NaN, and measures the largest finite magnitude."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from mpjax._jaxpr.binding import bind
from mpjax._jaxpr.equation import Eqn
from mpjax.numerics import _bits
from mpjax.numerics._plan import is_inexact
from mpjax.numerics._run import TrackedValue

INF, NAN, AMAX, ORIGIN = range(4)  # the columns
INHERITED, TURNED, BORN_NAN, BORN_INF = range(4)  # the last one, of what is not finite
FINITE, HAS_INF, HAS_NAN = range(3)  # a value's severity, i32[]


_LONGEST = 8  # values that are counted in one pass


class Overflow:
    """Counts inf and NaN, and tells those that an operation made from those of its operands.

    `BORN_INF` and `BORN_NAN` were made of finite operands. `TURNED` is a NaN that was made of
    infinities: a row that a mask of -inf covers as a whole, or `inf - inf`.
    """

    width = 4
    sums = 2  # inf and NaN; the largest magnitude and the origin are maxima
    shadows = False

    def frame(self, spread: Callable[[Any], Any]) -> _OverflowFrame:
        """Returns the frame of one function body."""
        return _OverflowFrame(spread)

    def outputs(self, outs: Sequence[TrackedValue]) -> None:
        """Returns nothing: the rows tell which outputs are not finite."""
        del outs

    def is_news(self, now: Any, before: Any) -> Any:
        """Returns, row by row, whether it is not finite for the first time, or is made so now."""
        bad = (now[:, INF] + now[:, NAN] > 0) & (before[:, INF] + before[:, NAN] == 0)
        return bad | (now[:, ORIGIN] > before[:, ORIGIN])


class _OverflowFrame:
    """Counts once an operation, and judges all operations together at the end.

    A value is known by a number: from 0 up where this frame counted it, from -1 down where the
    frame around it did. Judging each operation by itself would be hundreds of kernels of one
    element each.
    """

    def __init__(self, spread: Callable[[Any], Any]) -> None:
        self.spread = spread
        self.counted: list[Any] = []
        self.given: list[Any] = []
        self.measured: list[tuple[int, tuple[int, ...]]] = []  # a row: what was counted, operands
        self.left: dict[int, Any] = {}
        self.literal: int | None = None
        self.chain: dict[int, Any] = {}  # numbers of what is to be counted, in one pass

    # Values that are counted are numbered from 0 up, given ones from -1 down.

    def enter(self, extra: Any) -> int:
        self.given.append(extra)
        return -len(self.given)

    def leave(self, extra: int) -> Any:
        if extra < 0:
            return self.given[-extra - 1]
        if extra not in self.left:
            self.flush()
            self.left[extra] = _severity(self.counted[extra])
        return self.left[extra]

    def fresh(self, value: Any) -> int:
        if not isinstance(value, jax.core.Tracer) and np.isfinite(np.asarray(value)).all():
            if self.literal is None:  # one for all numbers that are written in the program
                self.literal = len(self.counted)
                self.counted.append(self.spread(jnp.zeros((3,), jnp.float32)))
            return self.literal
        return self.count(value)

    def count(self, value: Any) -> int:
        self.counted.append(self.spread(_bits.counts(value)[0]))
        return len(self.counted) - 1

    def flush(self) -> None:
        """Counts the values of a chain of elementwise operations, of one shape, in one kernel.

        XLA computes a chain again in each kernel that reads one of its values: with one kernel a
        value, compile time grows with the square of the chain's length.
        """
        if self.chain:
            counts = self.spread(_bits.counts(*self.chain.values()))
            for row, number in enumerate(self.chain):
                self.counted[number] = counts[row]
            self.chain = {}

    def follows(self, out: Any, operands: Sequence[TrackedValue]) -> bool:
        """Whether a value is one more of the chain."""
        if not 0 < len(self.chain) < _LONGEST or not isinstance(out, jax.core.Tracer):
            return False  # operation by operation there is no kernel to share
        shape = jnp.shape(next(iter(self.chain.values())))
        return jnp.shape(out) == shape and any(t.extra in self.chain for t in operands)

    def constant(self, value: Any) -> int:
        number = self.count(value)
        self.measured.append((number, ()))
        return number

    def same(self, eqn: Eqn, operands: Sequence[TrackedValue]) -> list[TrackedValue]:
        outs = bind(eqn, [t.value for t in operands])
        paired = len(outs) == len(operands)
        return [TrackedValue(out, operands[i if paired else 0].extra) for i, out in enumerate(outs)]

    def measure(self, eqn: Eqn, operands: Sequence[TrackedValue]) -> list[TrackedValue]:
        outs = bind(eqn, [t.value for t in operands])
        floating = [is_inexact(v) for v in eqn.outvars]
        number = len(self.counted)
        if len(outs) == 1 and not jnp.iscomplexobj(outs[0]):
            if not self.follows(outs[0], operands):
                self.flush()
            self.chain[number] = outs[0]
            self.counted.append(None)
        else:
            read = [
                _bits.counts(out)[0] for out, is_one in zip(outs, floating, strict=True) if is_one
            ]
            self.counted.append(self.spread(functools.reduce(_together, read)))
        self.measured.append((number, tuple(t.extra for t in operands if t.extra is not None)))
        return [
            TrackedValue(out, number if is_one else None)
            for out, is_one in zip(outs, floating, strict=True)
        ]

    def rows(self) -> Any:
        self.flush()
        given = jnp.stack(self.given) if self.given else jnp.zeros((0,), jnp.int32)
        return _judged(jnp.stack(self.counted), self.spread(given), tuple(self.measured))


@functools.partial(jax.jit, static_argnums=2)
def _judged(counted: Any, given: Any, measured: tuple[tuple[int, tuple[int, ...]], ...]) -> Any:
    """Returns the rows: the counts, and whether the operands were finite.

    A jitted function, so that its tables are its own constants, and none of a `jax.checkpoint`.
    """
    # The last entry is finite, and stands where a row has fewer operands than another.
    finite = jnp.zeros_like(counted[:1, 0], jnp.int32)
    # Given ones in reverse, so that value -1 is the entry right before the last one.
    known = jnp.concatenate([_severity(counted), given[::-1], finite])
    most = max(len(operands) for _, operands in measured)
    count = known.shape[0] - 1
    table = [
        [n if n >= 0 else count + n for n in operands] + [count] * (most - len(operands))
        for _, operands in measured
    ]
    rows = np.array([number for number, _ in measured])
    worst = jnp.zeros_like(known[rows])
    if most:
        worst = jnp.max(known[np.array(table)], axis=1)
    made, infs = known[rows], counted[rows, INF]
    born = jnp.where(infs > 0, BORN_INF, jnp.where(made == HAS_NAN, BORN_NAN, INHERITED))
    # NaN of an inf, without a NaN among the operands: inf - inf, 0 * inf.
    turned = jnp.where((made == HAS_NAN) & (worst == HAS_INF), TURNED, INHERITED)
    origin = jnp.where(worst == FINITE, born, turned).astype(jnp.float32)
    return jnp.concatenate([counted[rows], origin[:, None]], axis=1)


def _severity(counted: Any) -> Any:
    infs, nans = counted[..., INF], counted[..., NAN]
    severity = jnp.where(nans > 0, HAS_NAN, jnp.where(infs > 0, HAS_INF, FINITE))
    return severity.astype(jnp.int32)


def _together(a: Any, b: Any) -> Any:
    return jnp.stack([a[INF] + b[INF], a[NAN] + b[NAN], jnp.maximum(a[AMAX], b[AMAX])])
