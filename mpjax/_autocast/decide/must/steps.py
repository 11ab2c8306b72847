"""Sums that change a value a little, so that rounding would lose the change.

`w - 0.01 * g` is such a sum: one term is a small step. So is a sum of an input and of what was made
of it, as `x + f(x)` of a solver: the input is what a program is asked to change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mpjax._autocast.decide import reads, states
from mpjax._autocast.decide.states import Kind, State
from mpjax._autocast.known import fact_flags, facts, ways
from mpjax._base import compat
from mpjax._jaxpr import structure
from mpjax._jaxpr.equation import Eqn, Jaxpr
from mpjax._jaxpr.op_rules import hands_on_each

Relations = frozenset[tuple[int, int]]
"""Pairs of a program's inputs, by place: where it is called, the second was made of the first."""


class Steps:
    """The sums of one jaxpr that change a value.

    Args:
      jaxpr: open.
      flags: how each value is read.
      held: the state of each value, as far as decided.
      known: a fact of each value.
      relations: which inputs were made of which others.
    """

    def __init__(
        self,
        jaxpr: Jaxpr,
        flags: Mapping[Any, int],
        held: Mapping[Any, State],
        known: facts.Facts,
        relations: Relations,
    ) -> None:
        self._eqns = jaxpr.eqns
        self.places = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
        self._inputs = {v: i for i, v in enumerate(jaxpr.invars)}
        self._flags = flags
        self._held = held
        self._known = known
        self._relations = relations

    def maker(self, atom: Any) -> Any:
        """Returns the equation that makes a value, None for inputs and literals."""
        place = None if compat.is_literal(atom) else self.places.get(atom)
        return None if place is None else self._eqns[place]

    def repeats_any(self, values: Iterable[Any]) -> bool:
        """Whether one of some values is what a broadcast made."""
        return any(self._known[v].flags & fact_flags.REPEATED for v in values)

    def relations(self, atoms: Sequence[Any]) -> Relations:
        """Returns which of some operands of a call were made of which others, that are inputs."""
        inputs = [
            (i, v)
            for i, v in enumerate(atoms)
            if not compat.is_literal(v) and self._held[v] == states.INPUT
        ]
        return frozenset(
            (i, j)
            for i, v in inputs
            for j, other in enumerate(atoms)
            if not compat.is_literal(other)
            and other.aval.shape == v.aval.shape
            and self._held[other].kind in (Kind.LOW, Kind.WIDE)
            and self._depends(other, v)
        )

    def changes_a_state(self, eqn: Eqn, operands: Sequence[State]) -> bool:
        """Whether a sum adds a small step to a value, or to an input what was made of it.

        Adding to an input of which the other term is not made (positions to embeddings) is left to
        `may/streams`, unless no product comes later, so that nothing is gained by that.
        """
        shape = eqn.outvars[0].aval.shape
        if any(compat.is_literal(v) or v.aval.shape != shape for v in eqn.invars):
            return False
        if {s.kind for s in operands} <= {Kind.NEUTRAL, Kind.CONSTANT, Kind.FOREIGN}:
            return False
        first, second = (self._known[v].flags & fact_flags.STEP for v in eqn.invars)
        if first != second:
            return True
        want = self._flags.get(eqn.outvars[0], 0)
        for i, other in ((0, 1), (1, 0)):
            of = eqn.invars[other]
            if operands[i] != states.INPUT or self._known[of].flags & fact_flags.REPEATED:
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
        made_of = self.between(atom, on)
        if on in made_of:
            return True
        place, places = self._inputs.get(on), [self._inputs.get(v) for v in made_of]
        return any((place, other) in self._relations for other in places)

    def between(self, atom: Any, first: Any) -> set[Any]:
        """Returns what a value was computed from, as far back as another.

        A call is looked into, as if it were written out: one of its results need not depend on all
        of its operands.
        """
        place = self.places.get(first, -1)
        waiting, seen = [atom], {atom}
        while waiting:
            value = waiting.pop()
            maker = self.maker(value)
            new = set(_operands(maker, value)) - seen if maker is not None else set[Any]()
            seen |= new
            waiting += [v for v in new if self.places.get(v, -1) > place]
        return seen


def _operands(maker: Eqn, result: Any) -> Iterable[Any]:
    """Returns the variables from which an equation computes one of its results."""
    if not structure.is_call(maker) and not hands_on_each(maker):
        return compat.variables(maker)
    made = ways.of_equation(maker)[maker.outvars.index(result)]
    return ways.variables(maker, made.all)
