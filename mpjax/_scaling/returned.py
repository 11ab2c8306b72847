"""Checks what a loss function returned."""

from typing import Any

import jax
import jax.numpy as jnp

from mpjax._base.dtypes import describe
from mpjax._base.errors import message
from mpjax._base.tree import is_array, is_castable
from mpjax._base.typing import PyTree


def split_pair(out: Any, has_aux: bool, name: str) -> tuple[Any, Any]:
    """Returns the loss and aux that a function `name` returned."""
    if not has_aux:
        return out, None
    if isinstance(out, tuple) and len(out) == 2:
        return out
    got = f"has_aux=True needs a pair (loss, aux); got {describe(out)}."
    raise TypeError(message(f"value_and_grad({name})", got, "Return (loss, aux)."))


def check_loss(value: Any, args: tuple[Any, ...], name: str, *, holomorphic: bool) -> None:
    """Raises TypeError for a loss that cannot be differentiated; `args` are the function's."""
    is_complex = is_array(value) and jnp.issubdtype(value.dtype, jnp.complexfloating)
    fits = is_complex if holomorphic else is_castable(value)  # no 8-bit float: it has no range
    if isinstance(value, float) or (fits and value.shape == ()):
        return
    wanted = "a complex scalar (holomorphic=True)" if holomorphic else "a floating scalar"
    got = f"the loss must be {wanted}; got {describe(value)}."
    fix = "Reduce it, e.g. `loss.astype(jnp.float32).mean()`; "
    fix += "to return more than the loss, set has_aux=True."
    is_pair = isinstance(value, tuple) and len(value) == 2
    if is_pair and all(is_array(x) and x.shape == () for x in value):
        fix += " A loss and its weight: make_train_step(..., weighted=True)."
    if args and is_array(value) and is_array(args[0]) and value.shape == args[0].shape:
        fix += "\n  If it is jax.grad(loss_fn), give loss_fn itself: it is differentiated here."
    elif args and _are_gradients(value[1] if is_pair else value, args[0]):
        got = "the loss came with gradients." if is_pair else "the loss is gradients."
        fix = "Give the loss function itself, without jax.value_and_grad or jax.grad around it: "
        fix += "it is differentiated here."
    raise TypeError(message(f"value_and_grad({name})", got, fix))


def _are_gradients(x: PyTree, params: PyTree) -> bool:
    """Whether something has the form of parameters of which not all are scalars."""
    shapes = [jax.tree.map(jnp.shape, tree) for tree in (x, params) if _has_shapes(tree)]
    return len(shapes) == 2 and shapes[0] == shapes[1] and any(jax.tree.leaves(shapes[0]))


def _has_shapes(tree: PyTree) -> bool:
    return all(map(is_array, jax.tree.leaves(tree)))
