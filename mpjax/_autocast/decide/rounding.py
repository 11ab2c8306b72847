"""Where a result may be rounded: what readers ask for, and where rounding gains nothing.

A low value is one that may be rounded where it is stored. This file takes that back, for a reader
that rounding would hurt and behind the last product, and grants it where `may` does.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mpjax._autocast.decide import may, read_flags, reads, reasons, states
from mpjax._autocast.decide.decided import Action, Decision, Outside, Settings, initial_state
from mpjax._autocast.decide.may import multiplied, norms
from mpjax._autocast.decide.may.streams import Streams
from mpjax._autocast.decide.must.steps import Steps
from mpjax._autocast.decide.reasons import Reason
from mpjax._autocast.decide.states import Kind, State
from mpjax._autocast.known import fact_flags, facts, ranges, scopes, walk
from mpjax._base import compat
from mpjax._base.dtypes import FLOAT16, FLOAT32
from mpjax._jaxpr.equation import Eqn
from mpjax._jaxpr.sizes import is_float32
from mpjax._policies.policy import Policy


class Rounding:
    """The values of one program: facts, readers, and the state that each reader is given."""

    def __init__(
        self,
        jaxpr: Any,
        in_states: tuple[State, ...],
        out_reads: tuple[int, ...],
        settings: Settings,
        outside: Outside,
    ) -> None:
        self.program = weakref.ref(jaxpr)
        self.jaxpr = compat.closed(jaxpr).jaxpr
        self.settings = settings
        self._last: tuple[Any, Settings] = None, settings
        is_one = isinstance(settings.policy, Policy)
        self.low = _low(scopes.compute_dtype(settings.policy, ())) if is_one else None
        self.in_states = in_states
        given = walk.unrelated(self.jaxpr) if outside.facts is None else outside.facts
        self.facts = walk.inside(jaxpr, given)
        self.reads = reads.inside(jaxpr, out_reads, settings.other_reads, given)
        known = zip(self.jaxpr.invars, outside.ahead, strict=False)
        self.ahead = {v for v, is_ahead in known if is_ahead}  # it is added what comes out of calls
        self.out_reads = out_reads
        self.states: dict[Any, State] = dict(zip(self.jaxpr.invars, in_states, strict=True))
        for var in self.jaxpr.constvars:
            self.states[var] = initial_state(var.aval)
        self.steps = Steps(self.jaxpr, self.reads, self.states, self.facts, outside.relations)
        self.streams = Streams(self.jaxpr, self.steps, self.reads, self.facts)
        granted = may.NORMS in settings.may
        made = norms.of_program(jaxpr) if granted else norms.NONE
        self.normalised, self.norms_between, self.norms_multiplied = made
        self.changed = False  # whether anything differs from what was traced
        self.why_wide: dict[Any, Reason] = {}  # why values that could be low are float32

    def settings_at(self, eqn: Eqn) -> Settings:
        if eqn is not self._last[0]:  # asked several times of each
            as_written = not self.settings.as_written and scopes.is_as_written(eqn)
            self._last = eqn, _as_written(self.settings) if as_written else self.settings
        return self._last[1]

    def low_dtype(self, eqn: Eqn, settings: Settings) -> Any:
        """The compute dtype at an equation, None where that is float32."""
        if settings.as_written:
            return None
        if isinstance(settings.policy, Policy):
            return self.low
        return _low(scopes.compute_dtype(settings.policy, settings.scope + scopes.of(eqn)))

    def as_followed(self, eqn: Eqn, operands: Sequence[State]) -> Sequence[State]:
        """The states of operands for an operation that takes their dtype.

        What is float32 for the sake of one reader is as good as low for the others. Its cotangent
        is float32 too, as that of a value which `jax.grad` sees in float32.
        """
        if scopes.is_transposed(eqn):
            return operands
        return [states.as_low(s) for s in operands]

    def as_normalised(self, eqn: Eqn, state: State, read: int) -> State:
        """Low, where a product comes later and nothing that rounding would hurt reads the value."""
        return self.as_read(eqn, state, read_flags.PRODUCT) if norms.may_be_low(read) else state

    def of_sum(self, eqn: Eqn, operands: Sequence[State], state: State) -> State:
        """The state of a sum that would be `state` by its operands alone."""
        if state.is_recurrent or self.steps.changes_a_recurrent_state(eqn, operands):
            return states.kept(state)
        settings = self.settings
        if state.kind == Kind.WIDE and may.STREAMS in settings.may and not settings.widest:
            state = self.streams.low(eqn, operands) or state
        if state.kind == Kind.LOW:
            self.streams.note(eqn)
        return state

    def stored(self, eqn: Eqn, var: Any, state: State) -> State:
        """Low instead of wide, where a product reads the value and no output does."""
        read = self.reads.get(var, 0)
        state = self.unrounded(eqn, var, state)
        if var in self.norms_multiplied:
            state = states.unkept(state)
        if var in self.norms_between and not self.gains_nothing(eqn, read):
            state = self.as_normalised(eqn, state, read)
        return self.as_read(eqn, state, read)

    def unrounded(self, eqn: Eqn, var: Any, state: State) -> State:
        """Float32 instead of low, where rounding would hurt a reader or gain nothing."""
        read = self.reads.get(var, 0)
        if state.kind != Kind.LOW:
            return state
        if self.gains_nothing(eqn, read):
            self.why_wide[var] = reasons.of_no_gain(read)
            return states.WIDE
        reason = reasons.of_reader(read) or (reasons.MEETS if read & read_flags.MEET else None)
        if reason is None and self.is_of_unrounded(eqn, var):
            reason = reasons.MAXIMUM
        if reason is None and read & read_flags.ABSOLUTE and self.facts[var].added:
            reason = reasons.MASKED
        if reason is None and state.dtype == FLOAT16:
            reason = self.past_the_range(var, read)
        if reason is None:
            return state
        self.why_wide[var] = reason
        return states.unrounded(state)

    def past_the_range(self, var: Any, read: int) -> Reason | None:
        """Why float16 might not hold a value that float32 holds, None where it does."""
        if read & read_flags.SCALED:
            return reasons.SCALED
        if read & read_flags.DIVIDED:
            return reasons.WEIGHTS
        if read & read_flags.PROPORTION:
            return reasons.PROPORTION
        if self.is_power(var, read):
            return reasons.POWER
        return reasons.UNHELD if read & read_flags.UNHELD else self.out_of_range(var)

    def is_power(self, var: Any, read: int) -> bool:
        """Whether a value is a power, or a product of two, that no product reads.

        A product that reads one would round it anyway.
        """
        fact = self.facts[var]
        is_one = fact.factors > 1 or fact.flags & ranges.GROWN
        return bool(is_one and not read & read_flags.PRODUCT)

    def is_of_unrounded(self, eqn: Eqn, var: Any) -> bool:
        """Whether a value is the maximum of rows that are float32 for the sake of a reader.

        A softmax subtracts it from them: `exp(x - max(x))` is exactly 1 only where both are alike.
        """
        operands = [self.states[v] for v in compat.variables(eqn)]
        is_extreme = self.facts[var].flags & fact_flags.EXTREME
        return bool(is_extreme) and any(s.would_be is not None for s in operands)

    def gains_nothing(self, eqn: Eqn, read: int) -> bool:
        """Whether a value stands behind the last product, where losses live.

        In a derivative taken inside the program products come later: those of the backward pass.
        What is behind the last product of the forward pass still is, unless it was made, for that
        derivative, of what stands before.
        """
        if not read & read_flags.LATER:
            return True
        if read & read_flags.FORWARD or scopes.is_transposed(eqn):
            return False
        return not any(map(self.is_before_a_product, compat.variables(eqn)))

    def is_before_a_product(self, atom: Any) -> bool:
        """Whether a product of the forward pass depends on a value, here or where we are called."""
        if compat.is_literal(atom):
            return False
        return bool(self.reads.get(atom, 0) & read_flags.FORWARD) or atom in self.ahead

    def as_read(self, eqn: Eqn, state: State, read: int) -> State:
        """Low instead of wide, where a product reads the value and no other reader forbids that."""
        if self.settings.widest or may.READ not in self.settings.may:
            return state
        if not multiplied.may_be_low(state, read):
            return state
        dtype = self.low_dtype(eqn, self.settings_at(eqn))
        if dtype is None or (dtype == FLOAT16 and self.may_be_out_of_range(eqn, read)):
            return state
        return states.low(dtype)

    def may_be_out_of_range(self, eqn: Eqn, read: int) -> bool:
        """Whether float16 might not hold what an operation makes for a product."""
        is_read_so = read & (read_flags.DIVIDED | read_flags.UNHELD)
        return bool(is_read_so) or any(map(self.out_of_range, eqn.outvars))

    def out_of_range(self, atom: Any) -> Reason | None:
        """Why float16 might not hold a value, although a product reads it; None where it does."""
        flags = facts.of_atom(atom, self.facts).flags
        if flags & ranges.EXPONENTIAL:
            return reasons.EXPONENTIAL
        if flags & ranges.OUTSIDE:
            return reasons.OUTSIDE
        return reasons.POWERS if flags & ranges.POWERS else None

    def because(self, eqn: Eqn, own: Reason | None) -> Reason:
        """The reason of the dtype of an operation's first result, which is recorded.

        `own` is the operation's, None where it takes the dtype of its operands.
        """
        out = eqn.outvars[0]
        state, read = self.states[out], self.reads.get(out, 0)
        if state.kind == Kind.FOREIGN:
            return own or reasons.INPUTS
        settings = self.settings_at(eqn)
        if self.low is None or settings.as_written:
            place = reasons.of_place(settings, eqn)
            if place is not None:
                return place
        if state.kind == Kind.WIDE:
            asked = self.why_wide.get(out) or reasons.of_reader_beside_a_product(read)
            if asked is not None:
                return asked
        if self.settings.overrides and (by_rule := reasons.of_rule(self.settings, eqn, state)):
            return by_rule
        if own is not None:
            return own
        operands = [self.state(v) for v in eqn.invars]
        widest = self.settings.widest
        return reasons.of_operands(eqn, state, operands, read, widest=widest)

    def of_user(self, eqn: Eqn, state: State) -> Reason | None:
        """The user's reason for the dtype of an operation, None where there is none."""
        place = reasons.of_place(self.settings_at(eqn), eqn)
        return place or reasons.of_rule(self.settings, eqn, state)

    def record(self, eqn: Eqn, made: Sequence[State]) -> None:
        for var, state in zip(eqn.outvars, made, strict=True):
            self.states[var] = state if is_float32(var) else states.FOREIGN

    def as_traced(self, eqn: Eqn, state: State, reason: Reason) -> Decision:
        self.record(eqn, [state] * len(eqn.outvars))
        return Decision(eqn, Action.AS_TRACED, reason)

    def state(self, atom: Any) -> State:
        if compat.is_literal(atom):
            return states.of_literal(atom)
        return self.states[atom]

    def output_state(self, atom: Any, read: int, maker: Any) -> State:
        state = self.state(atom)
        if read & read_flags.STACKED:  # a loop may stack low what it also carries in float32
            state = states.unkept(state)
        if maker is not None:
            inside = self.reads.get(atom, 0) & read_flags.UNROUNDED
            state = self.as_read(maker, state, read | inside)
        if state.kind != Kind.LOW:
            return state
        if read & read_flags.ACCUMULATOR:
            return states.WIDE
        if read & read_flags.OUTPUT and not read & read_flags.PRODUCT:
            return states.WIDE  # rounding it would be seen and gain nothing
        return state

    def low_copy(self, var: Any) -> Any:
        if not is_float32(var) or self.states[var].kind in (Kind.LOW, Kind.CONSTANT):
            return None
        if not self.reads.get(var, 0) & read_flags.WHOLE or not isinstance(
            self.settings.policy, Policy
        ):
            return None
        if self.settings.as_written or (self.low == FLOAT16 and self.out_of_range(var)):
            return None
        return self.low


def _low(dtype: Any) -> Any:
    """Returns a dtype, None where it is no smaller than float32."""
    return dtype if dtype.itemsize < FLOAT32.itemsize else None


@functools.lru_cache(maxsize=256)
def _as_written(settings: Settings) -> Settings:
    return replace(settings, scope=(), as_written=True)
