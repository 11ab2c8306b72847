"""Scaled `value_and_grad`: the true value, and float32 gradients of the true loss."""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Literal, ParamSpec, TypedDict, TypeVar, Unpack, overload

import jax
import jax.numpy as jnp

from mpjax._base import compat
from mpjax._base.dtypes import FLOAT32, describe, normal_powers_of_two
from mpjax._base.errors import message
from mpjax._base.foreign_errors import names_keywords
from mpjax._base.foreign_names import GRADIENTS
from mpjax._base.gradient_tags import tag
from mpjax._base.tree import (
    check_axes,
    is_array,
    is_overwritten,
    leaf_paths,
    map_with_path,
    to_full,
)
from mpjax._base.typing import Array, AxisName, LossFunction, PolicySpec, PyTree
from mpjax._policies.policy import get_policy
from mpjax._scaling.given_scale import as_loss_scale, whether_to_unscale
from mpjax._scaling.loss_scale import (
    DynamicLossScale,
    LossScale,
    NoOpLossScale,
    StaticLossScale,
)
from mpjax._scaling.returned import check_loss, split_pair


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
    policies = getattr(policy, "policies", (policy,))
    scaled = any(p.compute_dtype == jnp.float16 for p in policies)
    return DynamicLossScale() if scaled else NoOpLossScale()


P = ParamSpec("P")
R = TypeVar("R")
X = TypeVar("X")
A = TypeVar("A")


class _Options(TypedDict, total=False):
    """Options of `value_and_grad` and `grad` on which the type of no result depends."""

    unscale: bool | None
    policy: PolicySpec
    axis_name: AxisName
    holomorphic: bool
    allow_int: bool


