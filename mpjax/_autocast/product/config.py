"""The dtypes and scales of a product and of the two products of its derivative, as data.

A product `y = x @ w` of an input and a weight has three directions, named as in Transformer Engine:
*fprop* (the product itself), *dgrad* (`dx = dy @ wᵀ`, the cotangent of the input) and *wgrad*
(`dw = xᵀ @ dy`, that of the weight). Derivatives of any order are products of these three kinds
again: the roles of the arrays tell the direction.
"""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from mpjax._autocast import speed
from mpjax._base.dtypes import FLOAT32
from mpjax._policies.recipes import DTYPES, Recipe


class ArrayRole(enum.Enum):
    """The role of an array in the product as written: an operand, or the result.

    A cotangent has the role of its array: `dy` is a RESULT.
    """

    INPUT = "input"
    WEIGHT = "weight"
    RESULT = "result"


PLACES = {ArrayRole.INPUT: 0, ArrayRole.WEIGHT: 1, ArrayRole.RESULT: 2}
"""The place of each role among the three maxima that a product records."""

Roles = tuple[ArrayRole, ArrayRole, ArrayRole]
"""The roles of a product's two operands and of its result."""


@dataclass(frozen=True)
class Scaling:
    """The scales of a quantised operand: which parts of it have one, and where it comes from."""

    granularity: str  # "tensor", "channel" or "block", as in a recipe
    margin: int = 0
    block_size: int = 1
    is_delayed: bool = False  # whether it comes from earlier steps, as a further operand


@dataclass(frozen=True)
class Direction:
    """One kind of product: the dtype of each operand, by its role, and of the accumulator."""

    operands: tuple[tuple[ArrayRole, Any], tuple[ArrayRole, Any]]
    accumulates: Any = FLOAT32
    scaling: Scaling | None = None  # None: operands are cast, without a scale

    def dtype(self, role: ArrayRole) -> Any:
        """Returns the dtype in which the operand of a role is read."""
        return dict(self.operands)[role]


@dataclass(frozen=True)
class Config:
    """The three directions of a product; equal ones share compiled programs."""

    fprop: Direction
    dgrad: Direction
    wgrad: Direction
    low: Any  # the dtype of operands that are not quantised
    roles: Roles = (
        ArrayRole.INPUT,
        ArrayRole.WEIGHT,
        ArrayRole.RESULT,
    )  # as the product was written
    history: int = 0  # of how many steps the maxima of operands and gradient are stored
    keeps: bool = False  # whether operands are saved in 8 bits for the products of its gradient

    @property
    def records(self) -> bool:
        """Whether the maxima of the operands and of the gradient are recorded."""
        return self.history > 0

    def read(self, x: Any, role: ArrayRole) -> Any:
        """Returns an operand in the form that is read for its maximum and again to quantise it."""
        # A weight is quantised from float32. `read_low` rounds to bfloat16, not to float16.
        if role is ArrayRole.WEIGHT or self.low != jnp.bfloat16:
            return x
        return speed.read_low(x.astype(FLOAT32))

    @functools.cached_property
    def is_scaled(self) -> bool:
        """Whether operands have scales in some direction."""
        return any(d.scaling is not None for d in (self.fprop, self.dgrad, self.wgrad))

    @functools.cached_property
    def is_delayed(self) -> bool:
        """Whether scales in some direction are those of earlier steps."""
        return any(d.scaling and d.scaling.is_delayed for d in (self.fprop, self.dgrad, self.wgrad))

    def reads_as_made(self, operand: int) -> bool:
        """Whether an operand is quantised from float32, so that a weight is rounded once."""
        return self.is_scaled and self.roles[operand] is ArrayRole.WEIGHT

    def direction(self, roles: Roles) -> Direction:
        """Returns the direction of a product of arrays with these roles: the result's decides."""
        gives = {
            ArrayRole.RESULT: self.fprop,
            ArrayRole.INPUT: self.dgrad,
            ArrayRole.WEIGHT: self.wgrad,
        }
        return gives[roles[2]]


def _cast(first: ArrayRole, second: ArrayRole, dtype: Any) -> Direction:
    return Direction(((first, dtype), (second, dtype)))


@functools.cache
def low(dtype: Any) -> Config:
    """Returns the config of products whose operands are cast to `dtype` in every direction."""
    return Config(*(_cast(*roles, dtype) for roles in _OPERANDS), low=dtype)


_OPERANDS = (
    (ArrayRole.INPUT, ArrayRole.WEIGHT),
    (ArrayRole.RESULT, ArrayRole.WEIGHT),
    (ArrayRole.RESULT, ArrayRole.INPUT),
)
"""The operands of fprop, dgrad and wgrad, in the order in which a recipe names their dtypes."""


@functools.lru_cache(maxsize=256)
def quantized(recipe: Recipe, dtype: Any, roles: Roles, *, keeps: bool = False) -> Config:
    """Returns the config of a product in 8 bits.

    Args:
      recipe: the dtypes of each direction, and the granularity of scales.
      dtype: the 16-bit dtype of directions that the recipe does not quantise.
      roles: of both operands and the result, as the product is written.
      keeps: whether operands are saved in 8 bits for the products of its gradient, where these
        read the same 8-bit values.
    """
    scaling = Scaling(recipe.granularity, recipe.margin, recipe.block_size, recipe.has_history)

    def of(both: tuple[ArrayRole, ArrayRole], pair: Any) -> Direction:
        if pair is None:
            return _cast(*both, dtype)
        first, second = (jnp.dtype(DTYPES[name]) for name in pair)
        accumulates = jnp.dtype("int32") if first == jnp.int8 else FLOAT32
        return Direction(((both[0], first), (both[1], second)), accumulates, scaling)

    pairs = zip(_OPERANDS, recipe.products.values(), strict=True)
    directions = (of(both, pair) for both, pair in pairs)
    return Config(*directions, low=dtype, roles=roles, history=recipe.steps_stored, keeps=keeps)


@functools.lru_cache(maxsize=256)
def current(how: Config, *, records: bool) -> Config:
    """Returns a config that scales by the values at hand in place of those of earlier steps."""

    def of(direction: Direction) -> Direction:
        scaling = direction.scaling and replace(direction.scaling, is_delayed=False)
        return replace(direction, scaling=scaling)

    entries = {name: of(getattr(how, name)) for name in ("fprop", "dgrad", "wgrad")}
    return replace(how, **entries, history=how.history if records else 0)


def transposed(roles: Roles, wrt: int) -> Roles:
    """Returns the roles of (cotangent, other operand) → cotangent of operand `wrt`."""
    return roles[2], roles[1 - wrt], roles[wrt]
