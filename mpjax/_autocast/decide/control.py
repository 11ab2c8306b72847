"""Passes states through operations that hold programs: calls, loops, branches, custom rules.

Loops are fixpoints: a carry is low only if it is not kept (`carries`), starts low or neutral and
leaves the body low. Nothing is bound here; `run/calls` does that from what is decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mpjax._autocast.decide import reasons, states
from mpjax._autocast.decide.may import STREAM_CARRIES, stream_carries
from mpjax._autocast.decide.must.carries import recurrent
from mpjax._autocast.decide.read_flags import (
    ABSOLUTE,
    ACCUMULATOR,
    AT_THE_END,
    CARRIED,
    DIVIDED,
    FORWARD,
    LATER,
    NEAR,
    PROPORTION,
    RELATIVE,
    SCALED,
    SOLUTION,
    STACKED,
    TESTED,
    UNROUNDED,
    WHOLE,
)
from mpjax._autocast.decide.states import Kind, State
from mpjax._autocast.known import iterations, ways
from mpjax._jaxpr import structure
from mpjax._jaxpr.equation import Eqn

_MAX_PASSES = 8
_ANY_NUMBER = 2**31  # less than infinity: no number of turns makes a `tanh` forget nothing
_NEXT_TURN = UNROUNDED | ABSOLUTE | SOLUTION | RELATIVE | PROPORTION | LATER | FORWARD
"""Flags that the next turn of a loop sets of a carry hold for the turn that leaves it."""

_OF_SUMS = UNROUNDED | SOLUTION | RELATIVE | PROPORTION | DIVIDED | SCALED
"""Flags that a reader behind a loop sets of what a turn adds to a carry in float32."""


@dataclass(frozen=True, slots=True)
class DecidedCall:
    """The decisions about an equation's programs, and the states that pass in and out.

    `programs` are in the order of `structure.parts`: a `Decided` each, in a plan the `Plan` that
    `planning.arranged` makes of it. `operand_states` are those in which operands are handed over,
    `out_states` those of the results; a loop's carry has the same in both, and a reason in
    `carried`, by its place.
    """

    programs: tuple[Any, ...]
    operand_states: tuple[State, ...]
    out_states: tuple[State, ...]
    changed: bool
    carried: tuple[reasons.Reason, ...] = ()


DecideInner = Callable[[structure.Part, tuple[State, ...], tuple[int, ...], Any], Any]
InnerReads = Callable[[structure.Part, tuple[int, ...]], tuple[int, ...]]
"""Returns how a program inside an equation reads its inputs, given how its outputs are read."""


def decide_call(
    eqn: Eqn,
    in_states: tuple[State, ...],
    out_reads: tuple[int, ...],
    settings: Any,
    inner: DecideInner,
    inner_reads: InnerReads,
) -> DecidedCall:
    """Returns what is decided about the programs of one equation."""
    if eqn.primitive.name in structure.LOOPS:
        body = structure.parts(eqn)[-1]
        tested = stop_test(eqn, inner_reads)
        ends = carry_reads(eqn, body, out_reads, inner_reads, tested)
        out_reads = (*ends, *out_reads[body.carries :])
        return _decide_loop(eqn, in_states, out_reads, settings, inner)
    if structure.has_rules(eqn):
        in_states = tuple(_traced(s) for s in in_states)
    made = tuple(
        inner(part, tuple(in_states[i] for i in part.operands), out_reads, settings)
        for part in structure.parts(eqn)
    )
    outs = zip(*(p.out_states for p in made), strict=True)
    out_states = made[0].out_states if len(made) == 1 else tuple(map(states.join, outs))
    return DecidedCall(made, in_states, out_states, any(p.changed for p in made))


def _traced(state: State) -> State:
    """A custom rule is handed what it was traced with."""
    return states.NEUTRAL if state.kind == Kind.LOW else state


def _decide_loop(
    eqn: Eqn,
    in_states: tuple[State, ...],
    out_reads: tuple[int, ...],
    settings: Any,
    inner: DecideInner,
) -> DecidedCall:
    *conditions, body = structure.parts(eqn)
    given = [in_states[i] for i in body.operands]
    for i in _read_once(eqn, body):
        given[i] = states.as_held(given[i])
    before, is_recurrent = given[body.carried], recurrent(eqn)
    kept = _changed_in_steps(eqn) if STREAM_CARRIES in settings.may else is_recurrent
    entering = list(map(_entering, before, kept))
    of_carries = sum(1 << i for i in range(body.carried.start, body.carried.stop))
    ends = zip(out_reads, ways.of_program(body.program), strict=True)
    stacked = [r | STACKED if made.all & of_carries else r for r, made in ends][len(entering) :]

    def step(carried: tuple[State, ...]) -> Any:
        given[body.carried] = carried
        return inner(body, tuple(given), (*_body_reads(carried, out_reads), *stacked), settings)

    carry, turn = _fixpoint(step, entering)
    operands = dict(enumerate(in_states)) | dict(zip(body.operands, given, strict=True))
    states_in = tuple(operands.values())
    asked = [
        inner(part, tuple(states_in[i] for i in part.operands), (TESTED,), settings)
        for part in conditions
    ]
    out_states = (*carry, *turn.out_states[len(carry) :])
    changed = any(p.changed for p in (*asked, turn))
    carried = tuple(
        reasons.of_carry(b, s, is_recurrent=r)
        for b, s, r in zip(before, carry, is_recurrent, strict=True)
    )
    return DecidedCall((*asked, turn), states_in, out_states, changed, carried)


def _read_once(eqn: Eqn, body: structure.Part) -> list[int]:
    """Returns the places of a body's inputs whose cotangents no derivative adds up over turns.

    Such are what a scan cuts into turns, and all of a `while`, which has no backward pass. One that
    was widened enters as it was held: a stack of layers is not copied in float32.
    """
    cut = range(body.carried.stop, len(body.operands))
    return [*cut] if eqn.primitive.name == "scan" else [*range(body.carried.start), *cut]


def _fixpoint(
    step: Callable[[tuple[State, ...]], Any], carry: Sequence[State]
) -> tuple[tuple[State, ...], Any]:
    """Returns the states that a loop's carry keeps, and what is decided about the body for them."""
    carried = tuple(carry)
    for _ in range(_MAX_PASSES):
        turn = step(carried)
        after = tuple(map(_carried, carried, turn.out_states))
        if after == carried:
            return carried, turn
        carried = after
    carried = tuple(s if s.kind == Kind.FOREIGN else states.WIDE for s in carried)
    return carried, step(carried)


