"""Micro-batches: a step over a batch in parts, of which one at a time is in memory."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mpjax._dtypes import FLOAT32, describe
from mpjax._errors import message
from mpjax._skip import select_like
from mpjax._tree import is_array, is_overwritten, map_with_path, path_str, to_full
from mpjax._typing import PyTree


def over_parts(
    differentiate: Callable[..., Any],
    params: PyTree,
    extra_state: PyTree,
    batch: PyTree,
    count: int,
) -> tuple[Any, PyTree, PyTree, PyTree]:
    """Returns the mean loss, the last extra state, aux stacked, and the mean gradients.

    Args:
      differentiate: `(params, extra_state, part) -> ((loss, (extra_state, aux)), grads)`.
      params: what is differentiated.
      extra_state: handed from one micro-batch to the next.
      batch: leaves are split along their first axis.
      count: of micro-batches.
    """
    parts = jax.tree_util.tree_map_with_path(lambda path, x: _split(path, x, count), batch)

    def body(carry: Any, part: PyTree) -> Any:
        extra_state, total = carry
        (loss, (new_extra, aux)), grads = differentiate(params, extra_state, part)
        total = _accumulated(total, grads)
        return (select_like(jnp.array(True), new_extra, extra_state), total), (loss, aux)

    carry = (extra_state, map_with_path(_no_gradient, params))
    (extra_state, total), (losses, aux) = jax.lax.scan(body, carry, parts)
    grads = map_with_path(lambda _, g: g / count, total)
    return jnp.mean(losses.astype(FLOAT32)), extra_state, aux, grads


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
    return x.reshape(count, x.shape[0] // count, *x.shape[1:])


def _no_gradient(_: Any, p: Any) -> Any:
    """Returns the gradient of nothing: zeros in the dtype in which gradients come back."""
    return jnp.zeros_like(to_full(p)) if is_array(p) else p


def _accumulated(total: PyTree, grads: PyTree) -> PyTree:
    """Returns the sums; an overwritten leaf is its latest value, never a sum."""

    def add(path: Any, a: Any, b: Any) -> Any:
        return b if is_overwritten(path) else a + b

    return jax.tree_util.tree_map_with_path(add, total, grads)
