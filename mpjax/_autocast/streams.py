"""What a sum is: a state and its change, a stream and a branch of it, or neither.

A state is held in float32 and a residual stream may be low (`carries` says which is which in a
loop). Outside of loops a sum shows what it is by its terms: a small step, an input to which is
added what was made of it, a float32 branch that joins a low stream before the next product.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mpjax import _compat
from mpjax._autocast import carries, demand, scopes, states, traits
from mpjax._autocast.states import Kind, State
from mpjax._op_rules import only_moves

_SMALL = 1 / 32  # times this a change counts as a step: each one is worth 5 bits less


class Sums:
    """What the sums of one jaxpr need to know of its values; `note` it in program order."""

    def __init__(self, jaxpr: Any, flags: Mapping[Any, int], found: Mapping[Any, State]) -> None:
        self._makers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        self._eqns = jaxpr.eqns
        self._places = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
        self._streams: set[Any] = set()  # the shapes of low streams, forward
        self._flags = flags
        self._found = found
        self._repeated: set[Any] = set()  # by a broadcast
        self._extremes: set[Any] = set()  # maxima of rows, and what is made of nothing else
        self._numbers: set[Any] = set()  # one number, repeated: a step size as an argument
        self._steps: set[Any] = set()  # what was multiplied by a small number, or by any such

    def maker(self, atom: Any) -> Any:
        """Returns the equation that makes a value, None for inputs and literals."""
        return None if _compat.is_literal(atom) else self._makers.get(atom)

    def repeats_any(self, values: Iterable[Any]) -> bool:
        """Whether one of some values is what a broadcast made."""
        return not self._repeated.isdisjoint(values)

    def note(self, eqn: Any, operands: Sequence[State]) -> None:
        """Remembers of an equation, whose results have states, what later sums ask for."""
        variables = _compat.variables(eqn)
        floats = [v for v in variables if self._found[v].kind > Kind.CONSTANT]
        if eqn.primitive.name in traits.EXTREME or (floats and self._extremes.issuperset(floats)):
            self._extremes.update(eqn.outvars)
        if only_moves(eqn) and (demand.repeats(eqn) or self._repeated.intersection(variables)):
            self._repeated.update(eqn.outvars)
        if only_moves(eqn) and len(variables) == 1 and self._is_number(variables[0]):
            self._numbers.update(eqn.outvars)
        moved = only_moves(eqn) and self._steps.intersection(variables)
        if moved or (eqn.primitive.name in ("mul", "div") and self._makes_a_step(eqn, operands)):
            self._steps.update(eqn.outvars)

    def _is_number(self, atom: Any) -> bool:
        """Whether a value is one float32 number that is not known, or copies of it."""
        if atom in self._numbers:
            return True
        return self._found[atom].kind in (Kind.NEUTRAL, Kind.WIDE) and atom.aval.ndim == 0

    def _makes_a_step(self, eqn: Any, operands: Sequence[State]) -> bool:
        """Whether an equation multiplies a whole array by a small number, or by an unknown one."""
        whole = [v for v in _compat.variables(eqn) if not self._is_number(v)]
        by_unknown = len(_compat.variables(eqn)) == 2 and len(whole) == 1
        return by_unknown or _makes_small(eqn, operands)

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
            _compat.is_literal(v) or v.aval.shape != shape or v in self._repeated
            for v in eqn.invars
        )

    def _changes_a_state(self, eqn: Any, operands: Sequence[State]) -> bool:
        """Whether a sum adds a small step to a value, or to an input what was made of it.

        Adding to an input of which the other term is not made (positions to embeddings) is left to
        the rules of a stream, unless no product comes later, so that nothing is gained by that.
        """
        shape = eqn.outvars[0].aval.shape
        if any(_compat.is_literal(v) or v.aval.shape != shape for v in eqn.invars):
            return False
        if {s.kind for s in operands} <= {Kind.NEUTRAL, Kind.CONSTANT, Kind.FOREIGN}:
            return False
        if len(self._steps.intersection(eqn.invars)) == 1:
            return True
        want = self._flags.get(eqn.outvars[0], 0)
        for i, other in ((0, 1), (1, 0)):
            if operands[i] != states.INPUT or eqn.invars[other] in self._repeated:
                continue
            if self._depends(eqn.invars[other], eqn.invars[i]):
                return True
            left_to_streams = want & demand.LATER and not want & demand.ABSOLUTE
            return operands[other].kind == Kind.LOW and not left_to_streams
        return False

    def _depends(self, atom: Any, on: Any) -> bool:
        """Whether a value was computed from another."""
        return atom is not on and on in self._between(atom, on)

    def _between(self, atom: Any, first: Any) -> set[Any]:
        """Returns what a value was computed from, as far back as another."""
        place = self._places.get(first, -1)
        waiting, seen = [atom], {atom}
        while waiting:
            maker = self._makers.get(waiting.pop())
            found = set(_compat.variables(maker)) - seen if maker is not None else set[Any]()
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
        if not self._extremes.isdisjoint(eqn.invars):
            return None
        want = self._flags.get(eqn.outvars[0], 0)
        spoiled = demand.FULL | demand.ABSOLUTE
        if want & spoiled or not want & (demand.LATER | demand.CARRIED):
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
            operands = _compat.variables(eqn)
            if made.isdisjoint(operands):
                continue
            made.update(eqn.outvars)
            if carries.holds_product(eqn) or not by_products.isdisjoint(operands):
                by_products.update(eqn.outvars)
        return atom in by_products


def _is_backward(eqn: Any) -> bool:
    return scopes.is_transposed(eqn.source_info.name_stack)


def _makes_small(eqn: Any, operands: Sequence[State]) -> bool:
    """Whether an equation multiplies by a known small number, or divides by a large one."""
    first, second = operands
    by_number = second if second.kind == Kind.CONSTANT else first
    if by_number.kind != Kind.CONSTANT or not by_number.values or 0 in by_number.values:
        return False
    if eqn.primitive.name == "mul":
        return max(map(abs, by_number.values)) <= _SMALL
    return by_number is second and min(map(abs, by_number.values)) >= 1 / _SMALL
