"""Sums that change a value a little, so that rounding would lose the change.

`w - 0.01 * g` is such a sum: one term is a small step. So is a sum of an input and of what was made
of it, as `x + f(x)` of a solver: the input is what a program is asked to change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mpjax._autocast.decide import read_flags, states
from mpjax._autocast.decide.states import Kind, State
from mpjax._autocast.known import fact_flags, facts, ways
from mpjax._base import compat
from mpjax._jaxpr import structure
from mpjax._jaxpr.equation import Eqn, Jaxpr
from mpjax._jaxpr.sizes import size

Relations = tuple[int, ...]
"""For each input of a program, of which other inputs it was made where the program is called.

A set of places, as in `known/ways`. Only inputs that may be changed in small steps count.
"""


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
        self._flags = flags
        self._held = held
        self._known = known
        self._inputs = _Inputs(jaxpr, self.places, held, relations)

    def maker(self, atom: Any) -> Any:
        """Returns the equation that makes a value, None for inputs and literals."""
        place = None if compat.is_literal(atom) else self.places.get(atom)
        return None if place is None else self._eqns[place]

    def repeats_any(self, values: Iterable[Any]) -> bool:
        """Whether one of some values is what a broadcast made."""
        return any(self._known[v].flags & fact_flags.REPEATED for v in values)

    def relations(self, atoms: Sequence[Any]) -> Relations:
        """Returns of which others each of some operands of a call was made."""
        held = (self._held[v] for v in atoms if not compat.is_literal(v))
        return self._inputs.relations(atoms) if states.INPUT in held and len(atoms) > 1 else ()

    def changes_a_recurrent_state(self, eqn: Eqn, operands: Sequence[State]) -> bool:
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
        read = self._flags.get(eqn.outvars[0], 0)
        for i, other in ((0, 1), (1, 0)):
            of = eqn.invars[other]
            if operands[i] != states.INPUT or self._known[of].flags & fact_flags.REPEATED:
                continue
            if self._inputs.made(of, eqn.invars[i]):
                return True
            left_to_streams = read & read_flags.LATER and not read & read_flags.ABSOLUTE
            return operands[other].kind == Kind.LOW and not left_to_streams
        return False


class _Inputs:
    """Of which inputs each value of a program was made.

    An input that was moved, or scaled, is the same input: `x[order] + f(x)` changes `x`. A part of
    it is another one: a coupling layer's `x[:4] + f(x[4:])` changes no input of which `f` is made.
    Each input has a bit; sets of inputs are integers.
    """

    def __init__(
        self,
        jaxpr: Jaxpr,
        places: Mapping[Any, int],
        held: Mapping[Any, State],
        relations: Relations,
    ) -> None:
        self._eqns = jaxpr.eqns
        self._places = places  # of the equation that makes a value
        self._held = held
        self._next = 0  # the equation that is not noted yet
        self._bits: dict[Any, int] = {}
        self._made_of: dict[Any, int] = {}
        self._of_size: dict[int, int] = {}
        self._count = 0
        for v in (*jaxpr.constvars, *jaxpr.invars):
            self._note(v, 0)
        for v, others in zip(jaxpr.invars, relations, strict=False):
            made_of = _union(self._bits.get(jaxpr.invars[i], 0) for i in ways.places(others))
            self._note(v, self._made_of[v] | made_of)

    def made(self, atom: Any, of: Any) -> bool:
        """Whether a value was made of an input."""
        return bool(self._look_up(self._made_of, atom) & self._look_up(self._bits, of))

    def relations(self, atoms: Sequence[Any]) -> Relations:
        """Returns of which others each of some values was made."""
        made_of = [self._look_up(self._made_of, v) for v in atoms]
        inputs = [(1 << i, self._look_up(self._bits, v)) for i, v in enumerate(atoms)]
        places = {m: _union(i for i, bits in inputs if m & bits) for m in set(made_of)}
        return tuple(places[m] & ~(1 << i) for i, m in enumerate(made_of))

    def _look_up(self, table: Mapping[Any, int], atom: Any) -> int:
        if compat.is_literal(atom):
            return 0
        end = self._places.get(atom, -1) + 1
        for eqn in self._eqns[self._next : end]:
            if len(eqn.outvars) == 1 and not structure.is_call(eqn):  # most, and quicker so
                made_of = _union(self._made_of[v] for v in compat.variables(eqn))
                self._note(eqn.outvars[0], made_of)
                continue
            for result, operands, _ in ways.results(eqn):
                self._note(result, _union(self._made_of[v] for v in operands))
        self._next = max(self._next, end)
        return table.get(atom, 0)

    def _note(self, var: Any, made_of: int) -> None:
        """Notes of which inputs a value was made, itself among them if it is one."""
        if self._held[var] == states.INPUT:
            elements = size(var.aval.shape)
            alike = self._of_size.get(elements, 0)
            if not made_of & alike:
                new = 1 << self._count
                self._count += 1
                made_of |= new
                self._of_size[elements] = alike = alike | new
            self._bits[var] = made_of & alike
        self._made_of[var] = made_of


def _union(sets: Iterable[int]) -> int:
    union = 0
    for one in sets:
        union |= one
    return union
