"""Passes states through operations that hold programs: calls, loops, branches, custom rules.

Loops are fixpoints: a carry is low only if it is no state (`carries`), starts low or neutral and
leaves the body low. Nothing is bound here; `run/calls` does that from the plans made here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mpjax._autocast.decide import reasons, states
from mpjax._autocast.decide.may import STREAM_CARRIES, stream_carries
from mpjax._autocast.decide.must.carries import recurrent
from mpjax._autocast.decide.reads import (
    ABSOLUTE,
    AT_THE_END,
    CARRIED,
    FORWARD,
    FULL,
    LATER,
    NEAR,
    STACKED,
    TESTED,
    UNROUNDED,
    WHOLE,
)
from mpjax._autocast.decide.states import Kind, State
from mpjax._autocast.known import ways
from mpjax._jaxpr import structure
from mpjax._jaxpr.equation import Eqn

_MAX_PASSES = 8
_NEXT_TURN = UNROUNDED | ABSOLUTE | LATER | FORWARD
"""Flags that the next turn of a loop sets of a carry hold for the turn that leaves it."""


@dataclass(frozen=True, slots=True)
class CallPlan:
    """The plans of an equation's programs, and what passes in and out.

    `plans` are in the order of `structure.parts`: decisions, in a plan the plans made of them.
    `operand_states` are those in which operands are handed over, `out_states` those of the results;
    a loop's carry has the same in both, and a reason in `carried`, by its place.
    """

    plans: tuple[Any, ...]
    operand_states: tuple[State, ...]
    out_states: tuple[State, ...]
    changed: bool
    carried: tuple[reasons.Reason, ...] = ()


PlanInner = Callable[[structure.Part, tuple[State, ...], tuple[int, ...], Any], Any]
Reads = Callable[[structure.Part, tuple[int, ...]], tuple[int, ...]]
"""Returns how a program inside an equation reads its inputs, given how its outputs are read."""


def plan_call(
    eqn: Eqn,
    in_states: tuple[State, ...],
    wants: tuple[int, ...],
    settings: Any,
    inner: PlanInner,
    reads: Reads,
) -> CallPlan:
    """Returns the plans of the programs of one equation."""
    if eqn.primitive.name in structure.LOOPS:
        body = structure.parts(eqn)[-1]
        tested = stop_test(eqn, reads)
        wants = (*carry_reads(body, wants, reads, tested), *wants[body.carries :])
        return _plan_loop(eqn, in_states, wants, settings, inner)
    if structure.has_rules(eqn):
        in_states = tuple(_traced(s) for s in in_states)
    plans = tuple(
        inner(part, tuple(in_states[i] for i in part.operands), wants, settings)
        for part in structure.parts(eqn)
    )
    outs = zip(*(p.out_states for p in plans), strict=True)
    out_states = plans[0].out_states if len(plans) == 1 else tuple(map(states.join, outs))
    return CallPlan(plans, in_states, out_states, any(p.changed for p in plans))


def _traced(state: State) -> State:
    """A custom rule is handed what it was traced with."""
    return states.NEUTRAL if state.kind == Kind.LOW else state


def _plan_loop(
    eqn: Eqn, in_states: tuple[State, ...], wants: tuple[int, ...], settings: Any, inner: PlanInner
) -> CallPlan:
    *conditions, body = structure.parts(eqn)
    given = [in_states[i] for i in body.operands]
    before, is_recurrent = given[body.carried], recurrent(eqn)
    kept = _changed_in_steps(eqn) if STREAM_CARRIES in settings.may else is_recurrent
    entering = list(map(_entering, before, kept))
    of_carries = sum(1 << i for i in range(body.carried.start, body.carried.stop))
    ends = zip(wants, ways.of_program(body.program), strict=True)
    stacked = [w | STACKED if made.all & of_carries else w for w, made in ends][len(entering) :]

    def step(carried: tuple[State, ...]) -> Any:
        given[body.carried] = carried
        return inner(body, tuple(given), (*_carry_wants(carried, wants), *stacked), settings)

    carry, plan = _fixpoint(step, entering)
    operands = dict(enumerate(in_states)) | dict(zip(body.operands, given, strict=True))
    states_in = tuple(operands.values())
    plans = [
        inner(part, tuple(states_in[i] for i in part.operands), (TESTED,), settings)
        for part in conditions
    ]
    out_states = (*carry, *plan.out_states[len(carry) :])
    changed = any(p.changed for p in (*plans, plan))
    carried = tuple(
        reasons.of_carry(b, s, is_recurrent=r)
        for b, s, r in zip(before, carry, is_recurrent, strict=True)
    )
    return CallPlan((*plans, plan), states_in, out_states, changed, carried)


def _fixpoint(
    step: Callable[[tuple[State, ...]], Any], carry: Sequence[State]
) -> tuple[tuple[State, ...], Any]:
    """Returns the states that a loop's carry keeps, and the plan of the body for them."""
    carried = tuple(carry)
    for _ in range(_MAX_PASSES):
        plan = step(carried)
        after = tuple(map(_carried, carried, plan.out_states))
        if after == carried:
            return carried, plan
        carried = after
    carried = tuple(s if s.kind == Kind.FOREIGN else states.WIDE for s in carried)
    return carried, step(carried)


