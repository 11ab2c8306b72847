"""`value_and_grad` and `grad`: of a loss function, with a loss scale, under a policy."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Generator, Sequence
from typing import Any, Concatenate, Literal, ParamSpec, TypedDict, TypeVar, Unpack, overload

import jax
import numpy as np

from mpjax._autocast.api import as_typed
from mpjax._base.averaged import averaged_over
from mpjax._base.described import described
from mpjax._base.errors import message
from mpjax._base.foreign_keywords import GRADIENTS
from mpjax._base.keywords import names_keywords
from mpjax._base.tree import check_axes, leaf_paths
from mpjax._base.typing import AxisName, LossFunction, PolicySpec, PyTree
from mpjax._policies.order import is_policy
from mpjax._policies.parts import default_of
from mpjax._policies.policy import get_policy
from mpjax._policies.policy_map import PolicyMap
from mpjax._scaling.given_scale import as_loss_scale, whether_to_unscale
from mpjax._scaling.grad import differentiated, indices, localised, mean, name_of, tag_with_scale
from mpjax._scaling.loss_scale import LossScale
from mpjax._training.inputs import refuse_undifferentiable
from mpjax._training.under_policy import is_autocast, widened

P = ParamSpec("P")
R = TypeVar("R")
X = TypeVar("X")
F = TypeVar("F", bound=Callable[..., Any])
A = TypeVar("A")


class _Options(TypedDict, total=False):
    """Options of `value_and_grad` and `grad` on which the type of no result depends."""

    unscale: bool | None
    policy: PolicySpec
    axis_name: AxisName
    holomorphic: bool
    allow_int: bool


def asks_for_scale(fun: F) -> F:
    """Decorates `value_and_grad` and its kind: says what to type where no loss scale was given."""
    takes_policy = "policy" in inspect.signature(fun).parameters

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        second = args[1] if len(args) > 1 else None
        typed = "loss_scale=mpjax.current_loss_scale(opt_state)"
        got = "loss_scale= is missing." * ("loss_scale" not in kwargs)
        if isinstance(second, (LossScale, float)):
            got = f"got {described(second)} as the second argument."
            typed = f"loss_scale={second}" if isinstance(second, float) else "loss_scale=it"
        elif takes_policy and is_policy(second):
            got = f"got the policy {str(second)!r} as the second argument."
            typed = f"policy={str(second)!r}, {typed}"
        elif len(args) > 1 and not _are_indices(second):
            raise TypeError(_called_at_once(fun.__name__, second))
        if got:
            allowed = "Allowed: the scale of an optimizer in with_loss_scale, one of your own, or "
            allowed += "None for none."
            fix = f"Type {fun.__name__}(loss_fn, {typed})."
            raise TypeError(message(fun.__name__, got, allowed, fix))
        return fun(*args, **kwargs)

    return wrapped  # type: ignore[return-value]  # of the same signature


def _are_indices(x: Any) -> bool:
    """Whether it may stand for positions of arguments."""
    several = x if isinstance(x, (tuple, list, range)) else (x,)
    return all(isinstance(one, (int, np.integer)) for one in several)


def _called_at_once(name: str, second: Any) -> str:
    """Returns the error text for the function's own arguments in the place of `argnums`."""
    got = f"got {described(second)} as the second argument, argnums."
    allowed = "Allowed there: the positions of arguments, such as 0 or (0, 1)."
    fix = f"Type {name}(loss_fn, loss_scale=...)(params, batch): the function that it returns takes"
    return message(name, got, allowed, f"{fix} them.")


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
@names_keywords(GRADIENTS, behind="(params, batch)")
@asks_for_scale
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
      policy: computes `fun` under it, as `make_train_step` does: a mixed one by `autocast`, a
        "true" one, such as "bf16-true", by casting all floating arguments. The value is in the
        output dtype, the gradients are those of the arguments as they were given.
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
      complex ones keep theirs. Those are JAX's: give optax their conjugates, `jnp.conj(grad)`.
      Flax's `_overwrite_with_gradient` is neither cast, scaled nor averaged; over `axis_name` the
      largest counts, since it holds the largest values seen. A float16 loss is differentiated with
      at most 2¹⁵, the largest power of two that its cotangent can hold; the rest of the scale is
      applied in float32.

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
        axis_name=axis_name,
    )

    @functools.wraps(fun, updated=())  # a callable module's arrays do not belong on the wrapper
    def wrapped(*args: Any, **kwargs: Any) -> tuple[Any, PyTree]:
        args = _of_shards(args, argnums, axis_name)
        with averaged_over(axis_name, "value_and_grad"), _explained(args, argnums, name, allow_int):
            value, aux, grads = differentiate(*args, **kwargs)
        if chosen_policy is not None:
            # After differentiating: the scaling has to know that a loss is float16.
            value = default_of(chosen_policy).cast_to_output(value)
        if axis_name is not None:
            value, grads = mean(value, axis_name), mean(grads, axis_name)
            tag_with_scale(scale, grads, unscaled=unscale)
        return ((value, aux) if has_aux else value), grads

    return wrapped


def _of_shards(args: tuple[Any, ...], argnums: Any, axis_name: AxisName) -> tuple[Any, ...]:
    if axis_name is None:
        return args
    check_axes(axis_name, "value_and_grad")
    return localised(args, argnums, axis_name)


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
@names_keywords(GRADIENTS, behind="(params, batch)")
@asks_for_scale
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


@contextlib.contextmanager
def _explained(
    args: tuple[Any, ...], argnums: int | Sequence[int], name: str, allow_int: bool
) -> Generator[None]:
    """Says of an argument that JAX does not differentiate which leaf is at fault."""
    try:
        yield
    except TypeError:
        chosen = [args[index] for index in indices(argnums, len(args))]
        refuse_undifferentiable(chosen, f"value_and_grad({name})", allow_int=allow_int)
        raise


def _under_policy(fun: LossFunction, policy: Any, argnums: int | Sequence[int]) -> LossFunction:
    """Returns `fun` in a policy's precision: autocast for a mixed one, casts for a "true" one."""
    if is_autocast(policy):
        return as_typed(widened(fun, policy, argnums), policy)
    default = default_of(policy)

    @functools.wraps(fun, updated=())
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        cast = list(args)
        chosen = indices(argnums, len(args))
        parameters = _cast_together(policy, [args[index] for index in chosen])
        for index, arg in zip(chosen, parameters, strict=True):
            cast[index] = arg
        for index in set(range(len(args))).difference(chosen):
            cast[index] = default.cast_to_compute(args[index])
        return fun(*cast, **{key: default.cast_to_compute(arg) for key, arg in kwargs.items()})

    return wrapped


def _cast_together(policy: Any, args: list[Any]) -> list[Any]:
    """Returns the arguments cast; warns of rules of a map that match nothing in any of them."""
    if not isinstance(policy, PolicyMap):
        return [policy.cast_to_compute(arg) for arg in args]
    policy.warn_unused([path for arg in args for path in leaf_paths(arg)])
    return [policy.cast_to_compute(arg, warn=False) for arg in args]
