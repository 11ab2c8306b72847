"""`raise_if_diverged`: the check of a run, every so many steps, on the host."""

from typing import Any

import jax
import jax.core
import numpy as np

from mpjax._base.donated import refuse_donated
from mpjax._base.dtypes import describe
from mpjax._base.errors import NonFiniteError, message, warn
from mpjax._base.keywords import names_keywords
from mpjax._base.tree import leaf_paths
from mpjax._base.typing import PyTree
from mpjax._low_precision.codes import is_coded
from mpjax._low_precision.moments import with_classes
from mpjax._low_precision.spread import spread_text
from mpjax._scaling.optim_state import (
    LossScaleState,
    find_states,
    gradient_params,
    no_scale_text,
)
from mpjax._scaling.transformation import state_in

_GO_ON = (
    "Nothing bad was applied. Mended, go on with "
    "{0} = optax.tree.set({0}, diverged=jnp.array(False))."
)


@names_keywords()
def raise_if_diverged(opt_state: PyTree, params: PyTree | None = None) -> None:
    """Raises `NonFiniteError` if too many steps in a row were skipped; else does nothing.

    It runs on the host and waits for the step. Call it outside of the step, every so many steps.
    It also warns where moments in 8 bits are too coarse for a parameter, see `moment_spread`.

    Args:
      opt_state: an optimizer state, or any pytree with one inside, such as a `TrainState`.
      params: the parameters, for the path, shape and dtype of the first bad leaf; None for those
        of a `TrainState`.

    Raises:
      NonFiniteError: `max_consecutive_skips` steps in a row were skipped.
      ValueError: the state is traced, or has been donated to a step, or holds neither a loss scale
        nor moments in 8 bits.

    Warns:
      PolicyWarning: gradients within a block of a moment in 8 bits are 1000 times apart, and more.

    Example:
      >>> tx = mpjax.with_loss_scale(optax.sgd(0.1), max_consecutive_skips=1)
      >>> params = {"w": jnp.ones(2)}
      >>> _, state = tx.update({"w": jnp.full(2, jnp.nan)}, tx.init(params), params)
      >>> mpjax.raise_if_diverged(state, params)
      Traceback (most recent call last):
      mpjax.NonFiniteError: with_loss_scale: 1 step in a row was skipped; loss scale is 1.
        First bad leaf: 'w', f32[2].
        Lower the learning rate, or look for what overflows: ...
    """
    refuse_donated(opt_state, "raise_if_diverged")
    is_whole = hasattr(opt_state, "opt_state") and hasattr(opt_state, "params")
    if is_whole and params is None:
        params = opt_state.params
    states = find_states(opt_state)
    if not states and not _has_codes(opt_state):
        raise ValueError(_nothing_text(opt_state, params))
    for _, state in states:
        if isinstance(state.diverged, jax.core.Tracer):
            got = "it was called inside a traced function."
            fix = "Call it on the host, on the state that the jitted step returned."
            raise ValueError(message("raise_if_diverged", got, fix))
        where = np.flatnonzero(np.asarray(state.diverged))
        if len(where):
            go_on = _GO_ON.format("state" if is_whole else "opt_state")
            raise NonFiniteError(_diverged_text(_member(state, int(where[0])), params, go_on))
    text = spread_text(opt_state, params, "raise_if_diverged")
    if text is not None:
        warn(text)


def _has_codes(opt_state: PyTree) -> bool:
    return any(map(is_coded, jax.tree.leaves(with_classes(opt_state), is_leaf=is_coded)))


def _nothing_text(opt_state: PyTree, params: PyTree | None) -> str:
    where = "raise_if_diverged"
    if state_in(params) is None or state_in(opt_state) is not None:
        return no_scale_text(opt_state, where)
    got = f"got a {type(params).__name__} in the place of the parameters."
    return message(where, got, "The state comes first: raise_if_diverged(opt_state, params).")


def _member(state: LossScaleState, index: int) -> dict[str, Any]:
    """Returns the scalars of one of the states that pmap or vmap stacked, on the host."""
    flags = np.asarray(state.leaf_finite)
    members = np.size(state.diverged)
    member = {
        name: np.reshape(np.asarray(getattr(state, name)), -1)[index]
        for name in ("loss_scale", "skipped_steps", "consecutive_skips")
    }
    return {**member, "leaf_finite": flags.reshape(members, -1)[index]}


def _diverged_text(state: dict[str, Any], params: PyTree | None, go_on: str) -> str:
    skips = int(state["consecutive_skips"])
    words = "1 step in a row was skipped" if skips == 1 else f"{skips} steps in a row were skipped"
    if not skips:
        words = f"the limit of skips in a row was reached, {int(state['skipped_steps'])} in all"
    got = f"{words}; loss scale is {float(state['loss_scale']):g}."
    flags = state["leaf_finite"]
    bad = np.flatnonzero(~flags)
    if not len(bad):
        fix = "The loss itself was inf or NaN, and every gradient finite: a max, a where or a clip "
        fix += "hides it from them. step.diagnose(state, batch, metrics) names what made it."
        return message("with_loss_scale", got, "First bad leaf: none.", fix, go_on)
    leaf = _leaf_text(int(bad[0]), len(flags), params)
    more = f" ({len(bad)} of {len(flags)} leaves are bad)" if len(bad) > 1 else ""
    fix = (
        "Lower the learning rate, or look for what overflows: step.diagnose(state, batch, metrics) "
    )
    fix += "names it. Try policy 'bf16-mixed', or keep that layer in float32 with a PolicyMap."
    page = "More in the documentation, 'Where did it go wrong?'."
    return message("with_loss_scale", got, f"First bad leaf: {leaf}{more}.", fix, go_on, page)


def _leaf_text(index: int, count: int, params: PyTree | None) -> str:
    leaves = jax.tree.leaves(gradient_params(params))
    if len(leaves) == count:
        return f"{leaf_paths(gradient_params(params))[index]!r}, {describe(leaves[index])}"
    return f"number {index + 1} of {count}; pass the parameters that update got for its path"
