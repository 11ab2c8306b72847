"""Card 5: whole training steps with float8 and int8 products beside bfloat16."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from networks import NETWORKS, Network

import mpjax

from . import clock, step
from .jobs import Job, Row
from .plans import Plan
from .programs import Values, product_flops

POLICIES: dict[str, Any] = {
    "bf16": "bf16-mixed",
    "float8": "float8_from_mixed_bfloat16",
    "float8, delayed": mpjax.QuantizedPolicy("bf16-mixed", mpjax.DelayedScaling()),
    "int8": "int8_from_mixed_bfloat16",
}


def jobs(plan: Plan, code: str) -> list[Job]:
    """Returns a job a network."""
    return [_job(plan, name, size, code) for name, size in plan.eight_bits.items()]


def step_of(values: Values, network: Network, variant: str) -> tuple[Any, Callable[..., Any]]:
    """Returns the train step of a policy, and what makes its state."""
    made = mpjax.make_train_step(network.loss, step.optimizer(), POLICIES[variant])
    batch = values.batch()
    return made, lambda params: made.init(params, batch=batch)


def _job(plan: Plan, name: str, size: str, code: str) -> Job:
    network = NETWORKS[name](size)
    values = Values(network)
    make = functools.partial(step_of, values)
    prepare: dict[str, Callable[[], Any]] = {
        variant: functools.partial(step.timed, network, values, variant, make)
        for variant in POLICIES
    }

    def measure(prepared: dict[str, Any]) -> dict[str, Row]:
        flops = product_flops(jax.value_and_grad(network.loss), network.params, network.batch)
        return step.with_rates(clock.in_turns(prepared, plan.patience), network, flops)

    return Job(5, name, size, tuple(POLICIES), prepare, measure, code, plan.first_s)
