"""Runs the equations of a group, each in the way that is best for a compiler.

Without hints: widen the operands, compute in float32, round where a result is stored. A way
computes the same value by other operations, such as a gather of low logits in place of float32
log-probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from mpjax._autocast.decide.states import State
from mpjax._autocast.known import traits
from mpjax._autocast.speed import centred, curves, exact, lowerings, moves, passes, picks
from mpjax._autocast.speed.curves import widened
from mpjax._autocast.speed.marks import FusedGroup, low_cotangent, stored_dtype
from mpjax._base import compat
from mpjax._jaxpr.binding import bind, written_at
from mpjax._jaxpr.equation import Eqn

Bind = Callable[[Any, Sequence[Any]], list[Any]]
"""Returns the results of an equation on operands, computed as it is written."""


class Ways:
    """The ways of a group's equations, computed once for all groups that are equal to it.

    Args:
      group: its equations, inputs, outputs and marks.
      states: the state of each value of the program.
      in_loop: whether it is in the body of a loop, whose backward pass is another loop.
      alone: whether its derivative is in another program, which XLA does not compare with it.
      around: the number of named scopes that are open where it runs.
    """

    def __init__(
        self,
        group: FusedGroup,
        states: dict[Any, State],
        *,
        in_loop: bool,
        alone: bool,
        around: int,
    ) -> None:
        self.passes = passes.Passes(group.eqns, None if alone else group.marks.passed)
        self.eqns = eqns = self.passes.eqns
        outputs = [v for v, *_ in group.outputs]
        self.group, self.states, self.around = group, states, around
        self.unwidened = moves.moved_low(eqns)
        self.again = moves.moved_again(eqns, group.inputs)
        self.in_parts = moves.read_in_parts(eqns, set(outputs))
        self.centres = centred.centred(eqns)
        self.picked_from = picks.picked_from(eqns)
        self.curves: dict[Any, curves.Curve | None] = {}
        if group.marks.checkpoint and not in_loop:
            others = {*self.in_parts, *self.picked_from}
            others |= group.marks.several | group.marks.convolved
            self.curves = curves.curves(eqns, group.inputs, outputs, others)

    def on(self, arrays: Sequence[Any], statistics: passes.Statistics | None = None) -> Running:
        """Returns a run of the group on its inputs, in the dtypes in which they were made."""
        return Running(self, arrays, statistics)


class Running:
    """One run of a group: its values so far."""

    def __init__(
        self, ways: Ways, arrays: Sequence[Any], statistics: passes.Statistics | None
    ) -> None:
        self._ways, self._marks = ways, ways.group.marks
        self._given = dict(zip(ways.group.inputs, arrays, strict=True))
        self._local = dict(self._given)
        self._picking = picks.Parts(ways.picked_from, self._given)
        self._passing = passes.Passing(ways.passes, self._given, ways.around, statistics)

    def run(self, eqn: Eqn, bound: Bind) -> None:
        """Adds the results of the next equation.

        The order matters: a curve stands for several equations; centring and picking replace one;
        marks are put on whatever computed the value; parts are cut out of the marked value.
        """
        ways, (first, *_) = self._ways, eqn.outvars
        if first in ways.curves:
            curve = ways.curves[first]
            if curve is not None:
                self._local[curve.result] = curve.run(self._given, self._local, ways.around)
            return
        variables = compat.variables(eqn)
        self._local |= {v: widened(v, self._local[v]) for v in variables if v not in ways.unwidened}
        values = self._computed(eqn, bound)
        source = self._given.get(ways.again.get(first))
        if source is not None and source.dtype != values[0].dtype:
            values = [moves.valued(*values, widened(first, *bind(eqn, [source])))]
        values = self._passing.noted(eqn, self._marked(eqn, values))
        values = self._cut(eqn, variables, values)
        self._local.update(zip(eqn.outvars, values, strict=True))

    def outputs(self) -> list[Any]:
        """Returns the outputs: for each its low form, then its float32 one, if wanted."""
        outs: list[Any] = []
        in_passes = bool(self._ways.passes.later)
        for var, is_low, is_full in self._ways.group.outputs:
            if is_low:
                low = self._local[var].astype(self._ways.states[var].dtype)
                is_stored = in_passes or var in self._marks.stored
                outs.append(lowerings.stored(low) if is_stored else low)
            if is_full:
                outs.append(widened(var, self._local[var]))
        return outs

    def _computed(self, eqn: Eqn, bound: Bind) -> list[Any]:
        local = self._passing.read(eqn, self._local)
        with written_at(eqn, self._ways.around):
            values = self._ways.centres.run(eqn, local, self._marks.dear)
            if values:
                return values
            if low := exact.compared(eqn, self._given):
                return bind(eqn, low)
            operands = self._operands(eqn, local)
            return self._picking.run(eqn, operands) or bound(eqn, operands)

    def _operands(self, eqn: Eqn, local: Mapping[Any, Any]) -> list[Any]:
        values = [a.val if compat.is_literal(a) else local[a] for a in eqn.invars]
        for i, v in enumerate(eqn.invars if eqn.primitive.name in traits.ADDS else ()):
            if not compat.is_literal(v) and v in self._marks.apart:
                # Broadcast here, or XLA would sum its cotangent before it stores it.
                wide = jnp.broadcast_to(values[i], eqn.outvars[0].aval.shape)
                low = stored_dtype(self._ways.group, self._ways.states)
                values[i] = lowerings.stored_cotangent(wide, low, apart=True)
        return values

    def _marked(self, eqn: Eqn, values: Sequence[Any]) -> list[Any]:
        """Returns the results of an equation with the group's marks on them."""
        (first, *others), (var, *_) = values, eqn.outvars
        states, several = self._ways.states, self._marks.several
        if var in self._marks.convolved:
            first = lowerings.summed(first, states[var].dtype)
        if low := low_cotangent(eqn, self._ways.group, states):
            apart: bool | None = var not in several
            if apart and several:
                apart = None  # behind a norm: its kernel sums the bias with its scales and shifts
            first = lowerings.stored_cotangent(first, low, apart=apart)
        if var in self._marks.summed:
            first = lowerings.stored_cotangent(first, states[var].dtype, apart=True, is_one=True)
        return [first, *others]

    def _cut(self, eqn: Eqn, variables: Sequence[Any], values: list[Any]) -> list[Any]:
        """Returns slices of a value, computed from slices of the group's low inputs."""
        cuts = [] if self._ways.in_parts.keys().isdisjoint(variables) else moves.cuts(eqn)
        if not cuts:
            return values
        (v,) = variables
        parts = (moves.as_result(eqn, self._part(v, v.aval.shape, cut)) for cut in cuts)
        return [moves.valued(*both) for both in zip(values, parts, strict=True)]

    def _part(self, v: Any, of: Sequence[int], cut: moves.Cut) -> Any:
        """Returns a slice of a value that is computed in parts, or of one that is there."""
        parts: dict[Any, Any] = {}

        def part(a: Any) -> Any:
            if compat.is_literal(a):
                return a.val
            if a in parts:
                return parts[a]
            return widened(a, moves.cut(self._given.get(a, self._local[a]), of, cut))

        for eqn in moves.made_of(v, self._ways.in_parts):
            with written_at(eqn, self._ways.around):
                parts[eqn.outvars[0]] = bind(eqn, list(map(part, eqn.invars)))[0]
        return part(v)
