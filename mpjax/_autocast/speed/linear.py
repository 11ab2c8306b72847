"""Finds equations whose derivative saves no float32 value: sums, moves and choices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpjax._autocast.decide.states import WIDE, Kind, State
from mpjax._autocast.known import traits
from mpjax._base import compat
from mpjax._jaxpr import structure
from mpjax._jaxpr.caches import by_program
from mpjax._jaxpr.equation import Eqn, Jaxpr
from mpjax._jaxpr.op_rules import MOVES

_LINEAR = traits.LINEAR | (MOVES - {"reduce_max", "reduce_min", "abs"})


def is_linear(eqn: Eqn, states: dict[Any, State]) -> bool:
    """Whether the derivative of an equation saves no float32 value: `x + y`, `2 * x`."""
    name = eqn.primitive.name
    if name in _LINEAR:
        return True
    if name in traits.SCALES:
        operands = [_state(v, states) for v in eqn.invars]
        known = [s is None or s.kind in (Kind.CONSTANT, Kind.FOREIGN) for s in operands]
        return known[1] or (known[0] and name == "mul")
    return False


def curved(jaxpr: Jaxpr, fused: Sequence[bool], states: dict[Any, State]) -> set[Any]:
    """Returns the values that depend on a nonlinear operation of their group: `exp(x) + y`."""
    made: set[Any] = set()
    for eqn, read, is_fused in zip(jaxpr.eqns, structure.operands(jaxpr), fused, strict=True):
        if is_fused and not (made.isdisjoint(read) and is_linear(eqn, states)):
            made.update(eqn.outvars)
    return made


def keeps_a_mask_at_most(eqn: Eqn, states: dict[Any, State]) -> bool:
    """Whether an equation is linear, or calls a function of such equations: a leaky relu."""
    if eqn.primitive.name == "jit":
        return _keeps_masks(structure.single_program(eqn))
    return is_linear(eqn, states)


@by_program
def _keeps_masks(program: Any) -> bool:
    jaxpr = compat.closed(program).jaxpr
    states = {v: WIDE for eqn in jaxpr.eqns for v in compat.variables(eqn)}
    return all(keeps_a_mask_at_most(eqn, states) for eqn in jaxpr.eqns)


def _state(atom: Any, states: dict[Any, State]) -> State | None:
    return None if compat.is_literal(atom) else states[atom]
