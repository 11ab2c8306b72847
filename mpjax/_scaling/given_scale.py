"""Reads a loss scale that was given, an object, a number or None, and says who unscales by it."""

from typing import Any

from mpjax._base.described import described
from mpjax._base.errors import message
from mpjax._base.tree import is_array
from mpjax._scaling.loss_scale import LossScale, NoOpLossScale, StaticLossScale
from mpjax._scaling.optim_state import find_states
from mpjax._scaling.owned import is_owned


def as_loss_scale(loss_scale: Any, where: str) -> LossScale:
    """Returns `loss_scale` as an object: a number is a static one, None is none.

    Raises:
      TypeError: it is neither, nor anything with the methods of a loss scale.
    """
    if loss_scale is None:
        return NoOpLossScale()
    if isinstance(loss_scale, (int, float)) and not isinstance(loss_scale, bool):
        return StaticLossScale(loss_scale)
    if is_array(loss_scale):
        return StaticLossScale(loss_scale)
    if isinstance(loss_scale, LossScale) and not isinstance(loss_scale, type):
        return loss_scale
    got = f"got {described(loss_scale)}."
    allowed = "Allowed: NoOpLossScale(), StaticLossScale(2**15), DynamicLossScale(), a number."
    fix = "Type loss_scale=mpjax.DynamicLossScale()."
    if find_states(loss_scale):
        fix = "Type loss_scale=mpjax.current_loss_scale(opt_state)."
    raise TypeError(message(where, got, allowed, fix))


def whether_to_unscale(scale: LossScale, unscale: bool | None, where: str) -> bool:
    """Returns whether to unscale gradients: not if the scale's optimizer does.

    Raises:
      ValueError: `unscale` says otherwise: they would be unscaled twice, or not at all.
    """
    fits = not is_owned(scale)
    if unscale is None or unscale is fits:
        return fits
    if not isinstance(unscale, bool):
        got = f"must be None, True or False; got {unscale!r}."
        raise TypeError(message(where, got, "Leave it out: what fits the loss scale is done."))
    if isinstance(scale, NoOpLossScale):
        return unscale
    if unscale:
        got = "got True, and the loss scale of an optimizer, which unscales by itself: twice."
        allowed = "Allowed with current_loss_scale(opt_state): unscale=None or False."
        fix = "Leave unscale= out; loss_scale.unscale(grads) gives the true ones, to look at."
    else:
        got = "got False, and a loss scale that no optimizer holds: nothing would unscale them."
        allowed = "Allowed with a loss scale of your own: unscale=None or True."
        fix = "Leave unscale= out; or, if tx is wrapped in with_loss_scale, type "
        fix += "loss_scale=mpjax.current_loss_scale(opt_state)."
    raise ValueError(message(where, got, allowed, fix))