@overload
def value_and_grad(
    fun: Callable[Concatenate[X, P], R],
    argnums: Literal[0] = 0,
    has_aux: bool = False,
    *,
    loss_scale: LossScale | float | None,
    **options: Unpack[_Options],
) -> Callable[Concatenate[X, P], tuple[R, X]]: ...
@overload
def value_and_grad(
    fun: Callable[P, R],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    loss_scale: LossScale | float | None,
    **options: Unpack[_Options],
) -> Callable[P, tuple[R, PyTree]]: ...
@names_keywords(GRADIENTS)
def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    loss_scale: LossScale | float | None,
    unscale: bool | None = None,
    policy: PolicySpec = None,
    axis_name: AxisName = None,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[..., Any]:
    """Returns a function for the value and the gradients of `fun`, computed with a loss scale.

    It works as `jax.value_and_grad`, and multiplies the loss by the loss scale before
    differentiating and divides the gradients by it afterwards, both in float32. The value is the
    true value of `fun`, also if the scaled loss overflows.

    Args:
      fun: returns a floating scalar, or `(scalar, aux)` with `has_aux`.
      argnums: which positional arguments to differentiate.
      has_aux: whether `fun` returns a pair, of which the second is passed through.
      loss_scale: a loss scale, traced or not; a number for a static one; None for none.
      unscale: None for what fits: gradients taken with the scale that `current_loss_scale`
        returned stay scaled, as the optimizer that holds it unscales them; all others come
        unscaled. True and False say so, and are an error where the other is right.
      policy: computes `fun` under it: all floating arguments cast to the compute dtype, the
        value to the output dtype. Gradients are those of the uncast arguments. The paths of a
        `PolicyMap` are those within each differentiated argument; the rest takes its default.
      axis_name: axis, or axes, of `shard_map`, `pmap` or `vmap` over which value and gradients
        are averaged, in float32. `aux` is not.
      holomorphic, allow_int: as in `jax.value_and_grad`.

    Returns:
      A function of the arguments of `fun` that returns `(value, grads)`, or
      `((value, aux), grads)` with `has_aux`.

    Raises:
      TypeError: the loss is no floating scalar, or `loss_scale` is none of the allowed.
      ValueError: `unscale` would leave gradients scaled, or unscale them twice.
      NameError: `axis_name` is not an axis of the surrounding transformation.

    Dtypes:
      The value keeps its dtype. Real gradients of up to 32 bits are float32, float64 and
      complex ones keep theirs. Flax's `_overwrite_with_gradient` is neither cast, scaled nor
      averaged; over `axis_name` the largest counts, since it holds the largest values seen. A
      float16 loss is differentiated with at most 2¹⁵, the largest power of two that its
      cotangent can hold; the rest of the scale is applied in float32.

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
    unscale = whether_to_unscale(scale, unscale, "value_and_grad(unscale)")
    name = name_of(fun)
    chosen_policy: Any = None if policy is None else get_policy(policy)
    body = fun if chosen_policy is None else _under_policy(fun, chosen_policy, argnums)

    differentiate = differentiated(
        functools.partial(
            jax.value_and_grad, argnums=argnums, holomorphic=holomorphic, allow_int=allow_int
        ),
        body,
        scale,
        has_aux=has_aux,
        unscale=unscale,
        holomorphic=holomorphic,
        name=name,
    )

    @functools.wraps(fun, updated=())  # a callable module's arrays do not belong on the wrapper
    def wrapped(*args: Any, **kwargs: Any) -> tuple[Any, PyTree]:
        if axis_name is not None:
            check_axes(axis_name, "value_and_grad")
            args = localised(args, argnums, axis_name)
        value, aux, grads = differentiate(*args, **kwargs)
        if chosen_policy is not None:
            # After differentiating: the scaling has to know that a loss is float16.
            value = getattr(chosen_policy, "default", chosen_policy).cast_to_output(value)
        if axis_name is not None:
            value, grads = mean(value, axis_name), mean(grads, axis_name)
            _tag(scale, grads, unscaled=unscale)
        return ((value, aux) if has_aux else value), grads

    return wrapped


def differentiated(
    transform: Callable[..., Any],
    fun: LossFunction,
    scale: LossScale,
    *,
    has_aux: bool,
    unscale: bool,
    holomorphic: bool = False,
    name: str,
) -> Callable[..., tuple[Any, Any, PyTree]]:
    """Returns a function that gives value, aux and gradients, differentiated scaled.

    Args:
      transform: `jax.value_and_grad` or one of its kind, with all but the function and `has_aux`.
      fun: the loss function.
      scale: the factor of the loss while it is differentiated.
      has_aux, unscale, holomorphic: as in `value_and_grad`.
      name: of the function, for messages.
    """

    def scaled(*args: Any, **kwargs: Any) -> tuple[Any, tuple[Any, Any]]:
        value, aux = split_pair(fun(*args, **kwargs), has_aux, name)
        check_loss(value, args, name, holomorphic=holomorphic)
        return _seeded(scale, value), (value, aux)

    differentiate = transform(scaled, has_aux=True)

    def wrapped(*args: Any, **kwargs: Any) -> tuple[Any, Any, PyTree]:
        (_, (value, aux)), grads = differentiate(*args, **kwargs)
        grads = map_with_path(lambda _, g: _widened(g), grads)
        grads = _restored(scale, value, grads, unscale)
        _tag(scale, grads, unscaled=unscale)
        return value, aux, grads

    return wrapped


@overload
def grad(
    fun: Callable[Concatenate[X, P], tuple[Any, A]],
    argnums: Literal[0] = 0,
    *,
    has_aux: Literal[True],
    loss_scale: LossScale | float | None,
    **options: Unpack[_Options],
) -> Callable[Concatenate[X, P], tuple[X, A]]: ...
@overload
def grad(
    fun: Callable[Concatenate[X, P], Any],
    argnums: Literal[0] = 0,
    has_aux: Literal[False] = False,
    *,
    loss_scale: LossScale | float | None,
    **options: Unpack[_Options],
) -> Callable[Concatenate[X, P], X]: ...
@overload
def grad(
    fun: Callable[P, Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    loss_scale: LossScale | float | None,
    **options: Unpack[_Options],
) -> Callable[P, PyTree]: ...
@names_keywords(GRADIENTS)
def grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    loss_scale: LossScale | float | None,
    unscale: bool | None = None,
    policy: PolicySpec = None,
    axis_name: AxisName = None,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[..., Any]:
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

    @functools.wraps(fun, updated=())
    def wrapped(*args: Any, **kwargs: Any) -> PyTree:
        out, grads = differentiate(*args, **kwargs)
        return (grads, out[1]) if has_aux else grads

    return wrapped


def name_of(fun: Any) -> str:
    """Returns a function's name for messages; raises TypeError for anything but a function."""
    if callable(fun):
        return getattr(fun, "__name__", type(fun).__name__)
    got = f"the first argument must be a function; got {describe(fun)}."
    fix = "Type value_and_grad(loss_fn, loss_scale=...)(params, batch), not loss_fn(params, batch)."
    raise TypeError(message("value_and_grad", got, fix))


def _under_policy(fun: LossFunction, policy: Any, argnums: int | Sequence[int]) -> LossFunction:
    """Returns `fun` on arguments in the compute dtype."""
    default = getattr(policy, "default", policy)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        cast = list(args)
        chosen = _indices(argnums, len(args))
        parameters = _cast_together(policy, [args[index] for index in chosen])
        for index, arg in zip(chosen, parameters, strict=True):
            cast[index] = arg
        for index in set(range(len(args))).difference(chosen):
            cast[index] = default.cast_to_compute(args[index])
        return fun(*cast, **{key: default.cast_to_compute(arg) for key, arg in kwargs.items()})

    return wrapped


def _cast_together(policy: Any, args: list[Any]) -> list[Any]:
    """Returns the arguments cast; warns of rules of a map that match nothing in any of them."""
    if not hasattr(policy, "warn_unused"):
        return [policy.cast_to_compute(arg) for arg in args]
    policy.warn_unused([path for arg in args for path in leaf_paths(arg)])
    return [policy.cast_to_compute(arg, warn=False) for arg in args]


def _indices(argnums: int | Sequence[int], count: int) -> list[int]:
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


def _tag(scale: LossScale, grads: PyTree, *, unscaled: bool) -> None:
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
    chosen = _indices(argnums, len(args))

    def localise(x: Any) -> Any:
        numeric = is_array(x) or isinstance(x, (float, complex))
        return compat.to_varying(jnp.asarray(x), axis_name) if numeric else x

    return tuple(
        jax.tree.map(localise, arg) if index in chosen else arg for index, arg in enumerate(args)
    )


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
