"""Checks an optax transformation, and what it is given; the errors say what to type instead."""

from typing import Any

import jax
import optax

from mpjax._base.described import check_is_array, described, library_kind
from mpjax._base.errors import message
from mpjax._base.tree import path_str
from mpjax._base.typing import PyTree


def is_transformation(x: Any) -> bool:
    return isinstance(x, optax.GradientTransformation)


def check_transformation(tx: Any, where: str) -> None:
    """Raises TypeError for anything but an optax transformation."""
    if is_transformation(tx):
        return
    got = f"must be an optax transformation; got {described(tx)}."
    fix = "Type, for example, optax.adamw(1e-3)."
    if callable(tx) and not isinstance(tx, type):
        name = getattr(tx, "__name__", type(tx).__name__)
        fix = f"Call it: optax.{name}(1e-3)." if _is_of(tx, "optax") else f"Call it: {name}(...)."
    elif isinstance(tx, (int, float)):
        fix = f"Type optax.adamw({tx!r}), if that is the learning rate."
    elif type(tx).__name__ == "MultiSteps" and _is_of(type(tx), "optax"):
        fix = (
            "Type make_train_step(..., accumulate=4), whose micro-batches are in one call; or give "
        )
        fix += "optax.MultiSteps(...).gradient_transformation()."
    elif library_kind(tx) == "an nnx.Optimizer":
        fix = "Give the transformation that it was made of: optimizer.tx."
    raise TypeError(message(where, got, "Allowed: what optax.adam(1e-3) and its kind return.", fix))


def check_leaves(params: PyTree, where: str, call: str) -> None:
    """Raises TypeError for parameters with leaves that no optimizer takes, such as functions.

    Args:
      params: the parameters.
      where: the function that they were given to.
      call: what a person types to give it others, as 'tx.init({})'.
    """
    fix = f"With Equinox: {call.format('eqx.filter(model, eqx.is_inexact_array)')}."
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not hasattr(leaf, "__jax_array__"):
            check_is_array(leaf, f"parameter {path_str(path)!r}", where, fix)


def state_in(tree: PyTree) -> Any:
    """Returns the first state of optax's or mpjax's in a tree, None if there is none."""
    return next(filter(_is_state, jax.tree.leaves(tree, is_leaf=_is_state)), None)


def refuse_state(params: PyTree, call: str) -> None:
    """Refuses a state in the place of the parameters; `call` shows the right order."""
    if (state := state_in(params)) is not None:
        where, _, order = call.partition("(")
        got = f"got a {type(state).__name__} in the place of the parameters."
        first = "the parameters" if order.startswith("params") else "the state"
        then = "the state" if order.startswith("params") else "the parameters"
        fix = f"Swap them: mpjax.optim.{call}."
        raise TypeError(message(where, got, f"Allowed: {first}, then {then}.", fix))


def _is_state(x: Any) -> bool:
    kind = type(x)
    is_own = _is_of(kind, "optax") or _is_of(kind, "mpjax")
    return is_own and isinstance(x, tuple) and kind.__name__.endswith("State")


def _is_of(x: Any, library: str) -> bool:
    return getattr(x, "__module__", "").partition(".")[0] == library
