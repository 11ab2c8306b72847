"""The loss as line searches of optimizers take it: their gradients, too, are taken scaled."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mpjax._base.tree import is_array
from mpjax._base.typing import Array, PyTree
from mpjax._scaling.loss_scale import LossScale, NoOpLossScale


def with_scaled_cotangents(value: Callable[[PyTree], Array], scale: LossScale) -> Any:
    """Returns the same function, in whose backward pass cotangents are multiplied by a loss scale.

    Its gradients are the true ones: they are divided again where they reach the parameters.

    Args:
      value: the loss as a function of parameters.
      scale: the loss scale.
    """
    if isinstance(scale, NoOpLossScale):
        return value
    factor = jnp.asarray(scale.loss_scale)

    def scaled(params: PyTree) -> Array:
        return _with_cotangent(value(jax.tree.map(lambda x: _divided(x, factor), params)), factor)

    return scaled


def _divided(x: Any, factor: Array) -> Any:
    is_moved = is_array(x) and jnp.issubdtype(x.dtype, jnp.inexact)
    return _with_cotangent(x, 1 / factor) if is_moved else x


def _with_cotangent(x: Array, factor: Array) -> Array:
    """Returns `x`; its cotangent is multiplied by a factor, and its tangent is not.

    JAX lets one say how a linear system is solved, and how its transpose: here `1 y = x`. Its
    `linear_call` would say the same, and has no rule for `vmap`.
    """

    def transposed(_: Any, cotangent: Array) -> Array:
        return cotangent * factor.astype(cotangent.dtype)

    return jax.lax.custom_linear_solve(lambda y: y, x, lambda _, b: b, transposed)
