"""Dequantises weights stored in 8 bits where they are multiplied: in the body of a scan, say.

A function sees such weights as float32 arrays. Dequantised at the start of the function, the
weights of all layers of a scan would be stored in float32 before the scan begins; so each slice is
dequantised in the body.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from mpjax._base import compat
from mpjax._base.quantized_array import dequantized, dequantized_p
from mpjax._jaxpr import holders, structure
from mpjax._jaxpr.binding import bind, evaluate, written_at
from mpjax._jaxpr.equation import Eqn


class _Stored(NamedTuple):
    """A weight in 8 bits that has not been dequantised yet."""

    values: Any
    scale: Any

    @property
    def read(self) -> jax.Array:
        return dequantized(self.values, self.scale)


def dequantize_at_products(program: Any, arrays: Sequence[Any]) -> Any:
    """Returns a closed jaxpr that dequantises weights inside its scans and checkpoints.

    Args:
      program: the closed jaxpr of a function.
      arrays: the arrays on which it was traced.
    """
    jaxpr = program.jaxpr
    made = {eqn.outvars[0] for eqn in jaxpr.eqns if eqn.primitive is dequantized_p}
    holds = [eqn for eqn in jaxpr.eqns if eqn.primitive.name in _INTO]
    if made.isdisjoint(v for eqn in holds for v in compat.variables(eqn)):
        return program
    return jax.make_jaxpr(lambda *args: _read(_run(program, args)))(*arrays)


def _run(program: Any, args: Sequence[Any]) -> list[Any]:
    """Returns the results of a program, some of whose arguments may be stored weights."""

    def one(eqn: Eqn, values: list[Any]) -> Sequence[Any]:
        if eqn.primitive is dequantized_p:
            return [_Stored(*values)]
        holds = any(isinstance(v, _Stored) for v in values)
        into = _INTO.get(eqn.primitive.name) if holds else None
        with written_at(eqn):
            return bind(eqn, _read(values)) if into is None else into(eqn, values)

    return evaluate(program, args, one)


def _read(values: Sequence[Any]) -> list[Any]:
    return [v.read if isinstance(v, _Stored) else v for v in values]


def _scan(eqn: Eqn, values: Sequence[Any]) -> list[Any]:
    given, length = structure.loop_operands(eqn, values), eqn.params["length"]
    # A scale that all slices share cannot be sliced: that weight is dequantised before the scan.
    xs = [v if _is_sliced(v, length) else v.read for v in given.xs]
    program = compat.closed(eqn.params["jaxpr"])

    def body(carry: Any, slices: Any) -> list[Any]:
        return _read(_run(program, [*given.consts, *carry, *slices]))

    return holders.scan(eqn, body, _read(given.carry), xs)


def _is_sliced(x: Any, length: int) -> bool:
    return not isinstance(x, _Stored) or x.scale.shape[0] == length


def _checkpoint(eqn: Eqn, values: Sequence[Any]) -> list[Any]:
    if eqn.params["differentiated"]:  # XLA may undo a new checkpoint
        return bind(eqn, _read(values))
    body = compat.closed(eqn.params["jaxpr"])
    fun = lambda *args: _read(_run(body, args))  # noqa: E731 - one expression
    return holders.checkpoint(eqn, fun, values, eqn.params["policy"])


_INTO = {"scan": _scan, **dict.fromkeys(structure.CHECKPOINTS, _checkpoint)}
