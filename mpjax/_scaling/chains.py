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
        if _is_scaling(new) or not _in_chain(new):
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


def _in_chain(state: Any) -> bool:
    """Whether a state's loss scale is an element of a chain, and so runs in every step."""
    if isinstance(state, optax.MaskedState):
        return _in_chain(state.inner_state)
    if isinstance(state, OrderedDict):
        return any(map(_in_chain, state.values()))
    return any(map(_in_chain, state)) if type(state) is tuple else _is_scaling(state)


def _is_scaling(state: Any) -> bool:
    return isinstance(state, LossScaleState)
