"""The axes of an array that a sum removes: over devices it removes none, unless `vmap` made it."""

from __future__ import annotations

import numbers
from typing import Any

from mpjax._autocast.known import traits
from mpjax._jaxpr.equation import Eqn

_ONE_OF_SEVERAL = traits.STATISTIC | traits.ACROSS | {"reduce"}
_RUNNING = traits.RUNNING | {"cumprod"}
_SUMS = traits.ACROSS | {"reduce_sum", "reduce"}
ALONG_AXES = _ONE_OF_SEVERAL | _RUNNING
"""Along an axis of one element, each of them hands on its operand."""


def removed_axes(eqn: Eqn) -> list[Any]:
    """Returns the axes over which a statistic, or a sum over devices, is taken.

    `lax.psum(x, "i")` under `jax.vmap(..., axis_name="i")` is a `psum` over an axis of the array.
    `vmap` counts axes in NumPy's integers.
    """
    axes = eqn.params["dimensions"] if eqn.primitive.name == "reduce" else eqn.params.get("axes")
    return [axis for axis in axes or () if isinstance(axis, numbers.Integral)]


def is_statistic(eqn: Eqn) -> bool:
    """Whether an operation makes a number of several, along an axis of more than one."""
    return eqn.primitive.name in ALONG_AXES and not is_along_one(eqn)


def is_total(eqn: Eqn) -> bool:
    """Whether an operation adds up several elements; a `reduce` by any function counts as one."""
    return eqn.primitive.name in _SUMS and is_statistic(eqn)


def is_along_one(eqn: Eqn) -> bool:
    """Whether an operation runs along axes of one element, and so hands on its operand."""
    name = eqn.primitive.name
    if name not in ALONG_AXES:
        return False
    axes = [eqn.params["axis"]] if name in _RUNNING else removed_axes(eqn)
    shape = eqn.invars[0].aval.shape
    return all(shape[axis] == 1 for axis in axes)
