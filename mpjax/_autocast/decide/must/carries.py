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
    reached = [made.direct for made in ways.of_program(body)]
    before = {
        i: {p - consts for p in ways.places(reached[i]) if consts <= p < consts + carries}
        for i in range(carries)
        if jaxpr.outvars[i] is not jaxpr.invars[consts + i]  # handed on as it is
    }
    return tuple(i in _ancestors(i, before) for i in range(carries))


def _ancestors(place: int, before: dict[int, set[int]]) -> set[int]:
    ancestors: set[int] = set()
    waiting = set(before.get(place, ()))
    while waiting:
        i = waiting.pop()
        if i not in ancestors:
            ancestors.add(i)
            waiting |= before.get(i, set())
    return ancestors
