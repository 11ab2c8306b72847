"""Residual streams: sums that are low, though one term is float32.

Example: `x + norm(f(x) @ w)`, where `x` is low. Without this permission a stream would be float32
from its first normalised branch on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mpjax._autocast.decide import read_flags
from mpjax._autocast.decide.must.steps import Steps
from mpjax._autocast.decide.states import Kind, State
from mpjax._autocast.known import fact_flags, facts, scopes, ways
from mpjax._base import compat
from mpjax._jaxpr.equation import Eqn, Jaxpr


class Streams:
    """The residual streams of one jaxpr, in program order.

    Args:
      jaxpr: open.
      steps: its sums, and what each value was computed from.
      flags: how each value is read.
      known: a fact of each value.
    """

    def __init__(
        self, jaxpr: Jaxpr, steps: Steps, flags: Mapping[Any, int], known: facts.Facts
    ) -> None:
        self._eqns = jaxpr.eqns
        self._steps = steps
        self._flags = flags
        self._known = known
        self._shapes: set[Any] = set()  # of low streams, forward

    def note(self, eqn: Eqn) -> None:
        """Remembers a low sum, if it is that of a stream: its cotangents may be low too."""
        if self._adds_a_branch(eqn) and not scopes.is_transposed(eqn):
            self._shapes.add(eqn.outvars[0].aval.shape)

    def low(self, eqn: Eqn, operands: Sequence[State]) -> State | None:
        """Low, where a float32 branch is added to a low stream of the same shape.

        A sum counts as residual only if one operand was computed from the other through at least
        one product. Attention scores plus a bias, or a recurrence plus its input, do not. A value
        that no product reads any more belongs to a loss, and the maximum in a logsumexp is no
        stream either. A sum of cotangents counts where the function has a low stream of its shape.
        """
        kinds = sorted(s.kind for s in operands)
        if kinds != [Kind.LOW, Kind.WIDE] or not self._adds_a_branch(eqn):
            return None
        if any(self._known[v].flags & fact_flags.EXTREME for v in eqn.invars):
            return None
        read = self._flags.get(eqn.outvars[0], 0)
        spoiled = read_flags.ACCUMULATOR | read_flags.ABSOLUTE
        if read & spoiled or not read & (read_flags.LATER | read_flags.CARRIED):
            return None  # a sum of many keeps each rounding
        if scopes.is_transposed(eqn) and eqn.outvars[0].aval.shape not in self._shapes:
            return None
        first, second = eqn.invars
        if not self._is_branch(first, second) and not self._is_branch(second, first):
            return None
        return next(s for s in operands if s.kind == Kind.LOW)

    def _adds_a_branch(self, eqn: Eqn) -> bool:
        """Whether a sum is of two whole arrays, of which neither was repeated."""
        shape = eqn.outvars[0].aval.shape
        return not any(
            compat.is_literal(v)
            or v.aval.shape != shape
            or self._known[v].flags & fact_flags.REPEATED
            for v in eqn.invars
        )

    def _is_branch(self, atom: Any, of: Any) -> bool:
        """Whether a value was made of another by a product at least: an average is not."""
        places = self._steps.places
        made, by_products = {of}, set[Any]()
        for eqn in self._eqns[places.get(of, -1) + 1 : places.get(atom, -1) + 1]:
            if made.isdisjoint(compat.variables(eqn)):
                continue
            for result, operands, multiplied in ways.results(eqn):
                if made.isdisjoint(operands):
                    continue
                made.add(result)
                if not (made.isdisjoint(multiplied) and by_products.isdisjoint(operands)):
                    by_products.add(result)
        return atom in by_products
