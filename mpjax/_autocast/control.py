"""How states pass through operations that hold programs: calls, loops, branches, custom rules.

Loops are fixpoints: a carry is low only if it is no state (`carries`), starts low or neutral and
leaves the body low. Nothing is bound here; `rebind_calls` does that from the plans found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mpjax import _compat
from mpjax._autocast import states
from mpjax._autocast.carries import kept
from mpjax._autocast.states import Kind, State
from mpjax._autocast.structure import CUSTOM, single_program

# Flags of `reads`, which imports this file.
_OUTPUT, _WHOLE, _FULL, _GRADIENT, _CARRIED = 2, 8, 16, 32, 64
_EXACT, _STACKED = 128, 256
_AT_THE_END = _OUTPUT | _GRADIENT | _EXACT  # what is asked of a loop's last carry, not of each
_MAX_PASSES = 8


@dataclass(slots=True)
class CallPlan:
    """The plans of an equation's programs, and what passes in and out.

    `plans` are in the order of `programs(eqn)`. `operand_states` are those in which operands are
    handed over, `out_states` those of the results; a loop's carry has the same in both.
    """

    plans: tuple[Any, ...]
    operand_states: tuple[State, ...]
    out_states: tuple[State, ...]
    changed: bool


PlanInner = Callable[[Any, tuple[State, ...], tuple[int, ...], Any], Any]


def plan_call(
    eqn: Any, in_states: tuple[State, ...], wants: tuple[int, ...], settings: Any, inner: PlanInner
) -> CallPlan:
    """Returns the plans of the programs of one equation."""
    name = eqn.primitive.name
    if name == "scan":
        return _plan_scan(eqn, in_states, wants, settings, inner)
    if name == "while":
        return _plan_while(eqn, in_states, wants, settings, inner)
    if name == "cond":
        return _plan_cond(eqn, in_states, wants, settings, inner)
    if name in CUSTOM:
        in_states = tuple(_traced(s) for s in in_states)
    plan = inner(single_program(eqn), in_states, wants, settings)
    changed = plan.changed
    return CallPlan((plan,), in_states, plan.out_states, changed)


def _traced(state: State) -> State:
    """A custom rule is handed what it was traced with."""
    return states.NEUTRAL if state.kind == Kind.LOW else state


def _plan_cond(
    eqn: Any, in_states: tuple[State, ...], wants: tuple[int, ...], settings: Any, inner: PlanInner
) -> CallPlan:
    operands = in_states[1:]
    plans = tuple(inner(b, operands, wants, settings) for b in eqn.params["branches"])
    outs = zip(*(p.out_states for p in plans), strict=True)
    out_states = tuple(states.join(found) for found in outs)
    return CallPlan(plans, in_states, out_states, any(p.changed for p in plans))


def _plan_scan(
    eqn: Any, in_states: tuple[State, ...], wants: tuple[int, ...], settings: Any, inner: PlanInner
) -> CallPlan:
    num_consts, num_carry = _compat.scan_counts(eqn.params)
    consts = in_states[:num_consts]
    carry = in_states[num_consts : num_consts + num_carry]
    xs = in_states[num_consts + num_carry :]

    def step(found: tuple[State, ...]) -> Any:
        stacked = (w | _STACKED for w in wants[num_carry:])
        body_wants = (*_carry_wants(found, wants), *stacked)
        return inner(eqn.params["jaxpr"], (*consts, *found, *xs), body_wants, settings)

    carry, plan = _fixpoint(step, _initial(eqn, carry))
    out_states = (*carry, *plan.out_states[num_carry:])
    return CallPlan((plan,), (*consts, *carry, *xs), out_states, plan.changed)


def _plan_while(
    eqn: Any, in_states: tuple[State, ...], wants: tuple[int, ...], settings: Any, inner: PlanInner
) -> CallPlan:
    num_cond, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    cond_consts = in_states[:num_cond]
    body_consts = in_states[num_cond : num_cond + num_body]
    carry = in_states[num_cond + num_body :]

    def step(found: tuple[State, ...]) -> Any:
        body_wants = _carry_wants(found, wants)
        return inner(eqn.params["body_jaxpr"], (*body_consts, *found), body_wants, settings)

    carry, body = _fixpoint(step, _initial(eqn, carry))
    cond = inner(eqn.params["cond_jaxpr"], (*cond_consts, *carry), (0,), settings)
    operands = (*cond_consts, *body_consts, *carry)
    return CallPlan((cond, body), operands, carry, cond.changed or body.changed)


def _fixpoint(
    step: Callable[[tuple[State, ...]], Any], carry: Sequence[State]
) -> tuple[tuple[State, ...], Any]:
    """Returns the states that a loop's carry keeps, and the plan of the body for them."""
    found = tuple(carry)
    for _ in range(_MAX_PASSES):
        plan = step(found)
        after = tuple(map(_carried, found, plan.out_states))
        if after == found:
            return found, plan
        found = after
    found = tuple(s if s.kind == Kind.FOREIGN else states.WIDE for s in found)
    return found, step(found)


