"""What a sum is: a state and its change, a stream and a branch of it, or neither.

A state is held in float32 and a residual stream may be low (`carries` says which is which in a
loop). Outside of loops a sum shows what it is by its terms: a small step, an input to which is
added what was made of it, a float32 branch that joins a low stream before the next product.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mpjax._autocast.decide import (
    carries,
    reads,
    scopes,
    states,
)
from mpjax._autocast.decide.facts import Facts
from mpjax._autocast.decide.states import Kind, State
from mpjax._base import compat

Relations = frozenset[tuple[int, int]]
"""Pairs of a program's inputs, by place: where it is called, the second was made of the first."""


class Sums:
    """What the sums of one jaxpr need to know of its values, in program order."""

    def __init__(
        self,
        jaxpr: Any,
        flags: Mapping[Any, int],
        found: Mapping[Any, State],
        known: Facts,
        relations: Relations,
    ) -> None:
        self._makers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        self._eqns = jaxpr.eqns
        self._places = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
        self._inputs = {v: i for i, v in enumerate(jaxpr.invars)}
        self._streams: set[Any] = set()  # the shapes of low streams, forward
        self._flags = flags
        self._found = found
        self._known = known
        self._relations = relations

    def maker(self, atom: Any) -> Any:
        """Returns the equation that makes a value, None for inputs and literals."""
        return None if compat.is_literal(atom) else self._makers.get(atom)

    def repeats_any(self, values: Iterable[Any]) -> bool:
        """Whether one of some values is what a broadcast made."""
        return any(self._known[v].repeated for v in values)

    def relations(self, atoms: Sequence[Any]) -> Relations:
        """Returns which of some operands of a call were made of which others, that are inputs."""
        inputs = [
            (i, v)
            for i, v in enumerate(atoms)
            if not compat.is_literal(v) and self._found[v] == states.INPUT
        ]
        return frozenset(
            (i, j)
            for i, v in inputs
            for j, other in enumerate(atoms)
            if not compat.is_literal(other)
            and other.aval.shape == v.aval.shape
            and self._found[other].kind in (Kind.LOW, Kind.WIDE)
            and self._depends(other, v)
        )

    def state(self, eqn: Any, operands: Sequence[State], state: State, *, widest: bool) -> State:
        """Returns the state of a sum that would be `state` by its operands alone."""
        if state.is_state or self._changes_a_state(eqn, operands):
            return states.keep(state)
        if state.kind == Kind.WIDE and not widest:
            state = self._stream(eqn, operands) or state
        if state.kind == Kind.LOW and self._adds_a_branch(eqn) and not _is_backward(eqn):
            self._streams.add(eqn.outvars[0].aval.shape)
        return state

    def _adds_a_branch(self, eqn: Any) -> bool:
        """Whether a sum is of two whole arrays, of which neither was repeated."""
        shape = eqn.outvars[0].aval.shape
        return not any(
            compat.is_literal(v) or v.aval.shape != shape or self._known[v].repeated
            for v in eqn.invars
        )

    def _changes_a_state(self, eqn: Any, operands: Sequence[State]) -> bool:
        """Whether a sum adds a small step to a value, or to an input what was made of it.

        Adding to an input of which the other term is not made (positions to embeddings) is left to
        the rules of a stream, unless no product comes later, so that nothing is gained by that.
        """
        shape = eqn.outvars[0].aval.shape
        if any(compat.is_literal(v) or v.aval.shape != shape for v in eqn.invars):
            return False
        if {s.kind for s in operands} <= {Kind.NEUTRAL, Kind.CONSTANT, Kind.FOREIGN}:
            return False
        if sum(self._known[v].step for v in eqn.invars) == 1:
            return True
        want = self._flags.get(eqn.outvars[0], 0)
        for i, other in ((0, 1), (1, 0)):
            if operands[i] != states.INPUT or self._known[eqn.invars[other]].repeated:
                continue
            if self._depends(eqn.invars[other], eqn.invars[i]):
                return True
            left_to_streams = want & reads.LATER and not want & reads.ABSOLUTE
            return operands[other].kind == Kind.LOW and not left_to_streams
        return False

    def _depends(self, atom: Any, on: Any) -> bool:
        """Whether a value was computed from another."""
        if atom is on:
            return False
        made_of = self._between(atom, on)
        if on in made_of:
            return True
        place, places = self._inputs.get(on), [self._inputs.get(v) for v in made_of]
        return any((place, other) in self._relations for other in places)

    def _between(self, atom: Any, first: Any) -> set[Any]:
        """Returns what a value was computed from, as far back as another."""
        place = self._places.get(first, -1)
        waiting, seen = [atom], {atom}
        while waiting:
            maker = self._makers.get(waiting.pop())
            found = set(compat.variables(maker)) - seen if maker is not None else set[Any]()
            seen |= found
            waiting += [v for v in found if self._places.get(v, -1) > place]
        return seen

    def _stream(self, eqn: Any, operands: Sequence[State]) -> State | None:
        """Low, where a float32 branch is added to a low stream of the same shape.

        The stream would otherwise be float32 from its first normalised branch on. A branch is made
        of its stream, or the stream of the branch: scores and a bias of them are neither, nor are a
        recursion and its input. What no product reads any more is no stream but a loss, and the
        maximum in a logsumexp is none either. A sum of cotangents is that of a stream where the
        function has a low one.
        """
        kinds = sorted(s.kind for s in operands)
        if kinds != [Kind.LOW, Kind.WIDE] or not self._adds_a_branch(eqn):
            return None
        if any(self._known[v].extreme for v in eqn.invars):
            return None
        want = self._flags.get(eqn.outvars[0], 0)
        spoiled = reads.FULL | reads.ABSOLUTE
        if want & spoiled or not want & (reads.LATER | reads.CARRIED):
            return None  # a sum of many keeps each rounding
        if _is_backward(eqn) and eqn.outvars[0].aval.shape not in self._streams:
            return None
        first, second = eqn.invars
        if not self._is_branch(first, second) and not self._is_branch(second, first):
            return None
        return next(s for s in operands if s.kind == Kind.LOW)

    def _is_branch(self, atom: Any, of: Any) -> bool:
        """Whether a value was made of another by a product at least: an average is not."""
        found = (atom, *self._between(atom, of))
        between = {self._places[v] for v in found if v in self._places}
        made, by_products = {of}, set[Any]()
        for place in sorted(between):
            eqn = self._eqns[place]
            operands = compat.variables(eqn)
            if made.isdisjoint(operands):
                continue
            made.update(eqn.outvars)
            if carries.holds_product(eqn) or not by_products.isdisjoint(operands):
                by_products.update(eqn.outvars)
        return atom in by_products


def _is_backward(eqn: Any) -> bool:
    return scopes.is_transposed(eqn.source_info.name_stack)
