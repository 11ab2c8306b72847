"""Makes the subject of a diagnosis: a loss function, differentiated under a policy and a scale."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from mpjax._autocast.api import as_typed
from mpjax._autocast.arguments.nnx_names import name_modules
from mpjax._base.described import library_kind
from mpjax._base.errors import message
from mpjax._base.tree import is_floating
from mpjax._policies.parts import default_of
from mpjax._policies.policy import get_policy
from mpjax._scaling.given_scale import as_loss_scale
from mpjax._scaling.grad import get_loss_scale, name_of
from mpjax._scaling.loss_scale import LossScale, NoOpLossScale, StaticLossScale
from mpjax._training.gradients import value_and_grad
from mpjax._training.history import has_history
from mpjax._training.under_policy import is_autocast, widened
from mpjax.numerics._program import argument_names, check_function

Make = Callable[[Any], Callable[..., Any]]
"""Policy → function of (loss scale, *arguments) that returns loss and scaled gradients."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """A loss function, its derivative under a policy, and the names of its arguments."""

    name: str
    policy: Any
    make: Make
    scaled: bool  # whether the loss scale takes part
    where: str  # the function that messages speak for
    parameters: str  # the name of the argument that it is differentiated by
    programs: dict[Any, Any] = dataclasses.field(default_factory=dict)  # by types of arguments


def of_loss(
    loss_fn: Callable[..., Any], policy: Any, loss_scale: Any, *, has_aux: bool, where: str
) -> tuple[Subject, LossScale]:
    """Returns the subject of a loss function, and its loss scale.

    Raises:
      TypeError: it is no function, or `loss_scale` is no loss scale.
      ValueError: the policy scales by amax histories.
    """
    check_function(loss_fn, where, "loss_fn, policy")
    _refuse_step(loss_fn, where)
    policy = get_policy(policy)
    _check_place(policy, loss_fn, where)
    scale = get_loss_scale(policy) if loss_scale is None else as_loss_scale(loss_scale, where)
    scaled = not isinstance(scale, NoOpLossScale)

    def make(under: Any) -> Callable[..., Any]:
        return differentiated(loss_fn, under, scaled=scaled, has_aux=has_aux, where=where)

    parameters = argument_names(loss_fn, 1)[0]
    return Subject(name_of(loss_fn), policy, make, scaled, where, parameters), scale


def _refuse_step(loss_fn: Any, where: str) -> None:
    if library_kind(loss_fn) == "a train step":
        allowed = "Allowed: its loss function, loss_fn(params, *batch) -> loss."
        fix = f"Type {where}(loss_fn, policy)(params, batch)."
        if where == "numerics.diagnose":
            fix = "Type step.diagnose(state, batch, metrics)."
        raise TypeError(message(where, "got a train step.", allowed, fix))


def _check_place(policy: Any, loss_fn: Callable[..., Any], where: str) -> None:
    """Refuses a recipe whose scales come from earlier steps: their history is not at hand."""
    if not has_history(policy):
        return
    got = f"{policy} scales by amax histories, which are in the state of a train step: without "
    got += "them this would be another program than the step's."
    allowed = "Allowed: step.diagnose(state, batch, metrics), and make_train_step(..., watch=100)."
    fix = "Else type mpjax.Float8CurrentScaling() for the recipe, which scales by the values at "
    fix += f"hand; or give the apply of mpjax.with_amax_history({name_of(loss_fn)}, policy), and "
    fix += "'float32' as the policy here."
    raise ValueError(message(where, got, allowed, fix))


def differentiated(
    loss_fn: Callable[..., Any], policy: Any, *, scaled: bool, has_aux: bool, where: str
) -> Callable[..., Any]:
    """Returns (loss scale, params, *rest) → loss and scaled gradients of all floating leaves.

    Leaves of `params` that are no floating arrays, such as an Equinox module's functions, are
    passed as they are.
    """

    def fun(factor: Any, *args: Any) -> Any:
        params, *rest = _checked(args, loss_fn, where)
        loss, chosen, moving = of_leaves(loss_fn, policy, params, rest, has_aux=has_aux)
        differentiate = value_and_grad(loss, loss_scale=factor_as_scale(factor, scaled=scaled))
        value, grads = differentiate(chosen)
        treedef = jax.tree.structure(params)
        full: list[Any] = [None] * treedef.num_leaves
        for i, grad in zip(moving, grads, strict=True):
            full[i] = grad
        return value, jax.tree.unflatten(treedef, full)

    return fun


def _checked(args: Sequence[Any], loss_fn: Callable[..., Any], where: str) -> Sequence[Any]:
    """Returns the arguments; refuses a first one without floating arrays to differentiate by."""
    if args and any(map(is_floating, jax.tree.leaves(args[0]))):
        return args
    name = name_of(loss_fn)
    got = "got no arguments." if not args else "got a first argument without a floating leaf."
    fix = f"Give the arguments of {name}, the parameters first: (params, *batch). It is "
    fix += "differentiated by them, so that they are arrays of float32, bfloat16 or float16."
    raise TypeError(message(where, got, fix))


def of_leaves(
    loss_fn: Callable[..., Any], policy: Any, params: Any, rest: Sequence[Any], *, has_aux: bool
) -> tuple[Callable[..., Any], list[Any], list[int]]:
    """Returns the loss of the floating leaves of `params`, these leaves, and their places."""
    leaves, treedef = jax.tree.flatten(params)
    moving = [i for i, leaf in enumerate(leaves) if is_floating(leaf)]

    def loss(chosen: Sequence[Any]) -> Any:
        full = list(leaves)
        for i, leaf in zip(moving, chosen, strict=True):
            full[i] = leaf
        out = under_policy(loss_fn, policy)(jax.tree.unflatten(treedef, full), *rest)
        return out[0] if has_aux and isinstance(out, tuple) else out

    return loss, [leaves[i] for i in moving], moving


def bytes_kept(
    loss_fn: Callable[..., Any], policy: Any, params: Any, rest: Sequence[Any], *, has_aux: bool
) -> int:
    """Returns the bytes of residuals, from the forward to the backward pass; nothing is run."""

    def pullback(arrays: Sequence[Any]) -> Any:
        loss, chosen, _ = of_leaves(loss_fn, policy, params, rest, has_aux=has_aux)
        del chosen
        return jax.vjp(loss, list(arrays))[1]

    _, chosen, _ = of_leaves(loss_fn, policy, params, rest, has_aux=has_aux)
    # The leaves of a pullback are its residuals.
    kept = jax.tree.leaves(jax.eval_shape(pullback, chosen))
    return sum(math.prod(x.shape) * _itemsize(x) for x in kept)


def _itemsize(x: Any) -> int:
    return getattr(x.dtype, "itemsize", 0)


def factor_as_scale(factor: Any, *, scaled: bool) -> LossScale:
    """Returns the loss scale whose factor is a traced number."""
    return StaticLossScale.tree_unflatten(None, (factor,)) if scaled else NoOpLossScale()


def under_policy(fun: Callable[..., Any], policy: Any) -> Callable[..., Any]:
    """Returns a function in a policy's precision, as a train step computes it.

    Under a mixed policy, or a quantised one, that is autocast; under one of a single dtype the
    arguments are cast.
    """
    if is_autocast(policy):
        return as_typed(widened(fun, policy), policy)
    default = default_of(policy)

    def wrapped(params: Any, *rest: Any) -> Any:
        args = (policy.cast_to_compute(params), *map(default.cast_to_compute, rest))
        return fun(*name_modules(args))  # NNX modules among copies, named as autocast names them

    return wrapped