def _body_reads(carried: Sequence[State], out_reads: Sequence[int]) -> tuple[int, ...]:
    """Returns how a loop's body is to give each carry: unrounded where it is float32."""
    return tuple(
        ACCUMULATOR | r & _OF_SUMS if s.kind == Kind.WIDE else r | CARRIED
        for s, r in zip(carried, out_reads, strict=False)
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
        return states.kept(state)
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
    out_reads: tuple[int, ...],
    inner_reads: InnerReads,
) -> list[int]:
    """Returns how an equation with programs reads its operands, in the flags of `read_flags`."""
    reads = [0] * len(eqn.invars)
    tested = stop_test(eqn, inner_reads)
    for part in structure.parts(eqn):
        if part.is_condition:
            continue
        of_part = _part_reads(eqn, part, out_reads, inner_reads, tested)
        for i, read in zip(part.operands, of_part, strict=True):
            reads[i] |= read
    if eqn.primitive.name in structure.LOOPS:
        body = structure.parts(eqn)[-1]
        for place, kept in zip(body.operands[body.carried], _changed_in_steps(eqn), strict=True):
            reads[place] |= NEAR if kept else 0  # a rounding before the loop may grow in each turn
    if tested and not any(r & TESTED for r in out_reads):
        reads = [r & ~TESTED for r in reads]  # what is rounded before the loop is so in each turn
    return [r & ~WHOLE for r in reads] if structure.has_rules(eqn) else reads


def _part_reads(
    eqn: Eqn,
    part: structure.Part,
    out_reads: tuple[int, ...],
    inner_reads: InnerReads,
    tested: tuple[int, ...],
) -> list[int]:
    """Returns how one program reads its inputs: in a loop, in any turn."""
    ends = carry_reads(eqn, part, out_reads, inner_reads, tested)
    reads = list(inner_reads(part, (*ends, *out_reads[part.carries :])))
    reads[part.carried] = [r & ~(WHOLE | AT_THE_END) for r in reads[part.carried]]
    return reads


def stop_test(eqn: Eqn, inner_reads: InnerReads) -> tuple[int, ...]:
    """Returns how the condition of a `while` reads its carries; empty without one."""
    for part in structure.parts(eqn):
        if part.is_condition:
            return tuple(r & TESTED for r in inner_reads(part, (TESTED,))[part.carried])
    return ()


def carry_reads(
    eqn: Eqn,
    part: structure.Part,
    out_reads: tuple[int, ...],
    inner_reads: InnerReads,
    tested: tuple[int, ...],
) -> tuple[int, ...]:
    """Returns how the carries that a turn of a loop leaves are read: by the next turn, or behind.

    Args:
      eqn: the loop.
      part: its body.
      out_reads: how the loop's results are read.
      inner_reads: how a program reads its inputs.
      tested: how the loop's condition reads its carries.
    """
    by_test = tested or (0,) * part.carries
    ends = tuple(r & ~AT_THE_END | t for r, t in zip(out_reads, by_test, strict=False))
    turns = _most_turns(eqn)
    if turns >= iterations.LEAST:
        long = iterations.least_turns(part.program, part.carried.start, part.carries)
        ends = tuple(r | SOLUTION if turns >= n else r for r, n in zip(ends, long, strict=True))
    while True:
        carried = inner_reads(part, (*ends, *out_reads[part.carries :]))[part.carried]
        more = tuple(r | c & _NEXT_TURN for r, c in zip(ends, carried, strict=True))
        if more == ends:
            return ends
        ends = more


def _most_turns(eqn: Eqn) -> float:
    """Returns how many turns a loop may have: any number for a `while`, or a symbolic length."""
    length = eqn.params.get("length")
    return length if isinstance(length, int) else _ANY_NUMBER
