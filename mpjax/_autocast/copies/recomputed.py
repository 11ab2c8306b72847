"""Backward passes that compute again what the forward pass did, and compare it with what was saved.

Their author writes them as the rule of a `custom_vjp`. A cross-entropy saves the normaliser of its
shares, `exp(h @ w - normaliser)`. A reversible network saves its result alone, and undoes each
layer: from `y = x + f(a)` it has `x = y - f(a)`. That gives `x` back only if both evaluations of
`f` are rounded alike, of an `a` that is almost the same. After a few layers the rest of a rounding
would be larger than `x` itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from mpjax._autocast.copies.numbering import Copies, Copy, Numbering, cancel, contracts
from mpjax._autocast.decide.decided import Decided
from mpjax._autocast.decide.read_flags import AGAIN
from mpjax._autocast.known import ways
from mpjax._base import compat
from mpjax._jaxpr import keys
from mpjax._jaxpr.equation import Eqn

_TAKES_OFF = frozenset({"sub", "div", "add"})  # one of unknown sign, too


class Saved:
    """Whether a function with rules saves for its backward pass what a product made.

    Args:
      function: its closed jaxpr.
    """

    def __init__(self, function: Any) -> None:
        self._inputs = [v.aval.shape for v in function.jaxpr.invars]
        self._own = _made_by_products(function)
        self._is_any = False

    def has_inputs_of(self, rule: Any, times: int = 1) -> bool:
        """Whether a rule's inputs have the shapes of the function's, or twice, with tangents."""
        return [v.aval.shape for v in rule.jaxpr.invars] == self._inputs * times

    def with_rule(self, rule: Any) -> bool:
        """Whether it does, given the closed jaxpr of a rule; the forward one comes first."""
        if self.has_inputs_of(rule):
            self._is_any = self._is_any or _made_by_products(rule) > self._own
        return self._is_any


def _made_by_products(program: Any) -> int:
    """Returns how many outputs of a closed jaxpr are made of a product."""
    return sum(bool(made.by_product) for made in ways.of_program(program))


def layers_of(numbering: Numbering, eqn: Eqn, operands: Sequence[int]) -> list[Hashable]:
    """Returns the layers that a product evaluates: of which input, and how it reads that."""
    if not contracts(eqn):
        return []
    shapes = [v.aval.shape for v in eqn.invars[:2]]
    given = ((place, numbering.given(n)) for place, n in enumerate(operands))
    return [(*each, *shapes, *keys.printed_params(eqn)) for each in given if each[1] is not None]


def asked(decided: Decided, numbering: Numbering) -> set[tuple[Any, int]]:
    """Returns the flags of what a backward pass inside the program takes off what was saved.

    Args:
      decided: about the whole program.
      numbering: a walk over it.
    """
    if not numbering.subtracts_backward:
        return set()
    products = ((v.decision.eqn, v.operands) for v in numbering.visits)
    counts = Counter(layer for eqn, of in products for layer in layers_of(numbering, eqn, of))
    layers = [layer for layer, count in counts.items() if count > 1]
    walk = _Layers({layer: place for place, layer in enumerate(layers)})
    if layers:
        walk.walk(decided)
    return {(v, AGAIN) for v in walk.meeting}


class _Layers(Numbering):
    """A walk that is told where values meet that are made of one layer, in a backward pass.

    There the author's rule alone takes one value off another: transposition adds, and negates.
    """

    def __init__(self, layers: Mapping[Hashable, int]) -> None:
        super().__init__(frozenset(layers.values()))
        self._layers = layers

    def _repeats(self, eqn: Eqn, made: int, operands: Sequence[int]) -> Copies:
        layers = filter(self._layers.__contains__, layers_of(self, eqn, operands))
        return frozenset(Copy(self._layers[layer], len(self.visits)) for layer in layers)

    def _meet(self, eqn: Eqn, copies: Sequence[Copies], is_forward: bool) -> None:
        if not is_forward and eqn.primitive.name in _TAKES_OFF and cancel("sub", *copies):
            self.meeting.update(compat.variables(eqn))
