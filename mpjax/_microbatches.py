"""Micro-batches: a step over a batch in parts, of which one at a time is in memory."""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from mpjax import _compat
from mpjax._dtypes import FLOAT32, describe
from mpjax._errors import message
from mpjax._skip import select_like
from mpjax._tree import is_array, is_overwritten, is_recorded, map_with_path, path_str, to_full
from mpjax._typing import Array, PyTree

T = TypeVar("T")


def over_parts(
    differentiate: Callable[..., Any],
    params: PyTree,
    extra_state: PyTree,
    batch: PyTree,
    count: int,
) -> tuple[Any, Any, PyTree, PyTree, PyTree]:
    """Returns the mean loss, the weight, the last extra state, aux stacked, and mean gradients.

    Args:
      differentiate: `(params, extra_state, part) -> ((loss, (weight, extra_state, aux)), grads)`;
        the weight of a micro-batch in the mean is None where all weigh the same.
      params: what is differentiated.
      extra_state: handed from one micro-batch to the next.
      batch: leaves are split along their first axis.
      count: of micro-batches.

    Returns:
      With weights, the first and the last are sums of what each micro-batch adds, its weight
      times its mean, and the weight is the sum of theirs.
    """
    parts = jax.tree_util.tree_map_with_path(lambda path, x: _split(path, x, count), batch)

    def body(carry: Any, part: PyTree) -> Any:
        old, total = carry
        (loss, (weight, new, aux)), grads = differentiate(params, old, part)
        loss = loss.astype(FLOAT32)
        counts = jnp.array(True)
        if weight is not None:
            counts = weight != 0
            loss, grads = weighed(weight, loss), weighed(weight, grads)
        total = _accumulated(total, grads, counts)
        # Of a micro-batch without weight, which may hold NaN, nothing is kept.
        return (select_like(counts, new, old), total), (loss, weight, aux)

    carry = (extra_state, _nothing(params))
    (extra_state, total), (losses, weights, aux) = jax.lax.scan(body, carry, parts)
    if weights is not None:
        return jnp.sum(losses), jnp.sum(weights), extra_state, aux, total
    grads = map_with_path(lambda _, g: g / count, total)
    return jnp.mean(losses), None, extra_state, aux, grads


def weighed(weight: Array, tree: T) -> T:
    """Returns `tree` times a weight, and nothing where it weighs nothing: a mean of none is NaN."""
    return map_with_path(lambda _, x: jnp.where(weight != 0, weight * x, 0), tree)


def divided(weight: Array, tree: T) -> T:
    """Returns sums of what was weighed as means; NaN where nothing was, so that it is skipped."""
    return map_with_path(lambda _, x: x / weight, tree)


def _split(path: Any, x: Any, count: int) -> Any:
    """Returns a batch leaf with a first axis of `count` micro-batches."""
    x = jnp.asarray(x)
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) and x.ndim == 0:
        return jax.vmap(jax.random.fold_in, (None, 0))(x, jnp.arange(count))
    if x.ndim == 0:
        return jnp.broadcast_to(x, (count,))
    if x.shape[0] % count:
        got = f"{describe(x)} does not split into {count} micro-batches."
        fix = "Make the first axis a multiple of accumulate=, or drop the last, short batch."
        raise ValueError(message(f"batch leaf {path_str(path)!r}", got, fix))
    return _reshaped(path, x, (count, x.shape[0] // count, *x.shape[1:]))


def _reshaped(path: Any, x: Any, shape: tuple[int, ...]) -> Any:
    """Returns a batch leaf as micro-batches, each placed as the whole where types say where."""
    axes = _compat.partitions(jax.typeof(x))
    if all(names is None for names in axes):
        return x.reshape(shape)
    sizes = jax.typeof(x).sharding.mesh.shape
    devices = math.prod(sizes[name] for name in _compat.axis_names(axes[0]))
    if shape[1] % devices:
        got = f"{describe(x)} in {shape[0]} micro-batches has {shape[1]} rows in each, "
        got += f"which do not split over the {devices} devices of {axes[0]!r}."
        fix = f"Make the first axis a multiple of accumulate= times {devices}."
        raise ValueError(message(f"batch leaf {path_str(path)!r}", got, fix))
    return jnp.reshape(x, shape, out_sharding=jax.sharding.PartitionSpec(None, *axes))


def _nothing(params: PyTree) -> PyTree:
    """Returns what has been added up before the first micro-batch."""
    zeros = map_with_path(_no_gradient, params)
    return jax.tree_util.tree_map_with_path(
        lambda path, x: jnp.zeros_like(x) if is_recorded(path) else x, zeros
    )


def _no_gradient(_: Any, p: Any) -> Any:
    """Returns the gradient of nothing: zeros in the dtype in which gradients come back."""
    return jnp.zeros_like(to_full(p)) if is_array(p) else p


def _accumulated(total: PyTree, grads: PyTree, counts: Array) -> PyTree:
    """Returns the sums; an overwritten leaf is its latest value, what was seen the largest."""

    def add(path: Any, a: Any, b: Any) -> Any:
        if is_recorded(path):
            return jnp.where(counts, jnp.maximum(a, b), a)
        return jnp.where(counts, b, a) if is_overwritten(path) else a + b

    return jax.tree_util.tree_map_with_path(add, total, grads)
