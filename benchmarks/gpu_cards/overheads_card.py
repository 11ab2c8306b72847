"""Card 7: what skips, a loss scale, `watch=100` and one diagnosis add to a step."""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
from networks import NETWORKS, Network

import mpjax

from . import clock, kernels, step
from .jobs import Job, Row, attempted, failed
from .plans import Plan
from .programs import Values

WATCH = 100
PLAIN = "f16, no loss scale, no skip"  # a step as one writes it without `make_train_step`
OPTIONS: dict[str, dict[str, Any]] = {
    "f16, no loss scale": {"loss_scale": mpjax.NoOpLossScale()},
    "f16, dynamic loss scale": {},
    f"f16, dynamic, watch={WATCH}": {"watch": WATCH},
}
DIAGNOSE = "diagnose once"


def jobs(plan: Plan, code: str) -> list[Job]:
    """Returns a job a network."""
    return [_job(plan, name, size, code) for name, size in plan.overheads.items()]


def step_of(network: Network, variant: str) -> tuple[Any, Callable[..., Any]]:
    """Returns the train step with one set of options, and what makes its state."""
    if variant == PLAIN:
        return step.plain_step(mpjax.autocast(network.loss, "16-mixed"), step.optimizer())
    made = mpjax.make_train_step(network.loss, step.optimizer(), "16-mixed", **OPTIONS[variant])
    return made, made.init


def _job(plan: Plan, name: str, size: str, code: str) -> Job:
    network = NETWORKS[name](size)
    values = Values(network)
    prepare: dict[str, Callable[[], Any]] = {
        variant: functools.partial(_timed, network, values, variant)
        for variant in (PLAIN, *OPTIONS)
    }

    def measure(prepared: dict[str, Any]) -> dict[str, Row]:
        rows = clock.in_turns(prepared, plan.patience)
        kernels.add_busy(rows, prepared)
        found = attempted(lambda: _diagnosed(network, values))
        return {**rows, DIAGNOSE: failed(found) if isinstance(found, Exception) else found}

    variants = (PLAIN, *OPTIONS, DIAGNOSE)
    return Job(7, name, size, variants, prepare, measure, code, 2 * plan.first_s)


def _timed(network: Network, values: Values, variant: str) -> clock.JaxStep:
    ready = step.timed(network, values, variant, step_of)
    ready.multiple = WATCH if "watch" in variant else 1
    return ready


def _diagnosed(network: Network, values: Values) -> Row:
    """Returns the seconds of a first diagnosis, which compiles, and of a second one."""
    made = mpjax.make_train_step(network.loss, step.optimizer(), "16-mixed", donate=False)
    state = made.init(values.params())
    seconds = []
    for _ in range(2):
        started = time.perf_counter()
        jax.block_until_ready(made.diagnose(state, values.batch()) and state)
        seconds.append(time.perf_counter() - started)
    return {"first_s": seconds[0], "again_s": seconds[1]}
