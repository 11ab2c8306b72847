"""A state whose loss scale has other options than its step was given: they hold, with a warning."""

from typing import Any

import jax

from mpjax._base import compat
from mpjax._base.errors import message, warn
from mpjax._base.typing import PyTree
from mpjax._scaling.given_scale import as_loss_scale
from mpjax._scaling.loss_scale import DynamicLossScale, StaticLossScale
from mpjax._scaling.optim_state import DYNAMIC_FIELDS, current_loss_scale

_WHERE = "train step"
_OPTIONS: dict[type, tuple[str, ...]] = {
    StaticLossScale: ("loss_scale",),
    DynamicLossScale: DYNAMIC_FIELDS[1:],  # but for the counter
}


def warn_of_other_options(loss_scale: Any, opt_state: PyTree) -> None:
    """Warns of a loss scale with other options, as a checkpoint of an earlier run may have.

    Args:
      loss_scale: what the step was given, or None.
      opt_state: the optimizer's state that it is called with.
    """
    if loss_scale is None:
        return
    held, given = current_loss_scale(opt_state), as_loss_scale(loss_scale, _WHERE)
    names = _OPTIONS.get(type(given), ())
    leaves = jax.tree.leaves((held, given))
    if type(held) is not type(given) or not all(map(compat.has_values, leaves)):
        return
    other = [name for name in names if getattr(held, name) != getattr(given, name)]
    if not other:
        return
    got = f"the state goes on with {held!r}; this step was given {given!r}."
    fix = "To use this step's, type state = step.adopt(state)."
    if isinstance(given, DynamicLossScale):
        value = getattr(given, other[0])
        typed = f"jnp.{value.dtype}({value.item():g})"
        fix = f"To change it, type state = optax.tree.set(state, {other[0]}={typed})."
    warn(message(_WHERE, got, fix))
