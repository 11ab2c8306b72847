"""The state and metrics of a train step, and the check of a state."""

from typing import TYPE_CHECKING, Any, NamedTuple, NotRequired, TypedDict

import jax.numpy as jnp

from mpjax._base.errors import message
from mpjax._base.foreign_errors import attribute_error
from mpjax._base.foreign_names import STATE_ATTRIBUTES
from mpjax._base.public import public_in
from mpjax._base.tree import is_array, strong
from mpjax._base.typing import Array, PyTree
from mpjax._training.summary import describe_state


@public_in("mpjax.train")
class TrainState(NamedTuple):
    """The state of a train step; a pytree of plain containers, for checkpoints.

    Example:
      >>> step = mpjax.make_train_step(lambda w, x: (w * x) ** 2, optax.sgd(0.1))
      >>> step.init(jnp.float32(3)).params
      Array(3., dtype=float32)
    """

    step: Array  # i32[], updates taken; a skipped step does not count
    params: PyTree
    opt_state: PyTree
    extra_state: PyTree  # None where the loss function has none
    amax_history: PyTree = None  # f32[..., 3, steps] by product, under a `DelayedScaling`

    if not TYPE_CHECKING:  # or an editor would believe that there is any attribute
        __getattr__ = attribute_error(STATE_ATTRIBUTES)

    def __repr__(self) -> str:
        return describe_state(self)


@public_in("mpjax.train")
class Metrics(TypedDict):
    """The metrics of a step: a dict of arrays on the device; `float` waits for them."""

    loss: Array  # f32[], the true loss
    grad_norm: Array  # f32[], of the true gradients, before clipping
    loss_scale: Array  # f32[], the one that this step used
    grads_finite: Array  # bool[]; false where the step was skipped
    skipped_steps: Array  # i32[], since the start
    consecutive_skips: Array  # i32[]
    diverged: Array  # bool[], after too many skips in a row
    aux: NotRequired[Any]  # with `has_aux`
    watched: NotRequired[Any]  # with `watch`
    lost_updates: NotRequired[Any]  # with `lost_updates`


def checked_state(
    state: Any,
    where: str = "train step",
    place: str = "first",
    *,
    made_by: str = "step.init(params)",
) -> TrainState:
    """Returns a train state; raises TypeError for anything else in its place."""
    if isinstance(state, TrainState):
        return state
    got = f"the {place} argument must be the state; got a {type(state).__name__}."
    fix = f"Make it with {made_by}, and pass the state that the last step returned."
    raise TypeError(message(where, got, fix))


def copied(x: Any) -> Any:
    """Returns an array copied, and a number as one; anything else as it is."""
    x = strong(x)
    return jnp.array(x, copy=True) if is_array(x) else x
