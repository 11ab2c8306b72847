"""Adopts states of another policy, or of no loss scale: on request, and never by accident."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from mpjax._base.described import described
from mpjax._base.donated import refuse_donated
from mpjax._base.dtypes import describe
from mpjax._base.errors import message
from mpjax._base.keywords import names_keywords
from mpjax._base.tree import first_difference, is_array, leaf_paths
from mpjax._base.typing import PyTree
from mpjax._low_precision.apply import full_params as full_weights
from mpjax._low_precision.forms import formed, has_form, known_weights, plain
from mpjax._low_precision.moments import with_classes
from mpjax._scaling.optim_state import LossScaleState, find_states
from mpjax._scaling.transformation import is_transformation


@names_keywords()
def adopt_state(
    tx: optax.GradientTransformation,
    opt_state: PyTree,
    params: PyTree,
    *,
    full_params: PyTree | None = None,
) -> PyTree:
    """Returns `opt_state`, of the same optimizer under another precision, as a state of `tx`.

    For a checkpoint from before `with_loss_scale`, or from a run with another loss scale or policy.
    Moments, counts and schedules are taken over. A dynamic loss scale goes on as it was, with its
    options; a static one, or one of another kind, is that of `tx`. Restore the checkpoint into a
    state of the optimizer that wrote it, then adopt that state.

    You may add, remove and change wrappers that store weights or moments in fewer bits
    (`with_master_weights`, `with_kahan`, `with_quantized_state`, ...). A moment in fewer bits is
    rounded. Bits of the weights are lost if neither `params` nor the new form stores them. From a
    run with float32 weights, round them for `params` and pass them as `full_params`: 24 or 32 bits,
    or a compensation, start from those. Back to float32: `params = mpjax.optim.full_params(params,
    old)`.

    Args:
      tx: the optimizer that goes on, inside `with_loss_scale` or not.
      opt_state: the state that another one left, inside `with_loss_scale` or not.
      params: the parameters, in the dtypes in which they go on.
      full_params: the float32 weights that `params` were rounded from; None for those in
        `opt_state`.

    Returns:
      A state as `tx.init(params)` makes it.

    Raises:
      ValueError: the optimizers differ in more than loss scale and dtypes; the message names
        where first. Or the state has been donated to a step.

    Dtypes:
      Those of `tx.init(params)`: moments are cast.

    Transforms:
      jit.

    Example:
      >>> params = {"w": jnp.ones(2)}
      >>> old = optax.sgd(0.1, momentum=0.9)
      >>> tx = mpjax.with_loss_scale(old, mpjax.DynamicLossScale(8))
      >>> state = mpjax.optim.adopt_state(tx, old.init(params), params)
      >>> mpjax.current_loss_scale(state).loss_scale
      Array(8., dtype=float32)
    """
    if not is_transformation(tx):
        got = f"got {described(tx)} as the optimizer."
        allowed = "Allowed, in this order: the optimizer, the state, the parameters."
        fix = "Type mpjax.optim.adopt_state(tx, opt_state, params)."
        raise TypeError(message("adopt_state", got, allowed, fix))
    refuse_donated(opt_state, "adopt_state")
    return adopted(tx.init(params), opt_state, "adopt_state", params, full_params)


def adopted(
    fresh: PyTree,
    old: PyTree,
    where: str,
    params: PyTree | None = None,
    full_params: PyTree | None = None,
) -> PyTree:
    """Returns the values of `old` in the form of `fresh`, a state that has just been made."""
    old = with_classes(_rebuilt(fresh, old))
    if has_form(fresh) or has_form(old):
        if full_params is None and _same_form(fresh, old):
            return old
        # By way of the plain state: both may store moments or weights in different forms.
        values = adopted(plain(fresh), plain(old), where)
        weights = known_weights(params, old) if full_params is None else full_params
        return formed(fresh, values, params, weights)
    if jax.tree.structure(fresh) == jax.tree.structure(old):
        same = _cast_like(fresh, old, where)
        return jax.tree.map(_with_its_scale, fresh, same, is_leaf=_holds_a_scale)
    states = find_states(old)
    outermost = [state for path, state in states if not path]
    if not outermost and states:
        got = "the loss scale stands inside the old state, at another place than in the new one."
        fix = "Put with_loss_scale where it stood, or adopt the part of the state that it wraps."
        raise ValueError(message(where, got, fix))
    inner = outermost[0].inner_state if outermost else old
    if not isinstance(fresh, LossScaleState):
        return _cast_like(fresh, inner, where)
    kept: dict[str, Any] = {"inner_state": _cast_like(fresh.inner_state, inner, where)}
    if outermost:
        counts = ["grads_finite", "skipped_steps", "consecutive_skips", "diverged"]
        if jnp.shape(outermost[0].leaf_finite) == jnp.shape(fresh.leaf_finite):
            counts.append("leaf_finite")  # the names of what diverged
        kept |= {name: getattr(outermost[0], name) for name in counts}
        kept |= _scale_that_goes_on(fresh, outermost[0])
    return fresh._replace(**kept)


def _holds_a_scale(x: Any) -> bool:
    return isinstance(x, LossScaleState)


def _with_its_scale(fresh: Any, old: Any) -> Any:
    """Returns an adopted part of a state; one with a loss scale has that of its new optimizer."""
    if not _holds_a_scale(fresh):
        return old
    of_tx = {"loss_scale": fresh.loss_scale, "adjustment": fresh.adjustment}
    return old._replace(**(of_tx | _scale_that_goes_on(fresh, old)))


def _scale_that_goes_on(fresh: LossScaleState, old: LossScaleState) -> dict[str, Any]:
    """Returns what the old loss scale leaves to the new one.

    That is all of a dynamic one. A static one is an option of its optimizer, and one of another
    kind, as a static one for a dynamic, starts as its optimizer says.
    """
    if kind_of(old) != kind_of(fresh) or not fresh.adjustment:
        return {}
    return {"loss_scale": old.loss_scale, "adjustment": old.adjustment}


def params_to_adopt(
    cast: Callable[[PyTree], PyTree], params: PyTree, opt_state: PyTree
) -> tuple[PyTree, PyTree | None]:
    """Returns parameters of another precision, cast, and their float32 weights.

    The weights have the extra bits that the old state stores, so that the cast does not lose these.
    They are None if the parameters keep their dtypes.
    """
    weights = full_weights(params, opt_state)
    plainly, from_weights = cast(params), cast(weights)
    same = jax.tree.map(lambda a, b: _dtype(a) == _dtype(b), plainly, params)
    chosen = jax.tree.map(lambda is_same, a, b: a if is_same else b, same, plainly, from_weights)
    return chosen, None if all(jax.tree.leaves(same)) else weights


def _dtype(x: Any) -> Any:
    return getattr(x, "dtype", None)


def _same_form(fresh: PyTree, old: PyTree) -> bool:
    if jax.tree.structure(fresh) != jax.tree.structure(old):
        return False
    pairs = zip(jax.tree.leaves(fresh), jax.tree.leaves(old), strict=True)
    return all(describe(a) == describe(b) for a, b in pairs)


def kind_of(state: LossScaleState) -> str:
    """Returns 'no', 'a static' or 'a dynamic', as a message says it before 'loss scale'."""
    if state.adjustment is None:
        return "no"
    return "a dynamic" if state.adjustment else "a static"


def _cast_like(fresh: PyTree, old: PyTree, where: str) -> PyTree:
    old = _rebuilt(fresh, old)
    if jax.tree.structure(fresh) != jax.tree.structure(old):
        fix = (
            "Adopt a state of the same optimizer (of an nnx.Optimizer: mpjax.nnx.adopt_state);",
            "or start again: tx.init(params).",
        )
        pair = (("the new optimizer's state", fresh), ("the old one's", old))
        raise ValueError(first_difference(where, *pair, fix))
    paths = leaf_paths(fresh)
    leaves = zip(paths, jax.tree.leaves(fresh), jax.tree.leaves(old), strict=True)
    cast = [_leaf_like(path, new, was, where) for path, new, was in leaves]
    return jax.tree.unflatten(jax.tree.structure(fresh), cast)


def _rebuilt(fresh: PyTree, old: PyTree) -> PyTree:
    """Returns a tree that was restored without a target in the containers of a fresh one."""
    if jax.tree.structure(fresh) == jax.tree.structure(old):
        return old
    by_path = dict(zip(leaf_paths(old), jax.tree.leaves(old), strict=True))
    paths = leaf_paths(fresh)
    if set(by_path) != set(paths):
        return old
    return jax.tree.unflatten(jax.tree.structure(fresh), [by_path[path] for path in paths])


def _leaf_like(path: str, fresh: Any, old: Any, where: str) -> Any:
    if not (is_array(fresh) and is_array(old)) or describe(fresh) == describe(old):
        return old
    is_floating = all(jnp.issubdtype(x.dtype, jnp.floating) for x in (fresh, old))
    if fresh.shape == old.shape and is_floating:
        return old.astype(fresh.dtype)
    got = f"{path!r} is {describe(old)}; the new optimizer keeps {describe(fresh)}."
    raise ValueError(message(where, got, "Adopt a state of the same optimizer and model."))
