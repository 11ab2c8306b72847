"""Maps the axes of an author's arrays to those of a kernel, [batch, time, heads, size]."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mpjax._autocast.attention import axes, masks
from mpjax._autocast.attention.axes import Labels
from mpjax._autocast.attention.pattern import Match
from mpjax._jaxpr.equation import Eqn


@dataclass(frozen=True)
class Layout:
    """The labels of the axes of all operands, grouped by the kernel's axes."""

    query: Labels
    key: Labels
    value: Labels
    out: Labels
    is_key_first: bool  # whether the key is the first operand of the product
    batch: tuple[Any, ...]
    queries: tuple[Any, ...]
    keys: tuple[Any, ...]
    shared: tuple[Any, ...]  # heads of key and value
    group: tuple[Any, ...]  # heads of the query that read the same key
    size: tuple[Any, ...]
    values: tuple[Any, ...]  # axes of a value
    sizes: tuple[tuple[Any, int], ...]  # how long each axis is

    @functools.cached_property
    def lengths(self) -> dict[Any, int]:
        return dict(self.sizes)

    @property
    def heads(self) -> tuple[Any, ...]:
        return (*self.shared, *self.group)

    def operand(self, name: str, x: Any) -> Any:
        """Returns the query, the key or the value as a kernel reads it."""
        own = {
            "query": (self.queries, self.heads, self.size),
            "key": (self.keys, self.shared, self.size),
            "value": (self.keys, self.shared, self.values),
        }[name]
        return axes.in_order(x, getattr(self, name), (self.batch, *own), self.lengths)

    def like_logits(self, x: Any, labels: Labels) -> Any:
        """Returns an array as [batch, heads, queries, keys], 1 on axes that it lacks."""
        groups = (self.batch, self.heads, self.queries, self.keys)
        return axes.in_order(x, labels, groups, self.lengths)

    def result(self, x: Any, shape: Sequence[int]) -> Any:
        """Returns a kernel's result in the shape of the author's product of weights and value."""
        own = (*self.batch, *self.queries, *self.heads, *self.values)
        x = x.reshape([self.lengths[label] for label in own])
        order = [own.index(label) for label in self.out if label is not None]
        return x.transpose(order).reshape(shape)

    def count(self, labels: Sequence[Any]) -> int:
        """Returns the product of the lengths of some axes."""
        return functools.reduce(lambda n, label: n * self.lengths[label], labels, 1)


def of(first: Any, last: Any, match: Match) -> Layout | None:
    """Returns the layout of an attention; None if its products are not those of an attention.

    Args:
      first: the equation of the product of query and key.
      last: the equation of the product of weights and value.
      match: the attention as the pattern describes it.
    """
    keys, weights, weight_labels = match.keys, match.weights, match.weight_labels
    placed = masks.rows(match.logits.mask.bounds, keys)
    operands = _of_product(first)
    sizes = _sizes(first.outvars[0].aval.shape, range(first.outvars[0].aval.ndim))
    key_first = keys in operands[0]
    if keys is None or (keys not in operands[1] and not key_first):
        return None
    key, query = (operands[0], operands[1]) if key_first else (operands[1], operands[0])
    if keys in query:
        return None
    both = {x for x in key if x in query and x is not None}
    size = tuple(sorted((x for x in both if isinstance(x, tuple)), key=lambda x: x[1]))
    batch = tuple(sorted(x for x in both if not isinstance(x, tuple)))
    rows = tuple(x for x in query if x is not None and x not in both)
    if {x for x in key if x is not None} != {*both, keys}:
        return None
    value = _value(last, weights, weight_labels)
    if len(placed) > 1 or not placed <= set(rows):
        return None
    if value is None or not _multiplies(last, weights, weight_labels, keys, batch, rows):
        return None
    value_labels, out = value
    shapes = [v.aval.shape for v in (*first.invars, last.invars[1 - weights])]
    labels = [*operands, value_labels]
    for shape, of_shape in zip(shapes, labels, strict=True):
        sizes |= _sizes(shape, of_shape)
    queries = _queries(rows, next(iter(placed), None), sizes, sizes[keys])
    group = tuple(x for x in rows if x not in queries)
    shared = batch[-1:] if len(batch) > 1 or group else ()
    return Layout(
        query=query,
        key=key,
        value=value_labels,
        out=out,
        is_key_first=key_first,
        batch=batch[: len(batch) - len(shared)],
        queries=queries,
        keys=(keys,),
        shared=shared,
        group=group,
        size=size,
        values=tuple(x for x in value_labels if isinstance(x, tuple)),
        sizes=tuple(sizes.items()),
    )


def _sizes(shape: Sequence[int], labels: Any) -> dict[Any, int]:
    return {label: n for n, label in zip(shape, labels, strict=True) if label is not None}


def _of_product(eqn: Eqn) -> tuple[Labels, Labels]:
    """Returns the labels of both operands: an axis of the result, or ("size", i) if contracted."""
    contract, batch = eqn.params["dimension_numbers"]
    place = len(batch[0])
    both = []
    for side, v in enumerate(eqn.invars):
        labels: list[Any] = [None] * v.aval.ndim
        for i, axis in enumerate(batch[side]):
            labels[axis] = i
        for i, axis in enumerate(contract[side]):
            labels[axis] = ("size", i)
        for axis in range(v.aval.ndim):
            if axis not in (*batch[side], *contract[side]):
                labels[axis] = place
                place += 1
        both.append(tuple(None if n == 1 else x for n, x in zip(v.aval.shape, labels, strict=True)))
    return both[0], both[1]


def _value(eqn: Eqn, weights: int, labels: Labels) -> tuple[Labels, Labels] | None:
    """Returns the labels of the value and of the result of the product with weights."""
    contract, batch = eqn.params["dimension_numbers"]
    other = 1 - weights
    value = eqn.invars[other].aval
    value_labels: list[Any] = [None] * value.ndim
    for mine, theirs in ((contract[weights], contract[other]), (batch[weights], batch[other])):
        for a, b in zip(mine, theirs, strict=True):
            value_labels[b] = labels[a]
    taken = (*contract[other], *batch[other])
    for axis in range(value.ndim):
        if axis not in taken and value.shape[axis] != 1:
            value_labels[axis] = ("value", axis)
    sides = {weights: labels, other: value_labels}
    out = [labels[i] for i in batch[weights]]
    for side in (0, 1):
        mine = (*contract[side], *batch[side])
        out += [x for i, x in enumerate(sides[side]) if i not in mine]
    return tuple(value_labels), tuple(out)


def _multiplies(
    eqn: Eqn, weights: int, labels: Labels, keys: Any, batch: Sequence[Any], rows: Sequence[Any]
) -> bool:
    """Whether a product contracts the keys, and has the examples and heads as batch axes."""
    contract, shared = eqn.params["dimension_numbers"]
    summed = {labels[i] for i in contract[weights]} - {None}
    along = {labels[i] for i in shared[weights]} - {None}
    rest = set(labels) - {None} - summed - along
    return summed == {keys} and along == set(batch) and rest == set(rows)


def _queries(rows: Sequence[Any], row: Any, sizes: dict[Any, int], keys: int) -> tuple[Any, ...]:
    """Returns the axis of positions among the query's own axes; the others are heads.

    It is the one that a mask compares with keys, or else the last one (as long as the keys, if one
    is).
    """
    if row is not None:
        return (row,)
    alike = [x for x in rows if sizes[x] == keys]
    return tuple((alike or list(rows))[-1:])
