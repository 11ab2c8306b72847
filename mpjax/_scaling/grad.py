"""Gradients of a scaled loss: the true value, and float32 gradients of the true loss."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mpjax._base import compat
from mpjax._base.dtypes import FLOAT32, describe, normal_powers_of_two
from mpjax._base.errors import message
from mpjax._base.foreign_keywords import POLICIES_OF
from mpjax._base.gradient_tags import tag
from mpjax._base.keywords import names_keywords
from mpjax._base.tree import (
    is_array,
    is_overwritten,
    map_with_path,
    to_full,
)
from mpjax._base.typing import Array, AxisName, LossFunction, PyTree
from mpjax._policies.parts import policies_in
from mpjax._policies.policy import get_policy
from mpjax._scaling.loss_scale import (
    DynamicLossScale,
    LossScale,
    NoOpLossScale,
    StaticLossScale,
)
from mpjax._scaling.returned import check_loss, split_pair


@names_keywords(POLICIES_OF)
def get_loss_scale(policy: Any = None) -> NoOpLossScale | DynamicLossScale:
    """Returns the loss scale that a policy needs: dynamic for float16, none otherwise.

    Args:
      policy: whatever `get_policy` takes. A `PolicyMap` needs scaling where one of its policies
        does.

    Returns:
      `DynamicLossScale()` where products are computed in float16, else `NoOpLossScale()`.

    Example:
      >>> mpjax.get_loss_scale("bf16-mixed")
      NoOpLossScale()
    """
    is_number = isinstance(policy, (int, float)) and not isinstance(policy, bool)
    if is_number and policy not in (16, 32, 64):
        got = f"got {policy!r}, which names no policy."
        fix = f"For a scale of that size, type mpjax.StaticLossScale({policy!r})."
        raise ValueError(message("get_loss_scale", got, "Allowed: whatever get_policy takes.", fix))
    policy = get_policy(policy)
    scaled = any(p.compute_dtype == jnp.float16 for p in policies_in(policy))
    return DynamicLossScale() if scaled else NoOpLossScale()


def differentiated(
    transform: Callable[..., Any],
    fun: LossFunction,
    scale: LossScale,
    *,
    has_aux: bool,
    unscale: bool,
    holomorphic: bool = False,
    name: str,
    axis_name: AxisName = None,
) -> Callable[..., tuple[Any, Any, PyTree]]:
    """Returns a function that gives value, aux and gradients, differentiated scaled.

    Args:
      transform: `jax.value_and_grad` or one of its kind, with all but the function and `has_aux`.
      fun: the loss function.
      scale: the factor of the loss while it is differentiated.
      has_aux, unscale, holomorphic: as in `value_and_grad`.
      name: of the function, for messages.
      axis_name: the axes over which the gradients will be averaged.
    """

    def scaled(*args: Any, **kwargs: Any) -> tuple[Any, tuple[Any, Any]]:
        value, aux = split_pair(fun(*args, **kwargs), has_aux, name)
        check_loss(value, args, name, holomorphic=holomorphic)
        return _seeded(scale, of_shard(value, axis_name)), (value, aux)

    differentiate = transform(scaled, has_aux=True)

    def wrapped(*args: Any, **kwargs: Any) -> tuple[Any, Any, PyTree]:
        (_, (value, aux)), grads = differentiate(*args, **kwargs)
        grads = map_with_path(lambda _, g: _widened(g), grads)
        grads = _restored(scale, value, grads, unscale)
        tag_with_scale(scale, grads, unscaled=unscale)
        return value, aux, grads

    return wrapped


def name_of(fun: Any) -> str:
    """Returns a function's name for messages; raises TypeError for anything but a function."""
    if callable(fun):
        return getattr(fun, "__name__", type(fun).__name__)
    got = f"the first argument must be a function; got {describe(fun)}."
    fix = "Type value_and_grad(loss_fn, loss_scale=...)(params, batch), not loss_fn(params, batch)."
    raise TypeError(message("value_and_grad", got, fix))


def indices(argnums: int | Sequence[int], count: int) -> list[int]:
    """Returns `argnums` as numbers below `count`; JAX itself reports those that are not."""
    given = argnums if isinstance(argnums, Sequence) else (argnums,)
    known = [index for index in map(operator.index, given) if -count <= index < count]
    return sorted({index % count for index in known})