def _carry_wants(carried: Sequence[State], wants: Sequence[int]) -> tuple[int, ...]:
    """Returns how a loop's body is to give each carry: unrounded where it is float32."""
    return tuple(
        FULL | w & UNROUNDED if s.kind == Kind.WIDE else w | CARRIED
        for s, w in zip(carried, wants, strict=False)
    )


def _changed_in_steps(eqn: Eqn) -> list[bool]:
    """Returns, for each carry of a loop, whether it is recurrent and no residual stream."""
    return [
        recurs and not stream_carries.is_stream(eqn, i) for i, recurs in enumerate(recurrent(eqn))
    ]


def _entering(state: State, is_kept: bool) -> State:
    if state.kind == Kind.FOREIGN:
        return state
    if is_kept:
        return states.keep(state)
    return states.WIDE_PURE if state.kind == Kind.CONSTANT else states.unkept(state)


def _carried(before: State, after: State) -> State:
    if before.pure and (after.kind == Kind.LOW or (after.kind == Kind.WIDE and not after.pure)):
        return states.KEPT if before.kept else states.WIDE
    if before.kind in (Kind.FOREIGN, Kind.WIDE):
        return before
    if after.kind == Kind.CONSTANT:
        holds = before.kind == Kind.NEUTRAL or states.fits(after, before.dtype)
        return before if holds else states.WIDE
    if before.kind == Kind.LOW and after != before:
        return states.WIDE
    return states.WIDE if after.kind == Kind.WIDE else after


def operand_reads(
    eqn: Eqn,
    outs: tuple[int, ...],
    inner: Reads,
) -> list[int]:
    """Returns how an equation with programs reads its operands, in the flags of `reads`."""
    wants = [0] * len(eqn.invars)
    tested = stop_test(eqn, inner)
    for part in structure.parts(eqn):
        if part.is_condition:
            continue
        for i, flag in zip(part.operands, _part_reads(part, outs, inner, tested), strict=True):
            wants[i] |= flag
    if eqn.primitive.name in structure.LOOPS:
        body = structure.parts(eqn)[-1]
        for place, kept in zip(body.operands[body.carried], _changed_in_steps(eqn), strict=True):
            wants[place] |= NEAR if kept else 0  # a rounding before the loop may grow in each turn
    if tested and not any(w & TESTED for w in outs):
        wants = [w & ~TESTED for w in wants]  # what is rounded before the loop is so in each turn
    return [w & ~WHOLE for w in wants] if structure.has_rules(eqn) else wants


def _part_reads(
    part: structure.Part, outs: tuple[int, ...], inner: Reads, tested: tuple[int, ...]
) -> list[int]:
    """Returns how one program reads its inputs: in a loop, in any turn."""
    ends = carry_reads(part, outs, inner, tested)
    flags = list(inner(part, (*ends, *outs[part.carries :])))
    flags[part.carried] = [c & ~(WHOLE | AT_THE_END) for c in flags[part.carried]]
    return flags


def stop_test(eqn: Eqn, inner: Reads) -> tuple[int, ...]:
    """Returns the flags that the condition of a `while` sets of its carries; empty without one."""
    for part in structure.parts(eqn):
        if part.is_condition:
            return tuple(w & TESTED for w in inner(part, (TESTED,))[part.carried])
    return ()


def carry_reads(
    part: structure.Part, outs: tuple[int, ...], inner: Reads, tested: tuple[int, ...]
) -> tuple[int, ...]:
    """Returns how the carries that a turn of a loop leaves are read: by the next turn, or behind.

    Args:
      part: the body.
      outs: how the loop's results are read.
      inner: how a program reads its inputs.
      tested: what the loop's condition asks of its carries.
    """
    asked = tested or (0,) * part.carries
    ends = tuple(w & ~AT_THE_END | t for w, t in zip(outs, asked, strict=False))
    while True:
        carried = inner(part, (*ends, *outs[part.carries :]))[part.carried]
        more = tuple(w | c & _NEXT_TURN for w, c in zip(ends, carried, strict=True))
        if more == ends:
            return ends
        ends = more
