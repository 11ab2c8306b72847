"""Maxima that are compared with other values, by their derivative or by the author.

A backward pass that computes these values again may not take a maximum that was saved.

The gradient of `max(z)` goes where `z == max(z)`, shared by as many as are equal. A `z` that is
computed again by another kernel may differ in its last bit. Then no element is equal to the saved
maximum, and 0 / 0 is NaN. A softmax of JAX stops the gradient of its maximum: nothing is compared.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

from mpjax._autocast.known import traits
from mpjax._base import compat
from mpjax._jaxpr import structure
from mpjax._jaxpr.caches import by_program
from mpjax._jaxpr.equation import Eqn


class _Made(enum.IntEnum):
    """Of what a value was made; of several, the largest counts."""

    OTHERS = 0
    STOPPED = 1  # of what has no gradient
    BEHIND = 2  # of such and of others
    MAXIMUM = 3  # of a maximum that may have a gradient
    COMPARED = 4  # of a comparison with a maximum


def are_compared(eqns: Sequence[Eqn], outputs: Sequence[Any]) -> bool:
    """Whether a maximum or minimum in a group, or its derivative, is compared with other values.

    Args:
      eqns: the equations of the group.
      outputs: the variables that are read elsewhere.
    """
    known: dict[Any, _Made] = {}
    for eqn in eqns:
        operands = [_of_atom(v, known) for v in eqn.invars]
        known.update(zip(eqn.outvars, _made(eqn, operands), strict=True))
    return any(known.get(v, _Made.OTHERS) >= _Made.MAXIMUM for v in outputs)


def _of_atom(atom: Any, known: dict[Any, _Made]) -> _Made:
    return _Made.OTHERS if compat.is_literal(atom) else known.get(atom, _Made.OTHERS)


def _made(eqn: Eqn, operands: Sequence[_Made]) -> Sequence[_Made]:
    if structure.is_call(eqn):
        return structure.forward(eqn, operands, _through, max)
    return [_of_operation(eqn, operands)] * len(eqn.outvars)


def _of_operation(eqn: Eqn, operands: Sequence[_Made]) -> _Made:
    name, largest = eqn.primitive.name, max(operands, default=_Made.OTHERS)
    if largest == _Made.COMPARED:
        return largest
    if name in traits.DECIDES:
        return _Made.COMPARED if largest else _Made.OTHERS
    if name == "stop_gradient":
        return _Made.STOPPED
    is_stopped = all(
        made == _Made.STOPPED
        for v, made in zip(eqn.invars, operands, strict=True)
        if not compat.is_literal(v)
    )
    if is_stopped and largest:
        return largest
    if name in traits.EXTREME & traits.STATISTIC:
        return _Made.MAXIMUM
    return max(largest, _Made.BEHIND) if largest else largest


@by_program
def _through(program: Any, inputs: tuple[_Made, ...]) -> tuple[_Made, ...]:
    return structure.outputs(compat.closed(program).jaxpr, inputs, _made, _Made.OTHERS)
