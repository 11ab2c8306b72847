"""`value_and_grad` and `grad` of functions of NNX modules, with a loss scale."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx

from mpjax._base.tree import OVERWRITE_WITH_GRADIENT
from mpjax._base.typing import LossFunction, PyTree
from mpjax._scaling.given_scale import as_loss_scale, whether_to_unscale
from mpjax._scaling.grad import differentiated, name_of
from mpjax._scaling.loss_scale import LossScale
from mpjax._training.gradients import asks_for_scale


@asks_for_scale
def value_and_grad(
    f: LossFunction,
    *,
    argnums: int | nnx.DiffState | Sequence[int | nnx.DiffState] = 0,
    has_aux: bool = False,
    loss_scale: LossScale | float | None,
    unscale: bool | None = None,
    **options: Any,
) -> Callable[..., tuple[Any, PyTree]]:
    """Returns a function for the value and the gradients of `f`, computed with a loss scale.

    It calls `nnx.value_and_grad`. It multiplies the loss by the loss scale before differentiating,
    and divides the gradients by it afterwards, both in float32. The value is the true value of `f`.

    Args:
      f: a function of modules and arrays that returns a floating scalar, or `(scalar, aux)`.
      argnums: which arguments to differentiate; an `nnx.DiffState` for some of its variables.
      has_aux: whether `f` returns a pair, of which the second is passed through.
      loss_scale: a loss scale, traced or not; a number for a static one; None for none.
        `mpjax.current_loss_scale(optimizer)` finds that of an `nnx.Optimizer`.
      unscale: None for what fits: with the scale of `current_loss_scale(optimizer)` gradients
        stay scaled, as the optimizer unscales them; all others come unscaled.
      **options: whatever else `nnx.value_and_grad` takes.

    Returns:
      A function of the arguments of `f` that returns `(value, grads)`, or
      `((value, aux), grads)` with `has_aux`.

    Raises:
      TypeError: the loss is no floating scalar, or `loss_scale` is none of the allowed.
      ValueError: `unscale` would leave gradients scaled, or unscale them twice.

    Dtypes:
      The value keeps its dtype; real gradients of up to 32 bits are float32. Variables of the
      type `_overwrite_with_gradient` (the float8 scales of a linen model in `nnx.bridge.ToNNX`)
      get their next value, neither cast nor scaled.

    Transforms:
      nnx.jit, nnx.vmap, nnx.scan, nnx.remat, nnx.shard_map.

    Example:
      >>> from flax import nnx
      >>> model = nnx.Linear(2, 1, use_bias=False, rngs=nnx.Rngs(0))
      >>> loss_fn = lambda model, x: jnp.mean(model(x).astype(jnp.float16))
      >>> loss, grads = mpjax.nnx.value_and_grad(loss_fn, loss_scale=1024.0)(
      ...     model, jnp.ones((4, 2))
      ... )
      >>> grads.kernel.get_value()
      Array([[1.],
             [1.]], dtype=float32)

    References:
      flax, `nnx.value_and_grad`; Micikevicius et al., Mixed Precision Training, 2018,
      https://arxiv.org/abs/1710.03740
    """
    scale = as_loss_scale(loss_scale, "value_and_grad(loss_scale)")
    unscale = whether_to_unscale(scale, unscale, "value_and_grad(unscale)")
    structures: list[Any] = []

    def transform(fun: Any, *, has_aux: bool) -> Any:
        inner = nnx.value_and_grad(fun, argnums=argnums, has_aux=has_aux, **options)

        def run(*args: Any, **kwargs: Any) -> Any:
            out, grads = inner(*args, **kwargs)
            leaves, structure = jax.tree.flatten(grads, is_leaf=_is_variable)
            structures[:] = [structure]
            return out, _sorted_out(leaves)

        return run

    differentiate = differentiated(
        transform,
        f,
        scale,
        has_aux=has_aux,
        unscale=unscale,
        holomorphic=options.get("holomorphic", False),
        name=name_of(f),
    )

    @functools.wraps(f, updated=())
    def wrapped(*args: Any, **kwargs: Any) -> tuple[Any, PyTree]:
        value, aux, by_kind = differentiate(*args, **kwargs)
        merged = {i: g for kind in by_kind.values() for i, g in kind.items()}
        grads = structures[0].unflatten([merged[i] for i in sorted(merged)])
        return ((value, aux) if has_aux else value), grads

    return wrapped


@asks_for_scale
def grad(
    f: LossFunction,
    *,
    argnums: int | nnx.DiffState | Sequence[int | nnx.DiffState] = 0,
    has_aux: bool = False,
    loss_scale: LossScale | float | None,
    unscale: bool | None = None,
    **options: Any,
) -> Callable[..., PyTree]:
    """Returns a function that gives the gradients of `f`; see `value_and_grad`.

    Returns:
      A function of the arguments of `f` that returns `grads`, or `(grads, aux)` with `has_aux`,
      as `nnx.grad` does.

    Example:
      >>> from flax import nnx
      >>> model = nnx.Linear(2, 1, use_bias=False, rngs=nnx.Rngs(0))
      >>> loss_fn = lambda model: jnp.sum(model(jnp.ones((1, 2))))
      >>> mpjax.nnx.grad(loss_fn, loss_scale=8.0)(model).kernel.get_value()
      Array([[1.],
             [1.]], dtype=float32)
    """
    differentiate = value_and_grad(
        f, argnums=argnums, has_aux=has_aux, loss_scale=loss_scale, unscale=unscale, **options
    )

    @functools.wraps(f, updated=())
    def wrapped(*args: Any, **kwargs: Any) -> PyTree:
        out, grads = differentiate(*args, **kwargs)
        return (grads, out[1]) if has_aux else grads

    return wrapped


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


def _sorted_out(leaves: list[Any]) -> dict[str, dict[int, Any]]:
    """Returns gradients by number; overwriting ones under Flax's name, which is not scaled."""
    kinds: dict[str, dict[int, Any]] = {"scaled": {}, OVERWRITE_WITH_GRADIENT: {}}
    for index, leaf in enumerate(leaves):
        overwrites = type(leaf).__name__ == OVERWRITE_WITH_GRADIENT
        kinds[OVERWRITE_WITH_GRADIENT if overwrites else "scaled"][index] = leaf
    return kinds
