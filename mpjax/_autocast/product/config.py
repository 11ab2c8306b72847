"""What a product and the two of its derivative read and give: one entry per direction, as data.

A product of an input and a weight has three directions, named as in Transformer Engine: *fprop*
(the product itself), *dgrad* (cotangent and weight, which give the cotangent of the input) and
*wgrad* (cotangent and input, which give that of the weight). Derivatives of any order are products
of these three kinds again, so that the roles of the arrays tell which entry holds.
"""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

FLOAT32 = jnp.dtype("float32")


class Role(enum.Enum):
    """What an array is to the product that was written: an operand, or its result."""

    INPUT = "input"
    WEIGHT = "weight"
    RESULT = "result"


Roles = tuple[Role, Role, Role]
"""Of the two operands of a product and of its result."""


@dataclass(frozen=True)
class Direction:
    """One kind of product: the dtype of each operand, by its role, and of what they add up to."""

    operands: tuple[tuple[Role, Any], tuple[Role, Any]]
    accumulates: Any = FLOAT32

    def dtype(self, role: Role) -> Any:
        """Returns the dtype in which the operand of a role is read."""
        return dict(self.operands)[role]


@dataclass(frozen=True)
class Config:
    """The three directions of a product; equal ones share compiled programs."""

    fprop: Direction
    dgrad: Direction
    wgrad: Direction
    roles: Roles = (Role.INPUT, Role.WEIGHT, Role.RESULT)  # as the product was written

    def direction(self, roles: Roles) -> Direction:
        """Returns the entry for a product of arrays that have these roles: its result decides."""
        gives = {Role.RESULT: self.fprop, Role.INPUT: self.dgrad, Role.WEIGHT: self.wgrad}
        return gives[roles[2]]


@functools.cache
def low(dtype: Any) -> Config:
    """Returns the config of products whose operands are cast to `dtype` in every direction."""

    def of(first: Role, second: Role) -> Direction:
        return Direction(((first, dtype), (second, dtype)))

    return Config(
        fprop=of(Role.INPUT, Role.WEIGHT),
        dgrad=of(Role.RESULT, Role.WEIGHT),
        wgrad=of(Role.RESULT, Role.INPUT),
    )


def transposed(roles: Roles, wrt: int) -> Roles:
    """Returns the roles of (cotangent, other operand) → cotangent of operand `wrt`."""
    return roles[2], roles[1 - wrt], roles[wrt]
