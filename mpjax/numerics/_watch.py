"""`make_train_step(watch=)`: how weights and gradients stand to their dtype, now and then."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mpjax import _compat
from mpjax._errors import message
from mpjax._tree import is_array, is_overwritten, path_str
from mpjax._typing import Array, PyTree
from mpjax.numerics import _bits

STATISTICS = ("amax", "l2_norm", "dynamic_range", "underflows%", "overflows%")
"""Of each module: f32[] each, under Transformer Engine's names."""


def check_watch(watch: Any, where: str) -> int | None:
    """Returns every how many steps to look, None for never.

    Raises:
      ValueError: `watch` is no whole number of at least 1.
    """
    if watch is None or (isinstance(watch, int) and not isinstance(watch, bool) and watch >= 1):
        return watch
    got = f"must be a whole number of steps, at least 1; got {watch!r}."
    raise ValueError(message(where, got, "Type watch=100, or leave it out."))


def watched(
    every: int | None,
    step: Array,
    params: PyTree,
    grads: PyTree,
    loss_scale: Array,
    policy: Any,
) -> dict[str, Any]:
    """Returns {"watched": statistics by kind and module}; nothing where `every` is None.

    Args:
      every: in every how many steps they are computed; in the others they are NaN.
      step: i32[], steps taken so far.
      params: the parameters.
      grads: their gradients, scaled.
      loss_scale: f32[], what they are scaled with.
      policy: whose `compute_dtype` values are held against: weights as they are, gradients scaled.

    Returns:
      `is_new`, and for `weight` and `wgrad` a dict from module (the path of a leaf without its own
      name) to `STATISTICS`: `amax` the largest finite magnitude, `l2_norm` and `dynamic_range` (in
      bits), of unscaled values; `underflows%` and `overflows%` are the shares of what is not zero
      that the dtype would round to 0, or to inf.
    """
    if every is None:
        return {}
    dtypes = jax.eval_shape(_to_compute(policy), params)
    one = jnp.ones((), jnp.float32)
    scale = jnp.asarray(loss_scale, jnp.float32)
    groups = {
        "weight": (_by_module(params, params, dtypes), one),
        "wgrad": (_by_module(params, grads, dtypes), scale),
    }

    def measure() -> Any:
        return {k: {m: _measured(g, s) for m, g in by.items()} for k, (by, s) in groups.items()}

    def nothing() -> Any:
        return {k: {m: _unknown(g, s) for m, g in by.items()} for k, (by, s) in groups.items()}

    is_new = step % every == 0
    return {"watched": {"is_new": is_new} | lax.cond(is_new, measure, nothing)}


def _to_compute(policy: Any) -> Any:
    is_map = hasattr(policy, "rules")
    return lambda tree: policy.cast_to_compute(tree, **({"warn": False} if is_map else {}))


def _by_module(params: PyTree, values: PyTree, dtypes: PyTree) -> Mapping[str, list[Any]]:
    """Returns module → (value, dtype) of its floating leaves."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    rows = zip(leaves, jax.tree.leaves(values), jax.tree.leaves(dtypes), strict=True)
    found: dict[str, list[Any]] = {}
    for (path, leaf), value, typed in rows:
        if not is_array(leaf) or not jnp.issubdtype(leaf.dtype, jnp.floating):
            continue
        if leaf.size and not is_overwritten(path):
            name = path_str(path).removesuffix("/value")
            module = name.rpartition("/")[0] or name or "params"
            found.setdefault(module, []).append((value, jnp.dtype(typed.dtype)))
    return found


def _measured(group: list[Any], scale: Array) -> dict[str, Array]:
    each = [_read(value, dtype, scale) for value, dtype in group]
    largest, smallest, square, used, under, over = (
        jnp.stack(column) for column in zip(*each, strict=True)
    )
    amax, amin, count = jnp.max(largest), jnp.min(smallest), jnp.maximum(jnp.sum(used), 1)
    seen = amax > 0
    bits = jnp.log2(jnp.where(seen, amax, 1)) - jnp.log2(jnp.where(seen, amin, 1))
    share = 100 / count
    found = (amax / scale, jnp.sqrt(jnp.sum(square)), bits)
    return dict(
        zip(STATISTICS, (*found, jnp.sum(under) * share, jnp.sum(over) * share), strict=True)
    )


def _read(value: Any, dtype: Any, scale: Array) -> tuple[Array, ...]:
    """Returns largest, smallest, sum of squares, and how many: not zero, too small, too large.

    On bits, so that no compiler's excess precision and no flushing of subnormal numbers takes part.
    """
    x = value.astype(jnp.float32)
    bits = _bits.magnitude_bits(x)
    infinity = np.uint32(_bits.infinity_bits(jnp.float32))
    finite = bits < infinity
    not_zero = bits > 0
    zero_below, inf_above = _limits(dtype)
    plain = jnp.where(finite, x, 0) / scale
    columns = (
        (jnp.where(finite, bits, np.uint32(0)), np.uint32(0), lax.max),
        (jnp.where(not_zero, bits, infinity), infinity, lax.min),
        (jnp.square(plain), np.float32(0), lax.add),
        (not_zero.astype(jnp.uint32), np.uint32(0), lax.add),
        ((not_zero & (bits <= zero_below)).astype(jnp.uint32), np.uint32(0), lax.add),
        ((finite & (bits >= inf_above)).astype(jnp.uint32), np.uint32(0), lax.add),
    )
    operands, starts, joins = zip(*columns, strict=True)
    largest, smallest, square, *counts = lax.reduce(  # one pass, which keeps nothing
        operands,
        starts,
        lambda a, b: tuple(join(x, y) for join, x, y in zip(joins, a, b, strict=True)),
        tuple(range(x.ndim)),
    )
    ends = (lax.bitcast_convert_type(end, jnp.float32) for end in (largest, smallest))
    return (*ends, square, *(c.astype(jnp.float32) for c in counts))


def _limits(dtype: Any) -> tuple[np.uint32, np.uint32]:
    """Returns the float32 bits of the largest that rounds to 0, and the least that does to inf."""
    if dtype.itemsize >= 4:
        return np.uint32(0), np.uint32(_bits.infinity_bits(jnp.float32))
    info = jnp.finfo(dtype)
    half_of_least = np.float64(info.smallest_subnormal) / 2
    largest = np.float64(info.max)
    beyond = largest + 2.0 ** (np.floor(np.log2(largest)) - info.nmant - 1)
    ends = np.array([half_of_least, min(beyond, np.inf)]).astype(np.float32).view(np.uint32)
    return np.uint32(ends[0]), np.uint32(ends[1])


def _unknown(group: list[Any], scale: Array) -> dict[str, Array]:
    """Returns NaN for each statistic, typed as varying over shards as its values are."""
    axes: tuple[Any, ...] = ()
    for x in (scale, *(value for value, _ in group)):
        axes += tuple(a for a in sorted(getattr(jax.typeof(x), "vma", ())) if a not in axes)
    nan = jnp.full((), jnp.nan, jnp.float32)
    nan = _compat.to_varying(nan, axes) if axes else nan
    return dict.fromkeys(STATISTICS, nan)
