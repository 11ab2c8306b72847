"""8-bit weights in the extra state: a loss function reads them as arrays, and hands them back."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from mpjax._base.dtypes import describe
from mpjax._base.errors import message
from mpjax._base.quantized_array import dequantize, is_quantized
from mpjax._base.tree import path_str
from mpjax._base.typing import PyTree


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Kept:
    """Stands in the results of a loss function for the 8-bit weight at a place in its state."""

    place: int


def places(extra_state: PyTree) -> list[int]:
    """Returns the places of 8-bit weights among the leaves of the extra state."""
    leaves = jax.tree.leaves(extra_state, is_leaf=is_quantized)
    return [i for i, x in enumerate(leaves) if is_quantized(x)]


def keeping(fun: Callable[..., Any], of: Sequence[int]) -> Callable[..., Any]:
    """Returns a loss function that notes which 8-bit weights come back as they were.

    Args:
      fun: `(params, extra_state, batch) -> ...`, which reads 8-bit weights as float32 arrays.
      of: their places among the leaves of the extra state.
    """

    @functools.wraps(fun, updated=())
    def wrapped(params: PyTree, extra_state: PyTree, batch: PyTree) -> Any:
        given = dequantize(extra_state)  # done already, under autocast
        leaves = jax.tree.leaves(given)
        known = {id(leaves[i]): _Kept(i) for i in of}
        return jax.tree.map(lambda x: known.get(id(x), x), fun(params, given, batch))

    return wrapped


def put_back(new: PyTree, old: PyTree) -> PyTree:
    """Returns what a loss function returned, with the 8-bit weights that it handed back.

    Args:
      new: the extra state, or what stands beside it.
      old: the extra state that the function was given.
    """
    weights = jax.tree.leaves(old, is_leaf=is_quantized)
    return jax.tree.map(
        lambda x: weights[x.place] if isinstance(x, _Kept) else x,
        new,
        is_leaf=lambda x: isinstance(x, _Kept),
    )


def check_kept(new: PyTree, old: PyTree) -> None:
    """Refuses extra state in which an array stands where an 8-bit weight was."""
    returned = dict(jax.tree_util.tree_leaves_with_path(new, is_leaf=is_quantized))
    for path, weight in jax.tree_util.tree_leaves_with_path(old, is_leaf=is_quantized):
        if is_quantized(weight) and not is_quantized(returned.get(path, weight)):
            got = f"{path_str(path)!r} was {weight!r}; the loss function returned "
            got += f"{describe(returned[path])}."
            fix = "8-bit weights cannot be trained: return them as they came."
            raise ValueError(message("make_train_step: the extra state", got, fix))
