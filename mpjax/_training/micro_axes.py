"""Finds the axis along which each leaf of a batch is cut into micro-batches; checks the batch."""

import collections
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._base.dtypes import describe
from mpjax._base.errors import message
from mpjax._base.tree import leaf_paths, path_str
from mpjax._base.typing import Array, PyTree

Axes = Any
"""An axis, None for leaves that stay whole, or a tree of both, a prefix of the batch's."""
AXES: Axes = 0

_WHERE = "make_train_step(accumulate_axes)"
_ALLOWED = (
    "Allowed: an axis, None for what every micro-batch gets whole, or a tree of them that is "
    "a prefix of the batch's, as jax.vmap's in_axes."
)


def check_micro_axes(axes: Axes) -> None:
    """Raises TypeError where a leaf of `axes` is neither a whole number nor None."""
    for axis in jax.tree.leaves(axes):
        if isinstance(axis, bool) or not isinstance(axis, int):
            got = f"got {axis!r} as an axis."
            fix = "Type, for example, accumulate_axes={'x': 0, 'class_weights': None}."
            raise TypeError(message(_WHERE, got, _ALLOWED, fix))


def axes_of(batch: PyTree, axes: Axes, count: int) -> list[int | None]:
    """Returns the axis of each leaf of a batch, None where it stays whole.

    A scalar is not cut: its axis is 0 where it is repeated or, a PRNG key, folded.

    Raises:
      ValueError: the leaves do not share the size of their axes, `count` does not divide it, a
        leaf has no such axis, `axes` is no prefix of the batch, or an array with a shape of its
        own, as a sparse one, would be cut through its parts.
    """
    leaves = jax.tree.leaves(batch)
    paths = leaf_paths(batch)
    given = _broadcast(axes, batch)
    leaf_axes = [_axis(*row) for row in zip(paths, leaves, given, strict=True)]
    _refuse_held_shapes(batch, leaf_axes, count)
    sizes = {
        path: np.shape(x)[axis]
        for path, x, axis in zip(paths, leaves, leaf_axes, strict=True)
        if axis is not None and np.ndim(x)
    }
    if len(set(sizes.values())) > 1:
        raise ValueError(_unequal(batch, dict(zip(paths, leaves, strict=True)), sizes, axes, count))
    for path, x in zip(paths, leaves, strict=True):
        if path in sizes and sizes[path] % count:
            got = f"{describe(x)} does not split into {count} micro-batches."
            fix = "Make the first axis a multiple of accumulate=, or drop the last, short batch."
            fix += " What is no batch: accumulate_axes=, with None for it."
            raise ValueError(message(f"batch leaf {path!r}", got, fix))
    return leaf_axes


def repeated(x: Array, count: int) -> Array:
    """Returns a scalar for each micro-batch; a PRNG key is folded, so that each draws its own."""
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.vmap(jax.random.fold_in, (None, 0))(x, jnp.arange(count))
    return jnp.broadcast_to(x, (count,))


def _broadcast(axes: Axes, batch: PyTree) -> list[int | None]:
    try:
        whole = jax.tree.broadcast(axes, batch, is_leaf=_is_none)
    except ValueError as error:
        got = f"it is no prefix of the batch's tree; got {axes!r}."
        why = str(error).splitlines()[0]
        zeros = jax.tree.map(lambda _: 0, batch)
        fix = f"Type accumulate_axes={_entries(zeros)!r}, with None for what is whole."
        raise ValueError(message(_WHERE, got, why, _ALLOWED, fix)) from None
    # A None of the batch is no leaf of it.
    pairs = zip(jax.tree.leaves(whole, is_leaf=_is_none), _leaves(batch), strict=True)
    return [axis for axis, x in pairs if x is not None]


def _leaves(tree: PyTree) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=_is_none)


def _is_none(x: Any) -> bool:
    return x is None


def _axis(path: str, x: Any, axis: int | None) -> int | None:
    """Returns the axis counted from the front."""
    if axis is None or (np.ndim(x) == 0 and axis in (0, -1)):
        return None if axis is None else 0
    if not -np.ndim(x) <= axis < np.ndim(x):
        got = f"{describe(x)} has no axis {axis}."
        raise ValueError(message(f"{_WHERE}: batch leaf {path!r}", got, _ALLOWED))
    return axis % np.ndim(x)


