"""Carries of a loop that are the residual stream of a stack of layers, and so may be low.

A recurrent carry stays float32, unless the body proves it a stream: a norm of it, then a product
with a weight that differs by iteration, whose result comes back to the carry. Example: a `scan`
over the layers of a transformer, `x + f(norm(x) @ w[i])`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from mpjax._autocast.known import traits
from mpjax._autocast.known.contraction import is_product
from mpjax._base import compat
from mpjax._jaxpr import structure
from mpjax._jaxpr.caches import by_program
from mpjax._jaxpr.equation import Eqn
from mpjax._jaxpr.op_rules import only_moves


def is_stream(eqn: Eqn, place: int) -> bool:
    """Whether a carry of a `scan` or `while` equation is a stream."""
    body = structure.parts(eqn)[-1]
    return _is_stream(body.program, body.carried.start, body.carries, place)


class Role(enum.Flag):
    """The part that a value of a loop's body plays for a carry that may be a stream."""

    NONE = 0
    SHARED = enum.auto()  # the same in every iteration, unchanged
    COUNTER = enum.auto()  # made of carried integers
    WEIGHT = enum.auto()  # raw, and another one in each iteration
    CARRIED = enum.auto()  # made of the carry, by no product yet
    SUMMED = enum.auto()  # likewise, and a sum or a maximum took part
    SQUARE_ROOT = enum.auto()  # likewise, and the root of such a sum
    NORMED = enum.auto()  # likewise, and scaled by such a root
    LAYER = enum.auto()  # made of a product of the normed carry with a weight


Roles = tuple[Role, ...]
_MADE = Role.CARRIED | Role.SUMMED | Role.SQUARE_ROOT | Role.NORMED | Role.LAYER | Role.COUNTER
_SQUARE_ROOTS = ("sqrt", "rsqrt", "pow")


def _is_stream(body: Any, consts: int, carries: int, place: int) -> bool:
    jaxpr = compat.closed(body).jaxpr
    roles = [Role.SHARED] * consts + [Role.NONE] * carries
    roles += [Role.WEIGHT] * (len(jaxpr.invars) - len(roles))
    for i, v in enumerate(jaxpr.invars[consts : consts + carries], start=consts):
        if v.aval.shape == () and jnp.issubdtype(v.aval.dtype, jnp.integer):
            roles[i] = Role.COUNTER
    roles[consts + place] = Role.CARRIED
    return Role.LAYER in _roles(body, tuple(roles))[place]


@by_program
def _roles(program: Any, roles: Roles) -> Roles:
    """Returns the roles of a jaxpr's outputs, given those of its inputs."""
    return structure.outputs(
        compat.closed(program).jaxpr, roles, _played, Role.NONE, constant=Role.SHARED
    )


def _played(eqn: Eqn, operands: Sequence[Role]) -> Sequence[Role]:
    if structure.single_program(eqn) is not None:
        return structure.forward(eqn, operands, _roles, _union)
    if not structure.is_call(eqn):
        return [_operation(eqn, operands)] * len(eqn.outvars)
    if eqn.primitive.name in structure.LOOPS:  # what it slices and carries is no raw weight of ours
        raw = {i for p in structure.parts(eqn) for i in p.operands[: p.carried.start]}
        operands = [r if i in raw else r & _MADE for i, r in enumerate(operands)]
    outs = structure.forward(eqn, operands, _roles, lambda passed: _union(passed) & _MADE)
    return [r & _MADE for r in outs]


def _operation(eqn: Eqn, operands: Sequence[Role]) -> Role:
    made = _union(operands) & _MADE
    if is_product(eqn):
        return Role.LAYER if _is_layer(eqn, operands) or Role.LAYER in made else Role.NONE
    if Role.CARRIED in made:
        made |= _towards_a_norm(eqn.primitive.name, made)
    if eqn.primitive.name in traits.PICKS and Role.SHARED in operands[0]:
        return Role.WEIGHT if Role.COUNTER in _union(operands[1:]) else Role.NONE
    if only_moves(eqn) or eqn.primitive.name == "convert_element_type":
        return operands[0] | made
    return made


def _towards_a_norm(name: str, made: Role) -> Role:
    """Returns the step of a norm that an operation takes: a sum, the root of it, a scaling by that.

    An exponential, a solver or a softmax before a product is none: filters, bandits and recursions
    in log space have them.
    """
    if name in traits.TOTALS:
        return Role.SUMMED
    if name in _SQUARE_ROOTS and Role.SUMMED in made:
        return Role.SQUARE_ROOT
    return Role.NORMED if name in traits.SCALES and Role.SQUARE_ROOT in made else Role.NONE


def _is_layer(eqn: Eqn, operands: Sequence[Role]) -> bool:
    first, second, *_ = operands
    needed = Role.CARRIED
    if eqn.primitive.name == "dot_general":
        needed = Role.NORMED
        if eqn.params["dimension_numbers"][1][0]:
            return False  # each element has a "weight" of its own: `vmap` of a loop over data
    return (needed in first and Role.WEIGHT in second) or (
        needed in second and Role.WEIGHT in first
    )


def _union(roles: Sequence[Role]) -> Role:
    joined = Role.NONE
    for role in roles:
        joined |= role
    return joined