def _carry_wants(found: Sequence[State], wants: Sequence[int]) -> tuple[int, ...]:
    """Returns how a loop's body is to give each carry: unrounded where it is float32."""
    return tuple(
        _FULL if s.kind == Kind.WIDE else w & ~_AT_THE_END | _CARRIED
        for s, w in zip(found, wants, strict=False)
    )


def _initial(eqn: Any, carry: Sequence[State]) -> list[State]:
    """The states with which carries enter: what a loop keeps, or adds up, is float32."""
    found = map(_entering, carry, kept(eqn))
    return list(found)


def _entering(state: State, is_kept: bool) -> State:
    if state.kind == Kind.FOREIGN:
        return state
    if is_kept:
        return states.KEPT
    return states.WIDE_PURE if state.kind == Kind.CONSTANT else states.unkept(state)


def _carried(before: State, after: State) -> State:
    if before == states.WIDE_PURE and (after.kind == Kind.LOW or after == states.WIDE):
        return states.WIDE
    if before.kind in (Kind.FOREIGN, Kind.WIDE):
        return before
    if after.kind == Kind.CONSTANT:
        holds = before.kind == Kind.NEUTRAL or states.fits(after, before.dtype)
        return before if holds else states.WIDE
    if before.kind == Kind.LOW and after != before:
        return states.WIDE
    return states.WIDE if after.kind == Kind.WIDE else after


def operand_reads(
    eqn: Any, outs: tuple[int, ...], inner: Callable[[Any, tuple[int, ...]], tuple[int, ...]]
) -> list[int]:
    """Returns how an equation with programs reads its operands, in the flags of `reads`."""
    name = eqn.primitive.name
    if name == "cond":
        branches = [inner(b, outs) for b in eqn.params["branches"]]
        return [0, *(_union(found) for found in zip(*branches, strict=True))]
    if name == "scan":
        num_consts, num_carry = _compat.scan_counts(eqn.params)
        wants = (*(w & ~_AT_THE_END for w in outs[:num_carry]), *outs[num_carry:])
        flags = list(inner(eqn.params["jaxpr"], wants))
        for i in range(num_consts, num_consts + num_carry):
            flags[i] &= ~(_WHOLE | _AT_THE_END)
        return flags
    if name == "while":
        num_cond = eqn.params["cond_nconsts"]
        num_body = eqn.params["body_nconsts"]
        body = inner(eqn.params["body_jaxpr"], tuple(w & ~_AT_THE_END for w in outs))
        carry = [w & ~(_WHOLE | _AT_THE_END) for w in body[num_body:]]
        return [0] * num_cond + [*body[:num_body], *carry]
    flags = list(inner(single_program(eqn), outs))
    return [w & ~_WHOLE for w in flags] if name in CUSTOM else flags


def _union(flags: Sequence[int]) -> int:
    found = 0
    for flag in flags:
        found |= flag
    return found