def _refuse_held_shapes(batch: PyTree, axes: list[int | None], count: int) -> None:
    """Refuses to cut a container whose shape does not follow its arrays: a BCOO's is fixed."""
    rest = iter(axes)
    for path, node in jax.tree.flatten_with_path(batch, is_leaf=_is_container_of_one)[0]:
        leaves, structure = jax.tree.flatten(node)
        mine = [next(rest) for _ in leaves]
        if not _is_container_of_one(node) or all(axis is None for axis in mine):
            continue
        parts = [_part(x, axis, count) for x, axis in zip(leaves, mine, strict=True)]
        if structure.unflatten(parts).shape == node.shape:
            kind = type(node).__name__
            got = f"is a {kind} of shape {node.shape}, which its parts would keep."
            fix = "Give a dense array, or accumulate_axes=, with None for what every micro-batch "
            fix += "gets whole."
            leaf = f"batch leaf {path_str(path)!r}" if path else "the batch"
            raise ValueError(message(f"make_train_step(accumulate): {leaf}", got, fix))


def _is_container_of_one(x: Any) -> bool:
    """Whether a node of a tree stands for one array, as a sparse one does, and holds others."""
    is_one = isinstance(getattr(x, "shape", None), tuple) and hasattr(x, "dtype")
    return is_one and jax.tree.structure(x) != _LEAF


def _part(x: Any, axis: int | None, count: int) -> Any:
    """Returns the form of one of `count` parts of a leaf."""
    shape = list(np.shape(x))
    if axis is not None and shape:
        shape[axis] //= count
    return jax.ShapeDtypeStruct(tuple(shape), jnp.result_type(x))


_LEAF = jax.tree.structure(0)


def _unequal(
    batch: PyTree, leaves: dict[str, Any], sizes: dict[str, int], axes: Axes, count: int
) -> str:
    """Returns the error text for leaves of different sizes; the batch's own size is a guess."""
    usual = _guess(batch, leaves, sizes, count)
    most = next(path for path, size in sizes.items() if size == usual)
    other = next(path for path, size in sizes.items() if size != usual)
    shown = f"{describe(leaves[other])}, of which {sizes[other]} would be split; {most!r}, "
    shown += f"{describe(leaves[most])}, has {usual}."
    allowed = "Allowed: leaves that share the size of the axis that is split; scalars, which are "
    allowed += "repeated, and a scalar PRNG key, which is folded."
    whole = {path for path, size in sizes.items() if size != usual}
    fix = f"Type accumulate_axes={_shown(batch, whole)}: None for what every micro-batch gets "
    fix += "whole (class weights, another network); or put it into the extra state."
    if jnp.result_type(leaves[other]) == jnp.uint32 and np.shape(leaves[other]) == (2,):
        fix = "A PRNG key? Type jax.random.key(0) in place of jax.random.PRNGKey(0): it is folded."
    elif axes != AXES:
        fix = "Give it the axis of the batch, or None for what every micro-batch gets whole."
    return message(
        f"make_train_step(accumulate): batch leaf {other!r}", f"is {shown}", allowed, fix
    )


def _guess(batch: PyTree, leaves: dict[str, Any], sizes: dict[str, int], count: int) -> int:
    """Returns the size that is most probably the batch's.

    It is the size of the most entries of the batch (an entry counts if its leaves have one size, as
    a second network's parameters do not). Of equally many, a size that can be split wins, then
    that of the leaf with the most axes: class weights have one.
    """
    keys = [path[:1] for path, _ in jax.tree_util.tree_leaves_with_path(batch)]
    of_entry: dict[Any, set[int]] = {}
    for key, path in zip(keys, leaves, strict=True):
        of_entry.setdefault(key, set()).update({sizes[path]} if path in sizes else ())
    uniform = collections.Counter(size for (size,) in (s for s in of_entry.values() if len(s) == 1))

    def rank(size: int) -> tuple[int, bool, int, int]:
        axes = max(np.ndim(leaves[path]) for path in sizes if sizes[path] == size)
        return uniform[size], size % count == 0, axes, size

    return max(sizes.values(), key=rank)


def _shown(batch: PyTree, whole: Any) -> str:
    """Returns the axes to type: 0, and None for the leaves whose paths are in `whole`."""
    structure = jax.tree.structure(batch)
    axes = structure.unflatten([None if path in whole else 0 for path in leaf_paths(batch)])
    return repr(_shortened(axes))


def _shortened(axes: Any) -> Any:
    """Returns a tree of axes as a prefix: a subtree of equal leaves is one."""
    leaves = _leaves(axes)
    return leaves[0] if len(set(leaves)) == 1 else _entries(axes)


def _entries(axes: Any) -> Any:
    if isinstance(axes, dict):
        return {key: _shortened(value) for key, value in axes.items()}
    if type(axes) in (tuple, list):
        return type(axes)(map(_shortened, axes))
    return axes
