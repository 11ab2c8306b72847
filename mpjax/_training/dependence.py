"""A loss that does not depend on the parameters: each gradient is 0, and nothing is trained."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from mpjax._base.errors import message, warn
from mpjax._base.tree import is_inexact
from mpjax._base.typing import PyTree

_WHERE = "make_train_step"


def check_trains(loss: Any, weight: Any, params: PyTree) -> Any:
    """Returns the loss as it is; what it depends on is looked at when it is differentiated.

    Args:
      loss: what is differentiated; an array, a number of Python (which is constant on purpose, and
        a weakly typed array by now), or what a later check refuses.
      weight: of the loss in a mean of micro-batches, or None.
      params: by which it is differentiated.

    Raises:
      ValueError: while it is differentiated: the weight depends on the parameters and the loss
        does not, because they were returned in the other order.

    Warns:
      PolicyWarning: while it is differentiated: the loss does not depend on the parameters.
    """
    leaves = list(filter(is_inexact, jax.tree.leaves(params)))
    is_made = is_inexact(loss) and not getattr(loss, "weak_type", False)
    return _looked_at(loss, weight, leaves) if is_made and leaves else loss


@jax.custom_jvp
def _looked_at(loss: Any, weight: Any, leaves: list[Any]) -> Any:
    del weight, leaves
    return loss


def _rule(values: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    loss, (moved, moved_weight, moved_leaves) = values[0], tangents
    if not isinstance(moved, SymbolicZero):
        return loss, moved
    if _move(moved_weight):
        got = "the weight depends on the parameters and the loss does not."
        raise ValueError(message(f"{_WHERE}(weighted=True)", got, "Return (loss, weight)."))
    if _move(moved_leaves):
        got = "the loss does not depend on the parameters: each gradient is 0, nothing is trained."
        why = "It may read those of an enclosing function, or count hits (argmax has no gradient)."
        fix = "Compute the loss from the parameters that the loss function is given."
        warn(message(_WHERE, got, why, fix))
    return loss, jnp.zeros_like(loss)


def _move(tangents: Any) -> bool:
    leaves = jax.tree.leaves(tangents, is_leaf=lambda x: isinstance(x, SymbolicZero))
    return any(not isinstance(x, SymbolicZero) for x in leaves)


_looked_at.defjvp(_rule, symbolic_zeros=True)
