"""The state and metrics of a train step, and the check of a state."""

from typing import TYPE_CHECKING, Any, NamedTuple, NotRequired, TypedDict

import jax
import jax.numpy as jnp

from mpjax._base.compat import has_values
from mpjax._base.donated import refuse_donated
from mpjax._base.dtypes import FLOAT32, describe
from mpjax._base.errors import message
from mpjax._base.exported import exported
from mpjax._base.foreign_attributes import STATE_ATTRIBUTES
from mpjax._base.foreign_errors import attribute_error
from mpjax._base.public import public_in
from mpjax._base.tree import first_difference, is_array, leaf_paths, strong
from mpjax._base.typing import Array, PyTree
from mpjax._low_precision.forms import reweighted
from mpjax._training.inputs import refuse_not_finite
from mpjax._training.summary import describe_state


@exported
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

    def with_params(self, params: PyTree) -> "TrainState":
        """Returns the state with other parameters, such as pretrained ones: use it to load them.

        Float32 weights that the optimizer's state stores are made of these, with all their bits.
        `_replace(params=...)` would leave the old ones there, and the next step bring them back.
        All else stays as it is: moments, loss scale, counters.

        Args:
          params: a tree like `state.params`; each leaf is copied in the dtype, and to the
            devices, of the one that it replaces.

        Raises:
          ValueError: the trees or their shapes differ, a parameter is inf or NaN, or the state has
            been donated to a step.

        Example:
          >>> tx = mpjax.optim.with_master_weights(optax.sgd(0.1))
          >>> step = mpjax.make_train_step(lambda w, x: (w * x) ** 2, tx, "bf16-true")
          >>> state = step.init(jnp.float32(3)).with_params(jnp.float32(5.01))
          >>> state.params, mpjax.optim.full_params(state.params, state)
          (Array(5, dtype=bfloat16), Array(5.01, dtype=float32))
        """
        where = "state.with_params"
        refuse_donated(self, where)
        if jax.tree.structure(params) != jax.tree.structure(self.params):
            pair = ("the parameters of the state", self.params), ("those that were given", params)
            fix = "Give all of them, as step.init(params) was given them."
            raise ValueError(first_difference(where, *pair, (fix,)))
        pairs = zip(*map(jax.tree.leaves, (self.params, params)), strict=True)
        for path, (old, new) in zip(leaf_paths(params), pairs, strict=True):
            if jnp.shape(new) != jnp.shape(old):
                got = f"parameter {path!r} is {describe(new)}, and that of the state "
                fix = "Load parameters of this model, or start with step.init(params)."
                raise ValueError(message(where, f"{got}{describe(old)}.", fix))
        chosen = jax.tree.map(lambda old, x: _placed(x, old, old.dtype), self.params, params)
        refuse_not_finite(chosen, where)
        weights = jax.tree.map(lambda old, x: _placed(x, old, FLOAT32), self.params, params)
        opt_state = reweighted(self.opt_state, chosen, weights)
        return self._replace(params=chosen, opt_state=opt_state)


def _placed(x: Any, old: Any, dtype: Any) -> Any:
    """Returns a parameter in a dtype, on the devices of the old one, as an array of its own."""
    made = jnp.array(x, copy=True).astype(dtype)
    is_here = isinstance(old, jax.Array) and has_values(old)
    elsewhere = is_here and has_values(made) and old.sharding != made.sharding
    return jax.device_put(made, old.sharding) if elsewhere else made


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


def copied_in_turn(tree: PyTree) -> PyTree:
    """Returns a tree of copies; leaf by leaf, so that two whole trees are never held at once."""
    leaves, treedef = jax.tree.flatten(tree)
    del tree
    for i, leaf in enumerate(leaves):
        leaves[i] = leaf = copied(leaf)
    return jax.tree.unflatten(treedef, leaves)
