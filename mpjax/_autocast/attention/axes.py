"""Labels axes, to follow the axes of the logits through transposes, reshapes and broadcasts.

The labels are the axes of the product that makes the logits. An axis of length 1 has no label,
since a reshape may add or drop it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from mpjax._autocast.attention.nodes import FOLLOWED, Name, ValueGraph
from mpjax._jaxpr.equation import Eqn

Labels = tuple[Any, ...]


def moved(labels: Labels, eqn: Eqn) -> Labels | None:
    """Returns the labels of the result of a move, from those of its operand; None for others."""
    (source, *_), (out,) = eqn.invars, eqn.outvars
    kind, params = eqn.primitive.name, eqn.params
    if source.aval.dtype != out.aval.dtype or kind not in FOLLOWED:
        return None
    if kind == "transpose":
        return tuple(labels[i] for i in params["permutation"])
    if kind == "broadcast_in_dim":
        return _broadcast(labels, params["broadcast_dimensions"], out.aval.shape)
    return reshaped(labels, source.aval.shape, out.aval.shape)


def _broadcast(labels: Labels, places: Sequence[int], shape: Sequence[int]) -> Labels | None:
    placed: list[Any] = [None] * len(shape)
    for label, place in zip(labels, places, strict=True):
        placed[int(place)] = label
    repeated = any(n != 1 and label is None for n, label in zip(shape, placed, strict=True))
    return None if repeated else tuple(placed)


def reshaped(labels: Labels, before: Sequence[int], after: Sequence[int]) -> Labels | None:
    """Returns the labels after a reshape that adds or drops axes of 1; None after any other."""
    longer = [label for label, n in zip(labels, before, strict=True) if n != 1]
    if [n for n in before if n != 1] != [n for n in after if n != 1]:
        return None
    rest = iter(longer)
    return tuple(None if n == 1 else next(rest) for n in after)


def source(graph: ValueGraph, name: Name, labels: Labels) -> tuple[Name, Labels]:
    """Returns the value that another is moved or broadcast from, and the labels of its axes."""
    while (node := graph.node(name)) is not None:
        before = _before(node.eqn, labels)
        if before is None:
            break
        name, labels = node.operands[0], before
    return name, labels


def _before(eqn: Eqn, labels: Labels) -> Labels | None:
    """Returns the labels of the operand of a move, from those of its result; None for others."""
    kind, params = eqn.primitive.name, eqn.params
    if kind not in FOLLOWED or eqn.invars[0].aval.dtype != eqn.outvars[0].aval.dtype:
        return None
    shape = eqn.invars[0].aval.shape
    if kind == "transpose":
        by_axis = dict(zip(params["permutation"], labels, strict=True))
        return tuple(by_axis[i] for i in range(len(labels)))
    if kind == "broadcast_in_dim":
        places = map(int, params["broadcast_dimensions"])
        return tuple(
            None if n == 1 else labels[place] for n, place in zip(shape, places, strict=True)
        )
    return reshaped(labels, eqn.outvars[0].aval.shape, shape)


def of_shape(labels: Labels, shape: Sequence[int]) -> Labels:
    """Returns the labels of an array that is broadcast to axes with some labels, by its shape."""
    last = labels[len(labels) - len(shape) :]
    return tuple(None if n == 1 else label for n, label in zip(shape, last, strict=True))


def in_order(
    x: Any, labels: Labels, groups: Sequence[Sequence[Any]], sizes: Mapping[Any, int]
) -> Any:
    """Returns an array with one axis for each group of labels, in the order of the groups.

    If the array has no label of a group, its axis for the group is 1; if it lacks some of them, it
    is broadcast along these.
    """
    wanted = [label for group in groups for label in group if label in labels]
    order = [labels.index(label) for label in wanted]
    x = x.transpose([*order, *(i for i in range(x.ndim) if i not in order)])  # others: of 1
    shared = [[label in labels for label in group] for group in groups]
    apart = [sizes[label] if label in labels else 1 for group in groups for label in group]
    whole = [
        sizes[label] if any(has) else 1
        for group, has in zip(groups, shared, strict=True)
        for label in group
    ]
    x = jnp.broadcast_to(x.reshape(apart), whole)
    lengths = iter(whole)
    return x.reshape([math.prod(next(lengths) for _ in group) for group in groups])
