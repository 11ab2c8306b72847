"""Results of a program that are its inputs, as they were or updated in place: caches, buffers."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

from mpjax._autocast.known import traits
from mpjax._autocast.known.ways import places
from mpjax._base import compat
from mpjax._jaxpr import structure
from mpjax._jaxpr.caches import by_program
from mpjax._jaxpr.equation import Eqn
from mpjax._jaxpr.op_rules import hands_on_each, only_moves


def keeps_dtype(program: Any) -> tuple[bool, ...]:
    """Returns, for each output of a jaxpr, whether it is an updated input of its shape and dtype.

    Example: the new cache of a decoder's step, `dynamic_update_slice(cache, key, position)`.
    """
    return tuple(map(bool, _handed_back(program)))


def updates(program: Any) -> frozenset[int]:
    """Returns the places of the inputs that are handed back, and not as they were."""
    jaxpr = compat.closed(program).jaxpr
    pairs = zip(jaxpr.outvars, _handed_back(program), strict=True)
    return frozenset[int]().union(*(of for v, of in pairs if v not in jaxpr.invars))


def _handed_back(program: Any) -> list[frozenset[int]]:
    """Returns, for each output, the inputs of its shape and dtype that it is an update of."""
    jaxpr = compat.closed(program).jaxpr
    avals = [v.aval for v in jaxpr.invars]
    return [
        frozenset(i for i in places(of) if _are_alike(avals[i], v.aval))
        for v, of in zip(jaxpr.outvars, _of_program(program), strict=True)
    ]


def _are_alike(a: Any, b: Any) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype


@by_program
def _of_program(program: Any) -> tuple[int, ...]:
    """Returns of which inputs each output is an update: bit `i` stands for input `i`."""
    jaxpr = compat.closed(program).jaxpr
    each = [1 << i for i in range(len(jaxpr.invars))]
    return structure.outputs(jaxpr, each, _made, 0)


def _made(eqn: Eqn, operands: Sequence[int]) -> Sequence[int]:
    name = eqn.primitive.name
    if structure.is_call(eqn):
        return structure.forward(eqn, operands, _through, _joined)
    if hands_on_each(eqn):
        return operands
    if name in traits.JOINS:
        return [_joined(operands)] * len(eqn.outvars)
    is_updated = operands and (name in traits.UPDATES or only_moves(eqn))
    return [operands[0] if is_updated else 0] * len(eqn.outvars)


def _through(program: Any, inputs: Sequence[int]) -> list[int]:
    return [_joined([inputs[i] for i in places(of)]) for of in _of_program(program)]


def _joined(several: Sequence[int]) -> int:
    return functools.reduce(operator.or_, several, 0)
