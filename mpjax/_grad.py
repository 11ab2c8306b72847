"""Scaled `value_and_grad`: the true value, and float32 gradients of the true loss."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mpjax import _compat
from mpjax._dtypes import POLICY_DTYPES, describe, largest_power_of_two
from mpjax._errors import message
from mpjax._loss_scale import DynamicLossScale, LossScale, NoOpLossScale, StaticLossScale
from mpjax._policy import get_policy
from mpjax._tree import is_array, map_with_path, to_full
from mpjax._typing import Array, AxisName, LossFunction, PyTree

_FLOAT16 = POLICY_DTYPES["f16"]


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
    policy = get_policy(policy)
    policies = getattr(policy, "policies", (policy,))
    scaled = any(p.compute_dtype == _FLOAT16 for p in policies)
    return DynamicLossScale() if scaled else NoOpLossScale()


def as_loss_scale(loss_scale: Any, where: str) -> LossScale:
    """Returns `loss_scale` as an object: a number is a static one, None is none.

    Raises:
      TypeError: it is neither, nor anything with the methods of a loss scale.
    """
    if loss_scale is None:
        return NoOpLossScale()
    if isinstance(loss_scale, (int, float)) and not isinstance(loss_scale, bool):
        return StaticLossScale(loss_scale)
    if isinstance(loss_scale, LossScale):
        return loss_scale
    got = f"got {loss_scale!r}."
    allowed = "Allowed: NoOpLossScale(), StaticLossScale(2**15), DynamicLossScale(), a number."
    raise TypeError(message(where, got, allowed, "Type loss_scale=mpjax.DynamicLossScale()."))


def value_and_grad(
    fun: LossFunction,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    loss_scale: LossScale | float | None,
    unscale: bool = True,
    policy: Any = None,
    axis_name: AxisName = None,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[..., tuple[Any, PyTree]]:
    """Returns a function that gives the value of `fun` and its gradients, scaled on the way.

    As `jax.value_and_grad`, with the loss multiplied by the loss scale before differentiating
    and the gradients divided by it afterwards, both in float32. The value is that of `fun`,
    never the scaled one, also when the scaled loss overflows.

    Args:
      fun: returns a floating scalar, or `(scalar, aux)` with `has_aux`.
      argnums: which positional arguments to differentiate.
      has_aux: whether `fun` returns a pair, of which the second is passed through.
      loss_scale: a loss scale, traced or not; a number for a static one; None for none.
      unscale: False leaves the gradients scaled, as `with_loss_scale` takes them.
      policy: computes `fun` under it: all floating arguments cast to the compute dtype, the
        value to the output dtype. Gradients are those of the uncast arguments.
      axis_name: axis, or axes, of `shard_map`, `pmap` or `vmap` over which value and gradients
        are averaged, in float32. `aux` is not.
      holomorphic, allow_int: as in `jax.value_and_grad`.

    Returns:
      A function of the arguments of `fun` that returns `(value, grads)`, or
      `((value, aux), grads)` with `has_aux`.

    Raises:
      TypeError: the loss is no floating scalar, or `loss_scale` is none of the allowed.
      NameError: `axis_name` is not an axis of the surrounding transformation.

    Dtypes:
      The value keeps its dtype. Real gradients of up to 32 bits are float32, float64 and
      complex ones keep theirs. Flax's `_overwrite_with_gradient` is neither cast, scaled nor
      averaged. A float16 loss is differentiated with at most 2¹⁵, the largest power of two that
      its cotangent can hold; the rest of the scale is applied in float32.

    Transforms:
      jit, vmap, scan, shard_map (`check_vma` on and off), pmap.

    Example:
      >>> def loss(w, x):
      ...     return jnp.mean((x * w) ** 2)
      >>> ls = mpjax.StaticLossScale(2**10)
      >>> mpjax.value_and_grad(loss, loss_scale=ls)(jnp.float32(3), jnp.ones(4))
      (Array(9., dtype=float32), Array(6., dtype=float32))

    References:
      Micikevicius et al., Mixed Precision Training, 2018, https://arxiv.org/abs/1710.03740;
      JAX, `jax.value_and_grad`
    """
    scale = as_loss_scale(loss_scale, "value_and_grad(loss_scale)")
    body = fun if policy is None else _under_policy(fun, get_policy(policy), argnums, has_aux)
    name = getattr(fun, "__name__", "fun")

    def scaled(*args: Any, **kwargs: Any) -> tuple[Any, tuple[Any, Any]]:
        out = body(*args, **kwargs)
        value, aux = _split(out, has_aux, name)
        _check_loss(value, name, holomorphic)
        return _seeded(scale, value), (value, aux)

    differentiate = jax.value_and_grad(
        scaled, argnums, has_aux=True, holomorphic=holomorphic, allow_int=allow_int
    )

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> tuple[Any, PyTree]:
        if axis_name is not None:
            args = localised(args, argnums, axis_name)
        (_, (value, aux)), grads = differentiate(*args, **kwargs)
        grads = map_with_path(lambda _, g: _widened(g), grads)
        grads = _restored(scale, value, grads, unscale)
        if axis_name is not None:
            value, grads = mean(value, axis_name), mean(grads, axis_name)
        return ((value, aux) if has_aux else value), grads

    return wrapped


def grad(
    fun: LossFunction,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    loss_scale: LossScale | float | None,
    unscale: bool = True,
    policy: Any = None,
    axis_name: AxisName = None,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[..., PyTree]:
    """Returns a function that gives the gradients of `fun`; see `value_and_grad`.

    Returns:
      A function of the arguments of `fun` that returns `grads`, or `(grads, aux)` with
      `has_aux`, as `jax.grad` does.

    Example:
      >>> square = mpjax.grad(lambda x: x.astype(jnp.float16) ** 2, loss_scale=1024.0)
      >>> square(jnp.float32(3))
      Array(6., dtype=float32)
    """
    differentiate = value_and_grad(
        fun,
        argnums,
        has_aux,
        loss_scale=loss_scale,
        unscale=unscale,
        policy=policy,
        axis_name=axis_name,
        holomorphic=holomorphic,
        allow_int=allow_int,
    )

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> PyTree:
        out, grads = differentiate(*args, **kwargs)
        return (grads, out[1]) if has_aux else grads

    return wrapped


def _under_policy(
    fun: LossFunction, policy: Any, argnums: int | Sequence[int], has_aux: bool
) -> LossFunction:
    """Returns `fun` on arguments in the compute dtype, its value in the output dtype."""
    default = getattr(policy, "default", policy)  # the paths of a map are those of parameters

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        chosen = _indices(argnums, len(args))
        cast = [
            (policy if index in chosen else default).cast_to_compute(arg)
            for index, arg in enumerate(args)
        ]
        out = fun(*cast, **{key: default.cast_to_compute(arg) for key, arg in kwargs.items()})
        if not has_aux:
            return default.cast_to_output(out)
        value, aux = _split(out, has_aux, getattr(fun, "__name__", "fun"))
        return default.cast_to_output(value), aux

    return wrapped


def _indices(argnums: int | Sequence[int], count: int) -> set[int]:
    chosen = (argnums,) if isinstance(argnums, int) else argnums
    return {index % count for index in chosen if -count <= index < count}


def _split(out: Any, has_aux: bool, name: str) -> tuple[Any, Any]:
    if not has_aux:
        return out, None
    if isinstance(out, tuple) and len(out) == 2:
        return out
    got = f"has_aux=True needs a pair (loss, aux); got {describe(out)}."
    raise TypeError(message(f"value_and_grad({name})", got, "Return (loss, aux)."))


def _check_loss(value: Any, name: str, holomorphic: bool) -> None:
    kind = jnp.complexfloating if holomorphic else jnp.floating
    if is_array(value) and value.shape == () and jnp.issubdtype(value.dtype, kind):
        return
    if isinstance(value, float):
        return
    wanted = "a complex scalar (holomorphic=True)" if holomorphic else "a floating scalar"
    raise TypeError(
        message(
            f"value_and_grad({name})",
            f"the loss must be {wanted}; got {describe(value)}.",
            "Reduce it, e.g. `loss.astype(jnp.float32).mean()`; "
            "to return more than the loss, set has_aux=True.",
        )
    )


def _seed(scale: LossScale, value: Any) -> Array | None:
    """Returns the largest scale that a float16 loss can take, None where any will do.

    The cotangent of a float16 loss is float16: 2**16 would enter the backward pass as inf, and
    a rule that clips its cotangent would make a wrong finite gradient of it.
    """
    if isinstance(scale, NoOpLossScale) or getattr(value, "dtype", None) != _FLOAT16:
        return None
    return jnp.minimum(jnp.asarray(scale.loss_scale), largest_power_of_two(_FLOAT16))


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


def _widened(g: Any) -> Any:
    return to_full(g) if is_array(g) else g


def localised(args: tuple[Any, ...], argnums: int | Sequence[int], axis_name: AxisName) -> Any:
    """Returns the arguments with the differentiated ones typed as varying over the axes.

    Where `shard_map` tracks varying types, the gradient of an argument that does not vary is
    summed over the shards by JAX: a mean taken afterwards would be n times too large.
    """
    chosen = _indices(argnums, len(args))

    def localise(_: Any, x: Any) -> Any:
        return _compat.to_varying(x, axis_name) if is_array(x) else x

    return tuple(
        map_with_path(localise, arg) if index in chosen else arg for index, arg in enumerate(args)
    )


def mean(tree: PyTree, axis_name: AxisName) -> PyTree:
    """Returns the mean over the axes of each leaf outside overwritten ones, taken in float32."""
    names = _compat.axis_names(axis_name)

    def leaf_mean(_: Any, x: Any) -> Any:
        if not is_array(x) or x.dtype == jax.dtypes.float0:
            return x
        # In float32: a sum of float16 values over the shards could pass 65504.
        return jax.lax.pmean(_compat.to_varying(to_full(x), names), names).astype(x.dtype)

    return map_with_path(leaf_mean, tree)
