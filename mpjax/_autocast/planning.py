"""Makes the plan of a program: decides dtypes, then arranges equations into steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mpjax._autocast.arrange import groups, handed, plan
from mpjax._autocast.arrange.plan import Plan
from mpjax._autocast.attention import steps as attention_steps
from mpjax._autocast.attention import under_plan
from mpjax._autocast.copies import same
from mpjax._autocast.decide import read_flags
from mpjax._autocast.decide.decided import NOTHING, Action, Decided, Decision, Outside, Settings
from mpjax._autocast.decide.equations import Decider
from mpjax._autocast.decide.reasons import Reason
from mpjax._autocast.decide.states import State
from mpjax._autocast.eight_bits import quantized
from mpjax._base import compat
from mpjax._jaxpr.caches import by_identity, by_program


def make_plan(
    jaxpr: Any,
    in_states: tuple[State, ...],
    out_reads: tuple[int, ...],
    settings: Settings,
    outside: Outside = NOTHING,
) -> Plan:
    """Returns the plan of a jaxpr: decided as a whole, then arranged.

    Args:
      jaxpr: the program, closed or not. The plan refers to it weakly: the caller keeps it alive.
      in_states: the state of each input.
      out_reads: for each output, the flags of `read_flags` that tell how it is read outside.
      settings: the user's options.
      outside: what is known of the inputs beside, by default nothing.
    """
    return arranged(decide(jaxpr, in_states, out_reads, settings, outside))


def plan_alike(
    jaxpr: Any, in_states: tuple[State, ...], out_reads: tuple[int, ...], settings: Settings
) -> Plan:
    """Returns the plan of a whole program, in which equal values are decided alike.

    Arguments are those of `make_plan`.
    """
    decided, asked = decide(jaxpr, in_states, out_reads, settings, NOTHING), same.NOTHING
    while more := same.asked(decided) - asked:  # equal values were decided differently: again
        asked |= more
        alike = replace(settings, asked=asked)
        decided = decide(jaxpr, in_states, out_reads, alike, NOTHING)
    return arranged(decided)


def decide(
    jaxpr: Any,
    in_states: tuple[State, ...],
    out_reads: tuple[int, ...],
    settings: Settings,
    outside: Outside,
) -> Decided:
    """Returns the decisions about a jaxpr, and about the programs inside it."""
    opened = compat.closed(jaxpr).jaxpr
    products = quantized.QuantizedProducts(opened, settings.policy, settings.given)
    return Decider(jaxpr, in_states, out_reads, settings, outside).run(products, decide_inner)


decide_inner = by_program(decide)
"""`decide`, memoised: about a program inside another it is decided more than once, so that without
this the time would be exponential in the depth of nested loops."""


@by_identity
def arranged(decided: Decided) -> Plan:
    """Returns the plan that carries out decisions, also those about the programs inside."""
    closed, decisions = decided.jaxpr, list(map(_carried_out, decided.decisions))
    fused = [d.action is Action.FUSED for d in decisions]
    multiplied = frozenset(v for v, read in decided.reads.items() if read & read_flags.PRODUCT)
    steps = groups.schedule(closed.jaxpr, fused, decided.states, decided.out_states, multiplied)
    steps = attention_steps.attended(closed.jaxpr, closed.consts, decisions, decided.states, steps)
    steps = handed.on(closed.jaxpr, steps, decided.states, decided.out_states)
    return plan.of(decided, decisions, steps)


def _carried_out(decision: Decision) -> Decision:
    """Returns a decision with the plans of programs inside, and with the kernel of an attention."""
    if decision.call is not None:
        inner = tuple(map(arranged, decision.call.programs))
        return replace(decision, call=replace(decision.call, programs=inner))
    if decision.action is Action.ATTENTION:
        return replace(decision, reason=Reason(under_plan.where(decision.eqn, decision.low)))
    return decision
