"""Checks that an argument is an optax transformation; the error says what to type instead."""

from typing import Any

import jax
import optax

from mpjax._base.described import described, library_kind
from mpjax._base.errors import message
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


def state_in(tree: PyTree) -> Any:
    """Returns the first state of optax's or mpjax's in a tree, None if there is none."""
    return next(filter(_is_state, jax.tree.leaves(tree, is_leaf=_is_state)), None)


def _is_state(x: Any) -> bool:
    kind = type(x)
    is_own = _is_of(kind, "optax") or _is_of(kind, "mpjax")
    return is_own and isinstance(x, tuple) and kind.__name__.endswith("State")


def _is_of(x: Any, library: str) -> bool:
    return getattr(x, "__module__", "").partition(".")[0] == library
