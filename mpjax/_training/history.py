"""Reads and updates the amax histories in a train step's state."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mpjax._autocast.api import as_settings
from mpjax._autocast.eight_bits import delayed
from mpjax._autocast.with_history import started
from mpjax._base.dtypes import FLOAT32
from mpjax._base.errors import message
from mpjax._base.typing import PyTree
from mpjax._scaling.loss_scale import LossScale
from mpjax._training.microbatches import MicroBatches
from mpjax._training.under_policy import widened

has_history = delayed.has_history

_GRADIENT = 2  # the place of the gradient's amax among the three of a product
_MOST = float(jnp.finfo(FLOAT32).max)


def history_of(
    policy: Any,
    loss_fn: Callable[..., Any],
    args: tuple[PyTree, ...],
    batch: PyTree,
    parts: MicroBatches,
    loss_scale: LossScale,
) -> PyTree:
    """Returns the histories that a state starts from, None where no recipe needs them.

    Args:
      policy: the step's.
      loss_fn: the loss function, as it was given.
      args: its arguments before the batch.
      batch: a batch as the step takes it; None for none.
      parts: the step's micro-batches, of which one is run.
      loss_scale: the factor of the loss.

    Raises:
      ValueError: histories are needed, and there is no batch.
    """
    if not delayed.has_history(policy):
        return None
    if batch is None:
        got = f"{policy} scales by amax histories, and what has one is found in a batch."
        fix = "Type step.init(params, batch=batch), or step.adopt(state, batch=batch);"
        fix += " in mpjax.nnx, step.init(batch=batch)."
        raise ValueError(message("train step", got, fix))

    # The largest power of two in float16: more would be inf as the seed of a float16 loss.
    seed = jnp.minimum(jnp.asarray(loss_scale.loss_scale, FLOAT32), 2.0**15)
    args = (*args, parts.first(batch))
    fun = widened(loss_fn, policy)
    return jax.jit(lambda *args: started(fun, args, {}, as_settings(policy), seed))(*args)


def of_policy(policy: Any, history: PyTree, where: str = "train step") -> PyTree:
    """Returns the histories of a state, None for a policy that needs none.

    Raises:
      ValueError: the policy needs histories, and the state has none.
    """
    if not delayed.has_history(policy):
        return None
    if history is None:
        got = f"the state has no amax histories, which {policy} scales by."
        fix = "Type step.init(params, batch=batch), or step.adopt(state, batch=batch)."
        raise ValueError(message(where, got, fix))
    return history


def tracked(params: PyTree, history: PyTree, policy: Any, loss_scale: LossScale) -> PyTree:
    """Returns the variables to differentiate by: parameters, and amaxes if there are any.

    Histories hold amaxes of true gradients, and products see scaled ones. So the amaxes are
    multiplied by this step's loss scale, which may be another than the last step's.
    """
    if history is None:
        return params
    scaled = jnp.asarray(loss_scale.loss_scale, FLOAT32)
    amaxes = delayed.amaxes_of(history)
    grown = jax.tree.map(
        lambda x: x.at[..., _GRADIENT].set(jnp.minimum(x[..., _GRADIENT] * scaled, _MOST)), amaxes
    )
    return delayed.Tracked(params, grown)


def untracked(grads: PyTree) -> tuple[PyTree, PyTree]:
    """Returns the gradients of parameters, and the amaxes that products saw, or None."""
    if isinstance(grads, delayed.Tracked):
        return grads.params, grads.amaxes
    return grads, None


def next_history(
    policy: Any, history: PyTree, seen: PyTree, loss_scale: LossScale, finite: Any
) -> PyTree:
    """Returns the histories after a step; those of a step that was skipped stay as they were.

    Raises:
      ValueError: the policy needs histories, and the state has none.
    """
    if of_policy(policy, seen) is None:
        return history
    scaled = jnp.asarray(loss_scale.loss_scale, FLOAT32)
    true = jax.tree.map(lambda x: x.at[..., _GRADIENT].divide(scaled), seen)
    return delayed.updated(history, true, finite)
