"""Makes the plan of a program: decides, then arranges what runs together."""

from __future__ import annotations

from typing import Any

from mpjax._autocast.arrange import groups, plan
from mpjax._autocast.arrange.plan import Plan
from mpjax._autocast.attention import steps as attention_steps
from mpjax._autocast.attention import under_plan
from mpjax._autocast.decide import facts, reads
from mpjax._autocast.decide.decided import Action, Decided, Settings
from mpjax._autocast.decide.equations import decide
from mpjax._autocast.decide.must import steps
from mpjax._autocast.decide.states import State
from mpjax._autocast.eight_bits import quantized
from mpjax._base import compat
from mpjax._jaxpr.caches import by_program


def make_plan(
    jaxpr: Any,
    in_states: tuple[State, ...],
    wants: tuple[int, ...],
    settings: Settings,
    given: tuple[facts.Fact, ...] | None = None,
    relations: steps.Relations = frozenset(),
) -> Plan:
    """Returns the plan of a jaxpr.

    Args:
      jaxpr: the program, closed or not; whoever runs the plan has to hold it.
      in_states: of its inputs.
      wants: how each output is read outside, in the flags of `reads`.
      settings: what the user asked for.
      given: what is known of its inputs, by default nothing.
      relations: which of them were computed of which others.
    """
    opened = compat.closed(jaxpr).jaxpr
    products = quantized.QuantizedProducts(opened, settings.policy, settings.given)
    return arranged(
        decide(
            jaxpr,
            in_states,
            wants,
            settings,
            given,
            relations,
            products=products,
            inner=plan_inner,
        )
    )


plan_inner = by_program(make_plan)
"""Memoised for programs inside others, or nested loops would cost exponentially."""


def arranged(decided: Decided) -> Plan:
    """Returns the plan that runs what was decided."""
    closed, decisions = decided.jaxpr, decided.decisions
    for decision in decisions:
        if decision.action is Action.ATTENTION:
            decision.reason = under_plan.where(decision.eqn, decision.low)
    fused = [d.action is Action.FUSED for d in decisions]
    multiplied = frozenset(v for v, want in decided.reads.items() if want & reads.PRODUCT)
    steps = groups.schedule(closed.jaxpr, fused, decided.states, decided.out_states, multiplied)
    steps = attention_steps.attended(closed.jaxpr, closed.consts, decisions, decided.states, steps)
    return plan.of(decided, steps)
