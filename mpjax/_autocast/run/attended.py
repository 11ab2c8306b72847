"""Runs the attentions of a plan: patterns of equations, and calls of `dot_product_attention`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpjax._autocast.arrange.plan import Plan
from mpjax._autocast.attention import primitives
from mpjax._autocast.attention.steps import Attended
from mpjax._autocast.decide import states
from mpjax._autocast.known.named_attention import MULTIPLIED, is_backward, operands_low
from mpjax._autocast.run.values import Value
from mpjax._jaxpr import binding


def run_named(decision: Any, values: Sequence[Any]) -> list[Any]:
    """Returns the results of a `dot_product_attention` on low operands."""
    eqn = decision.eqn
    arrays = [
        value.low(decision.low) if is_low else value.full
        for value, is_low in zip(values, operands_low(eqn), strict=True)
    ]
    if is_backward(eqn):
        return primitives.backward(*arrays, **eqn.params)
    return list(primitives.attention(eqn.params["program"], *arrays))


def run(runner: Any, plan: Plan, one: Attended, env: dict[Any, Value]) -> None:
    """Adds the result of a pattern of equations that is an attention to the values of a plan."""
    values = [env[v] for v in one.inputs]
    arrays = [v.low(one.low) if i < MULTIPLIED else v.made for i, v in enumerate(values)]
    eqn = plan.decisions[one.last].eqn
    programs = runner.functions.attentions
    if one.key not in programs:  # equal attentions share a program, which JAX traces once
        programs[one.key] = one.read.program(_form(runner, plan, one), eqn)
    with binding.written_at(eqn):
        out, _ = primitives.attention(programs[one.key], *arrays)
    (var,) = eqn.outvars
    env[var] = Value(out, plan.states[var])


def _form(runner: Any, plan: Plan, one: Attended) -> Callable[..., Any]:
    """Returns XLA's form of an attention: the steps as a function of the attention's inputs."""
    in_states = [
        states.low(one.low) if i < MULTIPLIED else plan.states[v] for i, v in enumerate(one.inputs)
    ]

    def form(*arrays: Any) -> tuple[Any, Any]:
        given = zip(one.inputs, arrays, in_states, strict=True)
        env = {v: Value(x, state) for v, x, state in given}
        for step in one.steps:
            if step.group is not None:
                runner.run_group(plan, step.group, env)
            else:
                runner.run_one(plan, plan.decisions[step.members[0]], env)
        out = env[plan.decisions[one.last].eqn.outvars[0]].made
        return out, one.read.rows({v: value.full for v, value in env.items()})

    return form
