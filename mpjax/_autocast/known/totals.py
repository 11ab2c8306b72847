"""The axes of an array that a sum removes: over devices it removes none, unless `vmap` made it."""

from __future__ import annotations

from mpjax._autocast.known import traits
from mpjax._jaxpr.equation import Eqn


def removed_axes(eqn: Eqn) -> list[int]:
    """Returns the axes over which a statistic, or a sum over devices, is taken.

    `lax.psum(x, "i")` under `jax.vmap(..., axis_name="i")` is a `psum` over an axis of the array.
    """
    return [axis for axis in eqn.params.get("axes", ()) if isinstance(axis, int)]


def is_statistic(eqn: Eqn) -> bool:
    """Whether an operation makes one number of several: it removes an axis of more than one."""
    name = eqn.primitive.name
    if name not in traits.STATISTIC and name not in traits.ACROSS:
        return False
    shape = eqn.invars[0].aval.shape
    return any(shape[axis] != 1 for axis in removed_axes(eqn))
