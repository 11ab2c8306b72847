"""Reads a mask from the equations that make it: inequalities of positions, and arrays.

Comparisons of positions become inequalities between axes, `row - column + 0 >= 0` for a causal
mask, so that no array of the size queries × keys is evaluated. Any other part of a mask is an
array, in the shape before its broadcast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._autocast.attention import axes
from mpjax._autocast.attention.nodes import FOLLOWED, Name, Node, ValueGraph
from mpjax._autocast.known import traits
from mpjax._base import compat

Affine = tuple[tuple[tuple[Any, int], ...], int]
"""A sum of positions along labelled axes, each times a number, and of a number."""


@dataclass(frozen=True)
class Mask:
    """The conditions under which a query reads a key; all must hold."""

    bounds: frozenset[Affine] = frozenset()  # each at least 0
    arrays: tuple[tuple[Name, axes.Labels, bool], ...] = field(default=())
    """Boolean arrays, the labels of their axes, and whether True (else False) means: key read."""

    def __and__(self, other: Mask) -> Mask:
        return Mask(self.bounds | other.bounds, (*self.arrays, *other.arrays))


ALL = Mask()
_MOST = 100  # operations of a mask that are looked at; a longer one is an array


class MaskReader:
    """Reads masks from a graph; `known` tells the values that exist when an attention runs."""

    def __init__(self, graph: ValueGraph, known: Callable[[Name], bool]) -> None:
        self._graph = graph
        self._known = known
        self._left = _MOST

    def mask(self, name: Name, labels: axes.Labels, *, positive: bool = True) -> Mask | None:
        """Returns the mask of a boolean, or of a number that is 0 for False; None if unknown."""
        opened = self._opened(name, labels, positive=positive)
        if opened is not None:
            return opened
        if not self._known(name) or self._graph.aval(name).dtype != np.bool_:
            return None
        return Mask(arrays=((name, labels, positive),))

    def _opened(self, name: Name, labels: axes.Labels, *, positive: bool) -> Mask | None:
        if compat.is_literal(name):
            return Mask() if bool(name.val) is positive else None
        node = self._graph.node(name)
        self._left -= 1
        if node is None or not node.operands or self._left < 0:
            return None
        first = node.operands[0]
        if node.kind in _COMPARED and node.eqn.invars[0].aval.dtype != np.bool_:
            return self._compared(node, labels, positive=positive)
        if node.kind == "convert_element_type":
            return self.mask(first, labels, positive=positive)
        if node.kind == "not" and node.aval.dtype == np.bool_:
            return self.mask(first, labels, positive=not positive)
        joins = ("and", "mul") if positive else ("or",)
        if node.kind in joins and _is_truth(self._graph, node):
            both = [self._of_operand(node, i, labels, positive=positive) for i in (0, 1)]
            return both[0] & both[1] if both[0] is not None and both[1] is not None else None
        if node.kind == "select_n" and len(node.operands) == 3:
            return self._selected(node, labels, positive=positive)
        if node.kind in ("slice", "dynamic_slice"):
            return None
        before, of = axes.source(self._graph, name, labels)
        return None if before is name else self.mask(before, of, positive=positive)

    def _of_operand(
        self, node: Node, place: int, labels: axes.Labels, *, positive: bool
    ) -> Mask | None:
        shape = self._graph.aval(node.operands[place]).shape
        mine = axes.of_shape(labels, shape)
        return self.mask(node.operands[place], mine, positive=positive)

    def _selected(self, node: Node, labels: axes.Labels, *, positive: bool) -> Mask | None:
        """Returns the mask of `where(a, b, False)`, which is `a & b`; None for other choices."""
        which, no, yes = node.operands
        if self._graph.aval(which).shape != node.aval.shape or not positive:
            return None
        if self._graph.number(no) != 0:
            return None
        first = self.mask(which, labels)
        number = self._graph.number(yes)
        second = Mask() if number not in (None, 0) else self.mask(yes, labels)
        return None if first is None or second is None else first & second

    def _compared(self, node: Node, labels: axes.Labels, *, positive: bool) -> Mask | None:
        kind = node.kind
        if kind in ("ne", "eq") and self._graph.number(node.operands[1]) == 0:
            return self._of_operand(node, 0, labels, positive=positive is (kind == "ne"))
        a, b = (self._affine(x, labels) for x in node.operands)
        if a is None or b is None or kind in ("eq", "ne"):
            return None
        kind = kind.removesuffix("_to")
        kind = kind if positive else {"ge": "lt", "lt": "ge", "gt": "le", "le": "gt"}[kind]
        if kind in ("le", "lt"):
            a, b = b, a
        strict = -1 if kind in ("gt", "lt") else 0
        bound = _plus(_plus(a, b, -1), ((), strict), 1)
        return Mask(frozenset({bound}))

    def _affine(self, name: Name, labels: axes.Labels) -> Affine | None:
        """Returns a value as a sum of positions, None if it is not one."""
        number = self._graph.number(name)
        if number is not None:
            return ((), int(number)) if number == int(number) else None
        if name in self._graph.positions:
            return (() if labels[0] is None else ((labels[0], 1),)), 0
        node = self._graph.node(name)
        if node is None or not np.issubdtype(node.aval.dtype, np.integer):
            return None
        if node.kind == "iota":
            label = labels[node.eqn.params["dimension"]]
            return (() if label is None else ((label, 1),)), 0
        if node.kind in traits.SHIFTS:
            a, b = (self._affine(x, self._broadcast(x, labels)) for x in node.operands)
            sign = 1 if node.kind == "add" else -1
            return None if a is None or b is None else _plus(a, b, sign)
        if node.kind == "convert_element_type":
            return self._affine(node.operands[0], labels)
        before, of = axes.source(self._graph, name, labels)
        return None if before is name else self._affine(before, of)

    def _broadcast(self, name: Name, labels: axes.Labels) -> axes.Labels:
        shape = () if compat.is_literal(name) else self._graph.aval(name).shape
        return axes.of_shape(labels, shape)


_COMPARED = frozenset({"ge", "gt", "le", "lt", "ne", "eq", "ge_to", "gt_to", "le_to", "lt_to"})


def _is_truth(graph: ValueGraph, node: Node) -> bool:
    """Whether both operands are truth values, so that their product is `a & b`."""
    if node.aval.dtype == np.bool_:
        return True
    return node.kind == "mul" and all(_is_binary(graph, x) for x in node.operands)


def _is_binary(graph: ValueGraph, name: Name) -> bool:
    node = graph.node(name)
    if node is None:
        return False
    if node.kind == "convert_element_type":
        return node.eqn.invars[0].aval.dtype == np.bool_
    return node.kind in FOLLOWED and _is_binary(graph, node.operands[0])


def _plus(a: Affine, b: Affine, sign: int) -> Affine:
    terms = dict(a[0])
    for label, times in b[0]:
        terms[label] = terms.get(label, 0) + sign * times
    remaining = tuple(sorted((label, n) for label, n in terms.items() if n))
    return remaining, a[1] + sign * b[1]


def window(bounds: Iterable[Affine], row: Any, column: Any) -> tuple[int | None, int | None] | None:
    """Returns how far before and after a row's place its keys are; None if bounds need more."""
    ends: dict[int, int | None] = {1: None, -1: None}
    for terms, number in bounds:
        times = dict(terms)
        if number < 0 or (times and times not in ({row: 1, column: -1}, {row: -1, column: 1})):
            return None
        if times:
            before = ends[times[row]]
            ends[times[row]] = number if before is None else min(number, before)
    return ends[-1], ends[1]


def of_places(bounds: Iterable[Affine], how: Any) -> Any:
    """Returns bounds as a mask, bool[1, 1, queries, keys].

    Args:
      bounds: inequalities between a row's place and a key's.
      how: the layout of the attention.
    """
    (queries, keys), (row, column) = (how.count(how.queries), how.count(how.keys)), (2, 3)
    read = jnp.ones((1, 1, queries, keys), bool)
    for terms, number in bounds:
        total = jnp.full(read.shape, number, jnp.int32)
        for label, times in terms:
            axis = column if label in how.keys else row
            total += times * jax.lax.broadcasted_iota(jnp.int32, read.shape, axis)
        read &= total >= 0
    return read


def rows(bounds: Iterable[Affine], column: Any) -> set[Any]:
    """Returns the labels of the axes whose positions bounds compare with those of a column."""
    return {label for terms, _ in bounds for label, _ in terms if label != column}
