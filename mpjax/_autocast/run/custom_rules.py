"""Runs `custom_jvp` and `custom_vjp` functions with their own rules, on the dtypes of their author.

The function, its rule and its backward pass are each wrapped: when called, the wrapper traces the
callable, plans it, and runs the plan; inputs and outputs have the dtypes that they had.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from mpjax._autocast.arrange.plan import Plan
from mpjax._autocast.copies import gradients
from mpjax._autocast.decide.decided import Settings, initial_state
from mpjax._autocast.planning import make_plan
from mpjax._autocast.product import precision
from mpjax._base import compat
from mpjax._jaxpr.equation import Eqn
from mpjax._jaxpr.rule_traces import RuleTrace

Interpreter = Any
"""`run.interpreter.Interpreter`, which imports this file."""


def run(runner: Interpreter, eqn: Eqn, plan: Plan, arrays: Sequence[Any]) -> list[Any]:
    """Returns the results of a function with custom rules, in float32."""
    asked, settings = gradients.of_rules(plan), replace(plan.settings, in_rule=True)

    def wrap(fun: Callable[..., Any]) -> Callable[..., Any]:
        return keeping_types(runner, fun, asked, settings)

    return list(compat.bind_custom(eqn, arrays, wrap))


def keeping_types(
    runner: Interpreter, fun: Callable[..., Any], asked: gradients.OfRules, settings: Settings
) -> Callable[..., Any]:
    """Returns `fun` with products on low operands, and with the dtypes of `fun` in and out.

    Args:
      runner: runs its plan.
      fun: a function with rules, or one of its rules.
      asked: what is asked of it.
      settings: with which `fun` is planned.
    """

    def wrapped(*args: Any) -> Any:
        with precision.left_open(settings.float32_precision):
            traced = RuleTrace(fun, args)
        jaxpr = traced.jaxpr
        in_states = tuple(initial_state(v.aval) for v in jaxpr.jaxpr.invars)
        wants = asked.reads(jaxpr)
        all_asked = settings.asked | asked.asked(jaxpr)
        planned = make_plan(jaxpr, in_states, wants, replace(settings, asked=all_asked))
        full_states = [initial_state(v.aval) for v in jaxpr.jaxpr.outvars]
        return traced.rebuild(runner.run(planned, traced.arrays, out_states=full_states))

    return wrapped