def _seed(scale: LossScale, value: Any) -> Array | None:
    """Returns the scale that a 16-bit loss is differentiated with, None if that is `scale`.

    The cotangent of a float16 loss is float16: 2**16 would enter the backward pass as inf, and
    a rule that clips its cotangent would make a wrong finite gradient of it; 2**-30 would enter
    as 0. Within the range a scale that is no power of two would be rounded, in bfloat16 too.
    """
    dtype: Any = getattr(value, "dtype", None)
    if isinstance(scale, NoOpLossScale) or dtype not in (jnp.float16, jnp.bfloat16):
        return None
    seed = jnp.clip(jnp.asarray(scale.loss_scale, FLOAT32), *normal_powers_of_two(dtype))
    # Not two conversions: XLA may leave those out, and the cotangent would be rounded alone.
    info = jnp.finfo(dtype)
    return jax.lax.reduce_precision(seed, int(info.nexp), int(info.nmant))


def _seeded(scale: LossScale, value: Any) -> Any:
    seed = _seed(scale, value)
    return scale.scale(value) if seed is None else to_full(value) * seed


def _restored(scale: LossScale, value: Any, grads: PyTree, unscale: bool) -> PyTree:
    """Returns the gradients unscaled, or scaled by the whole of `scale`."""
    seed = _seed(scale, value)
    if seed is None:
        return scale.unscale(grads) if unscale else grads
    factor = StaticLossScale.tree_unflatten(None, (seed,))
    unscaled = factor.unscale(grads)
    return unscaled if unscale else scale.scale(unscaled)


def tag_with_scale(scale: LossScale, grads: PyTree, *, unscaled: bool) -> None:
    """Tags gradients with the scale by which they are multiplied, for the optimizer to check."""
    is_true = unscaled or isinstance(scale, NoOpLossScale)
    tag(grads, None if is_true else scale.loss_scale)


def _widened(g: Any) -> Any:
    """Returns a real gradient of up to 32 bits in float32, an 8-bit float's included."""
    narrow = is_array(g) and jnp.issubdtype(g.dtype, jnp.floating) and g.dtype.itemsize < 4
    return g.astype(FLOAT32) if narrow else g


def localised(args: tuple[Any, ...], argnums: int | Sequence[int], axis_name: AxisName) -> Any:
    """Returns the arguments with the differentiated ones typed as varying over the axes.

    Where `shard_map` tracks varying types, the gradient of an argument that does not vary is
    summed over the shards by JAX: a mean taken afterwards would be n times too large.
    """
    chosen = indices(argnums, len(args))

    def localise(x: Any) -> Any:
        numeric = is_array(x) or isinstance(x, (float, complex))
        return compat.to_varying(jnp.asarray(x), axis_name) if numeric else x

    return tuple(
        jax.tree.map(localise, arg) if index in chosen else arg for index, arg in enumerate(args)
    )


def of_shard(loss: Any, axis_name: AxisName) -> Any:
    """Returns a shard's loss, typed as varying over the axes also where it is the same everywhere.

    Where `shard_map` tracks varying types, the cotangent of a loss that `lax.pmean` made is split
    among the shards: a mean of the shards' gradients would be n times too small. That of a loss
    that varies is the sum over the shards, as it is under `check_vma=False`.
    """
    return loss if axis_name is None else compat.to_varying(jnp.asarray(loss), axis_name)


def mean(tree: PyTree, axis_name: AxisName) -> PyTree:
    """Returns the mean over the axes of each leaf, taken in float32; of overwritten ones the max.

    Float8 scales and histories hold the largest values seen: a mean would be too small for the
    shard that saw them, and one shard's own would make the shards' states differ.
    """
    names = compat.axis_names(axis_name)

    def leaf_mean(path: Any, x: Any) -> Any:
        if not is_array(x) or x.dtype == jax.dtypes.float0:
            return x
        if is_overwritten(path):
            return jax.lax.pmax(compat.to_varying(x, names), names)
        # In float32: a sum of float16 values over the shards could pass 65504.
        return jax.lax.pmean(compat.to_varying(to_full(x), names), names).astype(x.dtype)

    return jax.tree_util.tree_map_with_path(leaf_mean, tree)
