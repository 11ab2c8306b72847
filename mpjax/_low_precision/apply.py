"""Adds updates to parameters; reads the extra bits of parameters that a state stores."""

from typing import Any

import jax
import jax.numpy as jnp

from mpjax._base.donated import refuse_donated
from mpjax._base.dtypes import FLOAT32
from mpjax._base.errors import message
from mpjax._base.keywords import names_keywords
from mpjax._base.tree import is_array, is_overwritten, to_full
from mpjax._base.typing import Array, KeyPath, PyTree
from mpjax._low_precision.kahan import KahanState
from mpjax._low_precision.master import MasterWeightsState, SplitWeightsState, joined
from mpjax._low_precision.owner import is_narrow_leaf, owners
from mpjax._low_precision.rounding import nearest
from mpjax._scaling.transformation import refuse_state

KEEPING = (MasterWeightsState, SplitWeightsState, KahanState)
"""States that hold bits of the parameters themselves."""
OTHER_PATHS = (
    "the state stores the parameters under other paths, as inside optax.flatten.",
    "Put the wrapper outside: mpjax.optim.with_master_weights(optax.flatten(tx)).",
)


@names_keywords()
def apply_updates(params: PyTree, updates: PyTree, opt_state: PyTree = None) -> PyTree:
    """Returns `params + updates`, each leaf in its parameter's dtype.

    As `optax.apply_updates`, but leaves of Flax's `_overwrite_with_gradient` collection (float8
    scales and histories) are replaced by their update, which is their next value, and integers and
    PRNG keys, which have no gradient (`allow_int`), stay.

    Args:
      params: the parameters.
      updates: the updates that an optimizer's `update` returned.
      opt_state: the state that it returned, or None. With float32 master weights in it a
        parameter becomes its rounded copy also where no float32 update leads there: where their
        difference is beyond float32, or the parameter was changed by other means and is 2¹⁶ times
        as large as the copy (2¹³ times in float16). An update of zero leaves it as it is.

    Example:
      >>> mpjax.optim.apply_updates({"w": jnp.bfloat16(1)}, {"w": jnp.float32(0.5)})
      {'w': Array(1.5, dtype=bfloat16)}
    """
    refuse_state(params, "apply_updates(params, updates, opt_state)")
    known = _kept(opt_state)

    def apply(path: KeyPath, p: Any, u: Any) -> Any:
        if is_overwritten(path):
            return u
        if u.dtype == jax.dtypes.float0:  # the gradient of integers and keys, which have none
            return p
        with jax.numpy_dtype_promotion("standard"):  # a bfloat16 parameter, a float32 update
            wide = jnp.promote_types(p.dtype, u.dtype)
        moved = (p.astype(wide) + u.astype(wide)).astype(p.dtype)
        kept = known.get(path)
        if kept is None or kept[0] is not MasterWeightsState or not is_narrow_leaf(path, p):
            return moved
        target = nearest(kept[1], p.dtype).astype(p.dtype)
        return jnp.where((moved == target) | (u == 0), moved, target)  # a skipped step is none

    return jax.tree_util.tree_map_with_path(apply, params, updates)


@names_keywords()
def full_params(params: PyTree, opt_state: PyTree) -> PyTree:
    """Returns the parameters in float32, with the extra bits that an optimizer's state stores.

    Use it to evaluate, to export, or to continue in float32 (`adopt_state`). With
    `with_master_weights` it returns the weights that are trained; with `with_kahan` the parameters
    plus their rounding errors; otherwise the parameters as they are.

    Args:
      params: the parameters.
      opt_state: the optimizer state of these parameters, with any wrapper.

    Raises:
      TypeError: the state was given as the parameters.
      ValueError: the state has been donated to a step.

    Dtypes:
      float16 and bfloat16 leaves become float32, the others stay.

    Transforms:
      jit, vmap, shardings.

    Example:
      >>> tx = mpjax.optim.with_master_weights(optax.sgd(1.0), bits=24)
      >>> params = jnp.bfloat16(1)
      >>> updates, state = tx.update(jnp.float32(-(2**-12)), tx.init(params), params)
      >>> params = optax.apply_updates(params, updates)
      >>> params, mpjax.optim.full_params(params, state)
      (Array(1, dtype=bfloat16), Array(1.0002441, dtype=float32))
    """
    refuse_state(params, "full_params(params, opt_state)")
    refuse_donated((params, opt_state), "full_params")
    known = _kept(opt_state)
    leaves = jax.tree_util.tree_leaves_with_path(params)
    narrow = {path for path, p in leaves if is_array(p) and is_narrow_leaf(path, p)}
    if known and narrow and narrow.isdisjoint(known):
        raise ValueError(message("full_params", *OTHER_PATHS))

    def full(path: KeyPath, p: Any) -> Any:
        if not (is_array(p) and is_narrow_leaf(path, p)):
            return p
        if path not in known:
            return to_full(p)
        kind, kept = known[path]
        if kind is MasterWeightsState:
            return kept
        return joined(p, kept) if kind is SplitWeightsState else to_full(p) + kept.astype(FLOAT32)

    return jax.tree_util.tree_map_with_path(full, params)


def _kept(opt_state: PyTree) -> dict[KeyPath, tuple[type[Any], Array]]:
    """Returns, by a parameter's path, the array kept for it, with the type of the state."""
    by_path: dict[KeyPath, tuple[type[Any], Array]] = {}
    for _, state in owners(opt_state):
        if isinstance(state, KEEPING):
            for path, leaf in jax.tree_util.tree_leaves_with_path(state[0]):
                by_path[path] = (type(state), leaf)
    return by_path
