"""Micro-batches: computes a step over a batch in parts, one at a time in memory."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from mpjax._base import compat
from mpjax._base.dtypes import FLOAT32, FLOAT64, describe
from mpjax._base.errors import message
from mpjax._base.tree import is_array, is_overwritten, is_recorded, map_with_path, path_str, to_full
from mpjax._base.typing import Array, PyTree
from mpjax._scaling.skip import select_like
from mpjax._training.micro_axes import AXES, Axes, axes_of, repeated

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class MicroBatches:
    """The cut of a batch: the number of parts, and the axis of each leaf."""

    count: int = 1
    axes: Axes = AXES

    def first(self, batch: PyTree) -> PyTree:
        """Returns the first part of a batch."""
        if self.count == 1:
            return batch
        split, whole, merge = _parted(batch, self)
        return merge([x[0] for x in split], whole)


def gradients(
    differentiate: Callable[..., Any],
    params: PyTree,
    extra_state: PyTree,
    batch: PyTree,
    parts: MicroBatches,
) -> tuple[Any, Any, PyTree, PyTree, PyTree]:
    """Returns the results of `over_parts`, also for a batch of one part."""
    if parts.count > 1:
        return over_parts(differentiate, params, extra_state, batch, parts)
    (loss, (weight, extra_state, aux)), grads = differentiate(params, extra_state, batch)
    loss = wide(loss)
    if weight is not None:
        loss, grads = weighed(weight, loss), weighed(weight, grads)
    return loss, weight, extra_state, aux, grads


def over_parts(
    differentiate: Callable[..., Any],
    params: PyTree,
    extra_state: PyTree,
    batch: PyTree,
    parts: MicroBatches,
) -> tuple[Any, Any, PyTree, PyTree, PyTree]:
    """Returns the mean loss, the weight, the last extra state, aux stacked, and mean gradients.

    Args:
      differentiate: `(params, extra_state, part) -> ((loss, (weight, extra_state, aux)), grads)`;
        the weight of a micro-batch in the mean is None where all weigh the same.
      params: the loss is differentiated by them.
      extra_state: handed from one micro-batch to the next.
      batch: the batch to cut.
      parts: the number of micro-batches, and the axes of the cut.

    Returns:
      With weights, the first and the last are sums of what each micro-batch adds, its weight
      times its mean, and the weight is the sum of theirs.
    """
    split, whole, merge = _parted(batch, parts)

    def body(carry: Any, part: list[Array]) -> Any:
        old, total = carry
        part = merge(part, whole)
        (loss, (weight, new, aux)), grads = differentiate(params, old, part)
        loss = wide(loss)
        counts = jnp.array(True)
        if weight is not None:
            counts = weight != 0
            loss, grads = weighed(weight, loss), weighed(weight, grads)
        total = _accumulated(total, grads, counts)
        # A micro-batch of weight 0 leaves no trace: its mean, of no examples, may be NaN.
        return (select_like(counts, new, old), total), (loss, weight, aux)

    carry = (extra_state, _nothing(params))
    (extra_state, total), (losses, weights, aux) = jax.lax.scan(body, carry, split)
    if weights is not None:
        return jnp.sum(losses), jnp.sum(weights), extra_state, aux, total
    grads = map_with_path(lambda _, g: g / parts.count, total)
    return jnp.mean(losses), None, extra_state, aux, grads


def wide(loss: Array) -> Array:
    """Returns a loss in float32, or as it is in float64: what float64 holds is not inf."""
    return loss if loss.dtype == FLOAT64 else loss.astype(FLOAT32)


def weighed(weight: Array, tree: T) -> T:
    """Returns `tree` times a weight; 0 for a weight of 0, also of NaN, the mean of no examples."""
    return map_with_path(lambda _, x: jnp.where(weight != 0, weight * x, 0), tree)


def divided(weight: Array, tree: T) -> T:
    """Returns weighed sums as means; NaN for a weight of 0, so that the step is skipped."""
    return map_with_path(lambda _, x: x / weight, tree)


def _parted(batch: PyTree, parts: MicroBatches) -> tuple[list[Array], list[Any], Any]:
    """Returns the leaves that are split, those that stay whole, and how to put them together."""
    axes = axes_of(batch, parts.axes, parts.count)
    leaves, structure = jax.tree.flatten_with_path(batch)
    split = [
        _split(path, jnp.asarray(x), axis, parts.count)
        for (path, x), axis in zip(leaves, axes, strict=True)
        if axis is not None
    ]
    whole = [x for (_, x), axis in zip(leaves, axes, strict=True) if axis is None]

    def merge(part: list[Array], rest: list[Any]) -> PyTree:
        mine, others = iter(part), iter(rest)
        return structure.unflatten([next(others if axis is None else mine) for axis in axes])

    return split, whole, merge


def _split(path: Any, x: Array, axis: int, count: int) -> Array:
    """Returns a batch leaf with a first axis of `count` micro-batches."""
    if x.ndim == 0:
        return repeated(x, count)
    shape = (*x.shape[:axis], count, x.shape[axis] // count, *x.shape[axis + 1 :])
    placed = compat.partitions(jax.typeof(x))
    if all(names is None for names in placed):
        return jnp.moveaxis(x.reshape(shape), axis, 0)
    mesh = jax.typeof(x).sharding.mesh
    devices = math.prod(mesh.shape[name] for name in compat.axis_names(placed[axis]))
    if shape[axis + 1] % devices:
        got = f"{describe(x)} in {count} micro-batches has {shape[axis + 1]} rows in each, "
        got += f"which do not split over the {devices} devices of {placed[axis]!r}."
        fix = f"Make axis {axis} a multiple of accumulate= times {devices}."
        raise ValueError(message(f"batch leaf {path_str(path)!r}", got, fix))
    spec = jax.sharding.PartitionSpec(*placed[:axis], None, *placed[axis:])
    sharding = jax.sharding.NamedSharding(mesh, spec)
    return jnp.moveaxis(jnp.reshape(x, shape, out_sharding=sharding), axis, 0)


def _nothing(params: PyTree) -> PyTree:
    """Returns the sums before the first micro-batch: zeros; overwritten leaves as they are."""
    zeros = map_with_path(_no_gradient, params)
    return jax.tree_util.tree_map_with_path(
        lambda path, x: jnp.zeros_like(x) if is_recorded(path) else x, zeros
    )


def _no_gradient(_: Any, p: Any) -> Any:
    """Returns zeros in the dtype in which gradients come back."""
    return jnp.zeros_like(to_full(p)) if is_array(p) else p


def _accumulated(total: PyTree, grads: PyTree, counts: Array) -> PyTree:
    """Returns the sums; of an overwritten leaf the latest value, of a recorded one the largest."""

    def add(path: Any, a: Any, b: Any) -> Any:
        if is_recorded(path):
            return jnp.where(counts, jnp.maximum(a, b), a)
        return jnp.where(counts, b, a) if is_overwritten(path) else a + b

    return jax.tree_util.tree_map_with_path(add, total, grads)
