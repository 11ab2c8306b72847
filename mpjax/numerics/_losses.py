"""`lost_updates`: the share of updates that leave a weight as it is, once it is rounded."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from mpjax._base.errors import message
from mpjax._base.keywords import names_keywords
from mpjax._base.tree import first_difference, is_castable, leaf_paths
from mpjax._base.typing import Array, PyTree
from mpjax.numerics._program import check_alive

_WHERE = "numerics.lost_updates"


@names_keywords()
def lost_updates(params: PyTree, updates: PyTree) -> dict[str, Array]:
    """Returns, by leaf, the share of non-zero updates that change nothing.

    A bfloat16 weight of 1.0 does not move by less than 2⁻⁹ (upwards 2⁻⁸): `p + u`, rounded to the
    weight's dtype, is `p`. With float32 weights the share is near 0.

    Args:
      params: the parameters, in the dtype in which they are stored.
      updates: the updates that are added to them; a tree of the same structure.

    Returns:
      Path → f32[], from 0 to 1; 0 where all updates are zero. Leaves that are not floating are left
      out.

    Raises:
      ValueError: the trees differ, or the shapes of two leaves, or one was donated to a step.

    Dtypes:
      The sum is taken in float32 and rounded once, as `mpjax.optim.apply_updates` does.

    Transforms:
      jit, vmap, scan: return it among a step's metrics. Under `shard_map` a shard's own share.

    Example:
      >>> params = {"scale": jnp.ones(4, jnp.bfloat16)}
      >>> mpjax.numerics.lost_updates(params, {"scale": jnp.array([1e-3, 1e-2, 0.0, -1e-3])})
      {'scale': Array(0.6666667, dtype=float32)}

    References:
      Zamirai et al., Revisiting BFloat16 Training, 2020, https://arxiv.org/abs/2010.06192
    """
    if jax.tree.structure(params) != jax.tree.structure(updates):
        raise ValueError(first_difference(_WHERE, ("params", params), ("updates", updates)))
    check_alive((params, updates), ("params", "updates"), _WHERE, tracers=True)
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(updates), strict=True)
    rows = zip(leaf_paths(params), pairs, strict=True)
    return {path: _share(path, p, u) for path, (p, u) in rows if is_castable(p)}


def _share(path: str, p: Any, u: Any) -> Array:
    if jnp.shape(p) != jnp.shape(u):
        got = f"leaf {path!r} has shape {jnp.shape(p)}, its update {jnp.shape(u)}."
        raise ValueError(message(_WHERE, got, "Give the updates that are added to these params."))
    wide = jnp.float32 if jnp.dtype(p.dtype).itemsize < 4 else p.dtype
    asked = jnp.asarray(u).astype(wide)
    moved = (jnp.asarray(p).astype(wide) + asked).astype(p.dtype)
    lost = (asked != 0) & (moved == p)
    count = jnp.sum(asked != 0, dtype=jnp.int32)
    share = jnp.sum(lost, dtype=jnp.int32).astype(jnp.float32)
    return share / jnp.maximum(count, 1).astype(jnp.float32)
