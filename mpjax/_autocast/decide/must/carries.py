"""Recurrent carries of a loop: made of themselves by sums and elementwise operations.

A solver's value, a running average and a log-probability are such carries: each turn changes them a
little, and rounding would lose the change. `x + 0.01 * f(x)` is recurrent, `tanh(x @ w)` is not: a
product or a bounded function makes a new value. An operation that is not known passes on.
"""

from __future__ import annotations

from typing import Any

from mpjax._autocast.known import ways
from mpjax._base import compat
from mpjax._jaxpr import structure
from mpjax._jaxpr.caches import by_program
from mpjax._jaxpr.equation import Eqn


def recurrent(eqn: Eqn) -> tuple[bool, ...]:
    """Returns, for each carry of a `scan` or `while` equation, whether it is recurrent."""
    body = structure.parts(eqn)[-1]
    return _recurrent(body.program, body.carried.start, body.carries)


@by_program
def _recurrent(body: Any, consts: int, carries: int) -> tuple[bool, ...]:
    jaxpr = compat.closed(body).jaxpr
    ours = (1 << carries) - 1
    before = [
        0 if out is given else made.direct >> consts & ours  # 0: handed on as it is
        for out, given, made in zip(
            jaxpr.outvars[:carries],
            jaxpr.invars[consts : consts + carries],
            ways.of_program(body)[:carries],
            strict=True,
        )
    ]
    return tuple(bool(r >> i & 1) for i, r in enumerate(ways.leading(before)))
