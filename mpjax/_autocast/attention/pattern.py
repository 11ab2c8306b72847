"""Finds attention in a jaxpr: a product, a scale, biases and a mask, a softmax, a product.

Anything else is left alone: weights that are read elsewhere, dropped out or capped, a softmax in a
float32 region, a bias for each head of each example.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mpjax._autocast.attention import axes, masks
from mpjax._autocast.attention.nodes import FOLLOWED, Name, Node, ValueGraph
from mpjax._autocast.decide.decided import Action
from mpjax._autocast.known import traits
from mpjax._base import compat
from mpjax._jaxpr.equation import Jaxpr

_DEEPEST = 24  # operations between a product and its softmax
_MASKED = -1e3  # a constant logit of at most this marks a key that is not read
SOFTMAX = frozenset({"reduce_max", "sub", "exp", "reduce_sum", "div"})
"""The operations of a softmax."""
_AFTER_A_STATISTIC = traits.RESHAPES | {"broadcast_in_dim", "stop_gradient"}


@dataclass(frozen=True)
class Logits:
    """The operand of a softmax: `where(mask, scale * product + biases, masked)`."""

    product: int  # the index of the equation that makes it
    labels: axes.Labels
    scale: float = 1.0
    biases: tuple[tuple[Name, axes.Labels, float], ...] = ()  # each times a number
    mask: masks.Mask = masks.ALL
    masked: float | None = None  # the logit of keys that are not read, or the bias on theirs
    is_added: bool = False
    through: frozenset[Any] = frozenset()  # the intermediate values, which nothing else may read

    def past(self, name: Name, labels: axes.Labels | None = None, **changes: Any) -> Logits:
        """Returns these logits after one more operation."""
        labels = self.labels if labels is None else labels
        return replace(self, labels=labels, through=self.through | {name}, **changes)


@dataclass(frozen=True)
class Match:
    """An attention in a jaxpr."""

    first: int  # the index of the equation of the product of query and key
    last: int  # the index of the product of weights and value
    weights: int  # the place of the weights among the operands of the last product
    logits: Logits
    softmax: Name  # the operand of the softmax
    softmax_labels: axes.Labels
    keys: Any  # the label of the axis of the softmax
    out: Any  # the result of the last product
    weight_labels: axes.Labels  # of the weights as the last product reads them
    through: frozenset[Any]  # the intermediate values, which nothing else may read


@dataclass(frozen=True)
class Softmax:
    """A softmax of logits along an axis."""

    logits: Name
    axis: int
    through: frozenset[Any]


class Finder:
    """Finds the attentions of one jaxpr.

    Args:
      jaxpr: open.
      constants: of the jaxpr.
      decisions: one for each equation.
      states: the state of each value.
    """

    def __init__(
        self, jaxpr: Jaxpr, constants: Sequence[Any], decisions: Sequence[Any], states: Any
    ) -> None:
        self.jaxpr = jaxpr
        self.graph = ValueGraph(jaxpr, constants)
        self._decisions = decisions
        self._states = states
        self._products = {
            d.eqn.outvars[0]: i for i, d in enumerate(decisions) if _multiplies_low(d)
        }
        self.known: frozenset[Any] = frozenset()
        self._read: dict[Name, Logits | None] = {}
        self._depth = 0

    def matches(self, known: Iterable[Any]) -> list[Match]:
        """Returns the attentions, given the values that exist when the steps of the plan run."""
        self.known = frozenset(known)
        attentions: list[Match] = []
        for i, decision in enumerate(self._decisions):
            if _multiplies_low(decision) and decision.out_dtype == decision.low:
                both = (self._match(i, side) for side in (0, 1))
                attentions += [match for match in both if match is not None][:1]
        return attentions

    def _match(self, last: int, side: int) -> Match | None:
        eqn = self._decisions[last].eqn
        if compat.is_literal(eqn.invars[side]):
            return None
        weights = self.graph.name(eqn.invars[side])
        way: list[Name] = []
        name = weights
        while (node := self.graph.node(name)) is not None and node.kind in FOLLOWED:
            way.append(name)
            name = node.operands[0]
        if node is None or node.kind != "div":
            return None
        softmax = self._softmax(node)
        logits = softmax and self._logits(softmax.logits)
        if not softmax or not logits:
            return None
        if self._decisions[logits.product].low != self._decisions[last].low:
            return None
        labels: axes.Labels | None = logits.labels
        for moved in reversed(way):
            labels = axes.moved(labels, self.graph.node(moved).eqn) if labels else None  # type: ignore[union-attr]
        if labels is None:
            return None
        through = logits.through | softmax.through | {*way, name}
        return Match(
            first=logits.product,
            last=last,
            weights=side,
            logits=logits,
            softmax=softmax.logits,
            softmax_labels=logits.labels,
            keys=logits.labels[softmax.axis],
            out=eqn.outvars[0],
            weight_labels=labels,
            through=through,
        )

    # -- the softmax -----------------------------------------------------------------------------

    def _softmax(self, quotient: Node) -> Softmax | None:
        """Returns the softmax that ends in a quotient, None if it is not one along one axis.

        `exp(x - max(x)) / sum(exp(x - max(x)))`
        """
        exponential, total = quotient.operands
        to_sum, summed = self._along(total, "reduce_sum")
        power = self.graph.node(exponential)
        if summed is None or summed.operands[0] != exponential:
            return None
        shifted = power and power.kind == "exp" and self.graph.node(power.operands[0])
        if not power or not shifted or shifted.kind != "sub":
            return None
        logits, most = shifted.operands
        to_most, largest = self._along(most, "reduce_max")
        places = tuple(map(int, summed.eqn.params["axes"]))
        if largest is None or largest.operands[0] != logits or len(places) != 1:
            return None
        if tuple(map(int, largest.eqn.params["axes"])) != places:
            return None
        if not self._repeats(total, places[0]) or not self._repeats(most, places[0]):
            return None
        through = frozenset({exponential, power.operands[0], *to_sum, *to_most})
        return Softmax(logits, places[0], through)

    def _along(self, name: Name, kind: str) -> tuple[list[Name], Node | None]:
        """Returns the values from a broadcast back to its statistic, and the statistic's node."""
        way: list[Name] = []
        while (node := self.graph.node(name)) is not None:
            way.append(name)
            if node.kind == kind:
                return way, node
            if node.kind == "max":  # with -inf
                numbers = [self.graph.number(x) for x in node.operands]
                if -math.inf not in numbers:
                    break
                name = node.operands[1 - numbers.index(-math.inf)]
            elif node.kind in _AFTER_A_STATISTIC:
                name = node.operands[0]
            else:
                break
        return way, None

    def _repeats(self, name: Name, axis: int) -> bool:
        """Whether a statistic is broadcast along the axis over which it was taken.

        Where there are as many rows as keys, a wrong axis would have the same shape.
        """
        last = self.graph.node(name)
        while last is not None and last.kind in ("stop_gradient", "max"):
            name = last.operands[0]
            last = self.graph.node(name)
        shape = self.graph.aval(name).shape
        if last is None or last.kind in ("reduce_sum", "reduce_max"):
            return False  # broadcast by an operation on operands of different ranks
        if shape[axis] == 1:
            before = self.graph.aval(last.operands[0]).shape
            return before == (*shape[:axis], *shape[axis + 1 :]) or before == shape
        if last.kind != "broadcast_in_dim":
            return False
        places = tuple(map(int, last.eqn.params["broadcast_dimensions"]))
        ndim = len(shape)
        if places == tuple(range(ndim)):
            return self._repeats(last.operands[0], axis)
        return places == tuple(i for i in range(ndim) if i != axis)

    # -- the logits ------------------------------------------------------------------------------

    def _logits(self, name: Name) -> Logits | None:
        """Returns the parts of logits, None if they are not one product and a few operations."""
        if compat.is_literal(name):
            return None
        if name not in self._read:
            self._depth += 1
            self._read[name] = self._made_of(name) if self._depth < _DEEPEST else None
            self._depth -= 1
        return self._read[name]

    def _made_of(self, name: Name) -> Logits | None:
        if name in self._products:
            shape = self.graph.aval(name).shape
            labels = tuple(None if n == 1 else i for i, n in enumerate(shape))
            return Logits(self._products[name], labels, through=frozenset({name}))
        node = self.graph.node(name)
        if node is None:
            return None
        if node.kind in FOLLOWED:
            logits = self._logits(node.operands[0])
            labels = logits and axes.moved(logits.labels, node.eqn)
            return logits.past(name, labels) if logits and labels else None
        if node.kind in traits.SCALES:
            return self._scaled(name, node)
        if node.kind in traits.SHIFTS:
            return self._biased(name, node)
        if node.kind == "select_n" and len(node.operands) == 3:
            return self._masked(name, node)
        return None

    def _scaled(self, name: Name, node: Node) -> Logits | None:
        number = self.graph.number(node.operands[1])
        inner = node.operands[0]
        if number is None and node.kind == "mul":
            number, inner = self.graph.number(node.operands[0]), node.operands[1]
        if not number or not math.isfinite(number):
            return None
        logits = self._logits(inner)
        if logits is None or logits.masked is not None:
            return None
        times = number if node.kind == "mul" else 1 / number
        biases = tuple((bias, labels, n * times) for bias, labels, n in logits.biases)
        return logits.past(name, scale=logits.scale * times, biases=biases)

    def _biased(self, name: Name, node: Node) -> Logits | None:
        sign = -1.0 if node.kind == "sub" else 1.0
        inner, bias = node.operands
        logits = self._logits(inner)
        if logits is None and node.kind == "add":
            inner, bias = bias, inner
            logits = self._logits(inner)
        if logits is None or logits.masked is not None:
            return None
        if self.graph.aval(inner).shape != node.aval.shape:
            return None
        shape = () if compat.is_literal(bias) else self.graph.aval(bias).shape
        start, labels = axes.source(self.graph, bias, _as_long(logits.labels, shape))
        added = self._additive_mask(start, labels) if sign > 0 else None
        if added is not None and not logits.biases:
            mask, least = added
            return logits.past(name, mask=logits.mask & mask, masked=least, is_added=True)
        if self.graph.leaves(start, self.known) is None or len(set(labels) - {None}) > 3:
            return None  # a bias for each head of each example is as large as the logits
        return logits.past(name, biases=(*logits.biases, (start, labels, sign)))

    def _additive_mask(self, name: Name, labels: axes.Labels) -> tuple[masks.Mask, float] | None:
        """Returns the mask of a bias `where(mask, 0, least)`, and `least`; None for others."""
        node = self.graph.node(name)
        if node is None or node.kind != "select_n" or len(node.operands) != 3:
            return None
        which, *cases = node.operands
        numbers = [self.graph.number(x) for x in cases]
        if 0.0 not in numbers:
            return None
        yes = numbers.index(0.0)
        least = numbers[1 - yes]
        if least is None or not least <= _MASKED:
            return None
        which, labels = axes.source(self.graph, which, labels)
        reader = masks.MaskReader(self.graph, self.known.__contains__)
        mask = reader.mask(which, labels, positive=yes == 1)
        return None if mask is None else (mask, least)

    def _masked(self, name: Name, node: Node) -> Logits | None:
        which, *cases = node.operands
        numbers = [self.graph.number(x) for x in cases]
        place = next((i for i, n in enumerate(numbers) if n is None), None)
        if place is None or (least := numbers[1 - place]) is None or not least <= _MASKED:
            return None
        logits = self._logits(cases[place])
        if logits is None or logits.is_added or logits.masked not in (None, least):
            return None
        shape = self.graph.aval(which).shape
        if self.graph.aval(cases[place]).shape != node.aval.shape:
            return None
        which, labels = axes.source(self.graph, which, _as_long(logits.labels, shape))
        reader = masks.MaskReader(self.graph, self.known.__contains__)
        mask = reader.mask(which, labels, positive=place == 1)
        if mask is None:
            return None
        return logits.past(name, mask=logits.mask & mask, masked=least)


def _as_long(labels: axes.Labels, shape: Sequence[int]) -> axes.Labels:
    """Returns the labels of an array that is broadcast along axes of 1."""
    return axes.of_shape(labels, shape) if len(shape) == len(labels) else ()


def _multiplies_low(decision: Any) -> bool:
    """Whether an equation is a matrix product of two arrays in 16 bits."""
    if decision.action is not Action.PRODUCT or decision.how is not None:
        return False
    eqn = decision.eqn
    if eqn.primitive.name != "dot_general" or any(map(compat.is_literal, eqn.invars)):
        return False
    return eqn.params.get("out_sharding") is None and decision.low.itemsize == 2
