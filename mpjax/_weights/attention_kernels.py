"""Finds kernels of Flax's attention in a tree, and the axes that their products add up over.

Such a kernel has an axis of heads and one of their sizes in place of one of channels: query, key
and value are [width, heads, size] and out is [heads, size, width], in linen and in NNX. By its
shape alone one may as well be a stack of matrices, whose first axis is that of the layers; a scale
along it would be right for one and wrong for the other. Four kernels side by side tell: in stacks
all first axes have one length; in attention a query's is the width, and that of out the heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_READS = ("query", "key", "value")
_OUT, _KERNEL = "out", "kernel"
_NDIM = 3  # of a kernel without stacks in front


def summed_axes(leaves: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns, by path, the axes that the products of attention's kernels add up over.

    Args:
      leaves: everything in a tree by its path.
    """
    axes: dict[str, tuple[int, ...]] = {}
    ending = f"{_OUT}/{_KERNEL}"
    for path in leaves:
        if path == ending or path.endswith(f"/{ending}"):
            axes |= _of_module(leaves, path.removesuffix(ending))
    return axes


def _of_module(leaves: Mapping[str, Any], module: str) -> dict[str, tuple[int, ...]]:
    """Returns the axes for one module; none if its kernels are not those of attention."""
    paths = {name: f"{module}{name}/{_KERNEL}" for name in (*_READS, _OUT)}
    shapes = {name: _shape(leaves.get(path)) for name, path in paths.items()}
    out = shapes[_OUT]
    if any(len(shape) != len(out) or len(shape) < _NDIM for shape in shapes.values()):
        return {}
    *stack, width, heads, size = shapes["query"]
    if width == heads or out[:-1] != (*stack, heads, size):
        return {}
    reads = (shapes[name] for name in _READS)
    if any(shape[:-_NDIM] != tuple(stack) or shape[-1] != size for shape in reads):
        return {}  # key and value may have fewer heads
    return {paths[name]: (-3,) for name in _READS} | {paths[_OUT]: (-3, -2)}


def _shape(leaf: Any) -> tuple[int, ...]:
    return tuple(getattr(leaf, "shape", ()))
