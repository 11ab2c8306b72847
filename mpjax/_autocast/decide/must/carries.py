"""Recurrent carries of a loop: made of themselves by sums and elementwise operations.

A solver's value, a running average and a log-probability are such carries: each turn changes them a
little, and rounding would lose the change. `x + 0.01 * f(x)` is recurrent, `tanh(x @ w)` is not: a
product or a bounded function makes a new value. An operation that is not known passes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpjax._autocast.known import traits
from mpjax._autocast.known.contraction import is_product
from mpjax._base import compat
from mpjax._jaxpr import structure
from mpjax._jaxpr.caches import by_program
from mpjax._jaxpr.equation import Eqn

Places = frozenset[int]
_NONE: Places = frozenset()


def recurrent(eqn: Eqn) -> tuple[bool, ...]:
    """Returns, for each carry of a `scan` or `while` equation, whether it is recurrent."""
    body = structure.parts(eqn)[-1]
    return _recurrent(body.program, body.carried.start, body.carries)


@by_program
def _recurrent(body: Any, consts: int, carries: int) -> tuple[bool, ...]:
    jaxpr = compat.closed(body).jaxpr
    reached = direct(body)
    before = {
        i: {p - consts for p in reached[i] if consts <= p < consts + carries}
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


# -- direct paths ----------------------------------------------------------------------------------


@by_program
def direct(program: Any) -> tuple[Places, ...]:
    """Returns, for each output of a jaxpr, the inputs that reach it by a direct path.

    That is through anything but a product or a bounded function: what is not known passes on.
    """
    jaxpr = compat.closed(program).jaxpr
    reaching: dict[Any, Places] = {v: frozenset({i}) for i, v in enumerate(jaxpr.invars)}

    def of(atom: Any) -> Places:
        return _NONE if compat.is_literal(atom) else reaching.get(atom, _NONE)

    for eqn in jaxpr.eqns:
        outs = _passed(eqn, [of(v) for v in eqn.invars])
        reaching.update(zip(eqn.outvars, outs, strict=True))
    return tuple(map(of, jaxpr.outvars))


def _passed(eqn: Eqn, operands: Sequence[Places]) -> Sequence[Places]:
    if structure.is_call(eqn):
        return structure.forward(eqn, operands, _through, _any_of)
    blocked = eqn.primitive.name in traits.BENDS or is_product(eqn)
    return [_NONE if blocked else _any_of(operands)] * len(eqn.outvars)


def _through(program: Any, inputs: Sequence[Places]) -> list[Places]:
    return [_any_of([inputs[i] for i in places]) for places in direct(program)]


def _any_of(places: Sequence[Places]) -> Places:
    return _NONE.union(*places)
