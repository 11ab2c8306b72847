"""Catches gradients that were taken with another loss scale than the optimizer's, by their tags.

`value_and_grad` tags its gradients (`_base/gradient_tags.py`); `with_loss_scale` reads the tags.
"""

from typing import Any

import jax
import jax.core
import numpy as np

from mpjax._base.errors import message
from mpjax._base.gradient_tags import factor_of, is_true
from mpjax._base.tree import is_overwritten, path_str
from mpjax._base.typing import PyTree
from mpjax._scaling.loss_scale import LossScale, NoOpLossScale, scaled_by

_WHERE = "with_loss_scale.update"
_FIX = (
    "Type loss_scale=mpjax.current_loss_scale(opt_state) in value_and_grad, in every step and of "
    "the state that goes into this update."
)


def as_scaled_by(scale: LossScale, grads: PyTree, *, is_dynamic: bool) -> PyTree:
    """Returns gradients multiplied by `scale`, rescaled if their tag names another scale.

    Args:
      scale: that of the optimizer's state.
      grads: the gradients that the optimizer was given.
      is_dynamic: whether the scale moves.

    Raises:
      ValueError: a gradient is known to be true, where the optimizer would divide it; or to have
        been taken with a scale of another optimizer, or of an earlier state.
    """

    def check(path: Any, g: Any) -> Any:
        if is_overwritten(path):
            return g
        if is_true(g):
            return _true(path_str(path), g, scale)
        factor = factor_of(g)
        if factor is None or factor is scale.loss_scale:
            return g
        if isinstance(scale, NoOpLossScale):
            raise ValueError(_unowned(path_str(path)))
        return _other(path_str(path), g, factor, scale.loss_scale, is_dynamic)

    return jax.tree_util.tree_map_with_path(check, grads)


def refuse_scaled(grads: PyTree, where: str) -> None:
    """Raises ValueError if gradients are tagged as multiplied by a loss scale."""
    for path, g in jax.tree_util.tree_leaves_with_path(grads):
        if factor_of(g) is not None:
            got = f"gradient {path_str(path)!r} is multiplied by the loss scale of an optimizer."
            allowed = "Allowed: true gradients, which are those inside with_loss_scale."
            fix = "Clip inside: mpjax.with_loss_scale(optax.chain(clip, adam), loss_scale); to look"
            fix += " at true gradients: loss_scale.unscale(grads)."
            raise ValueError(message(where, got, allowed, fix))


def _true(path: str, g: Any, scale: LossScale) -> Any:
    if isinstance(scale, NoOpLossScale):
        return g
    got = f"gradient {path!r} is not scaled, and this optimizer would divide it by its loss scale:"
    got += " its updates would be too small by that factor."
    why = "It was taken with no scale, with one of its own, or unscale(grads) has been called."
    fix = f"{_FIX} Or drop the scale of this optimizer: with_loss_scale(tx) only skips."
    raise ValueError(message(_WHERE, got, why, fix))


def _unowned(path: str) -> str:
    got = f"gradient {path!r} is multiplied by the loss scale of another optimizer, and this one "
    got += "holds none: nothing would divide it."
    return message(_WHERE, got, _FIX)


def _other(path: str, g: Any, factor: Any, own: Any, is_dynamic: bool) -> Any:
    """Returns a gradient, tagged as multiplied by `factor`, multiplied by `own` in its place."""
    is_baked_in = _is_value(factor) and not _is_value(own)
    if is_baked_in and is_dynamic:
        got = f"gradient {path!r} was taken with a loss scale of {_number(factor)} that was read "
        got += "outside of this traced step: it stays what it was, and the optimizer's moves."
        raise ValueError(message(_WHERE, got, _FIX))
    if _is_value(factor) and _is_value(own) and not np.array_equal(factor, own):
        got = f"gradient {path!r} was taken with a loss scale of {_number(factor)}, and that of "
        got += f"this optimizer is {_number(own)}: its updates would be wrong by their ratio."
        why = "The scale is of an earlier state, or of another optimizer."
        raise ValueError(message(_WHERE, got, why, _FIX))
    # Traced, they may be one number (behind a jit) or two: the ratio is right for both.
    return scaled_by(g, own / factor)


def _is_value(x: Any) -> bool:
    return not isinstance(x, jax.core.Tracer)


def _number(x: Any) -> str:
    return f"{np.asarray(x).item():g}" if np.ndim(x) == 0 else str(np.asarray(x))
