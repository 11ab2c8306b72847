"""Skips whole chains: a skipped step undoes transformations behind `with_loss_scale`, too."""

from collections import OrderedDict
from typing import Any

import jax
import jax.numpy as jnp
import optax

from mpjax._base.tree import is_overwritten
from mpjax._base.typing import PyTree
from mpjax._scaling.optim_state import LossScaleState, find_states, gradient_params
from mpjax._scaling.skip import select_like
from mpjax._scaling.wrappers import RUN_INNER


def skipped_whole(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Returns `tx`, whose chain has a loss scale in it, so that a skipped step skips all of it.

    `with_loss_scale` gives -0.0 for a skipped step. Momentum or weight decay behind it in a chain
    makes an update of that, and counts the step.

    Args:
      tx: a transformation that holds one loss scale; what wraps that in other ways than a chain
        (accumulation, which does not run it in every step) stays as it is.
    """
    wider = optax.with_extra_args_support(tx)

    def update(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        steps, new = wider.update(updates, state, params, **extra)
        if _is_scaling(new) or wrapper_around(new) is not None:
            return steps, new
        finite = find_states(new)[0][1].grads_finite

        def step_of(path: Any, step: Any, param: Any) -> Any:
            nothing = param if is_overwritten(path) else jnp.full_like(step, -0.0)
            return select_like(finite, jnp.asarray(step), nothing)

        def state_of(after: Any, before: Any) -> Any:
            return after if _is_scaling(after) else select_like(finite, after, before)

        steps = jax.tree_util.tree_map_with_path(step_of, steps, gradient_params(params))
        return steps, jax.tree.map(state_of, new, state, is_leaf=_is_scaling)

    return optax.GradientTransformationExtraArgs(tx.init, update)


def wrapper_around(state: Any) -> Any:
    """Returns the state of what wraps a loss scale in another way than a chain; None if nothing."""
    if _is_scaling(state) or not find_states(state):
        return None
    inside = _elements(state)
    if inside is None:
        return state
    return next((x for x in map(wrapper_around, inside) if x is not None), None)


def _elements(state: Any) -> list[Any] | None:
    """Returns the states inside one whose transformation runs them all in every step, else None."""
    if isinstance(state, RUN_INNER) or getattr(type(state), "runs_inner", False):
        return [state.inner_state]
    if isinstance(state, optax.transforms.PartitionState):
        return list(state.inner_states.values())
    if isinstance(state, OrderedDict):
        return list(state.values())
    return list(state) if type(state) is tuple else None


def _is_scaling(state: Any) -> bool:
    return isinstance(state, LossScaleState)
