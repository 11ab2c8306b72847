"""Card 2: a whole training step, in float32, cast by hand and under autocast."""

import functools
import json
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from networks import NETWORKS, Network

import mpjax

from . import clock, kernels
from .jobs import Job, Row, attempted
from .plans import Plan
from .programs import Values, compiled, items, lowered, product_flops

FLOAT32, HIGHEST, HAND, AUTOCAST, AUTOCAST_F16 = VARIANTS = (
    *("float32", "float32 highest", "hand cast bf16", "autocast bf16"),
    "autocast f16",
)
HAND_CUDNN = "hand cast bf16, cuDNN"  # asks for cuDNN's attention by name
ATTENDS = ("transformer", "llama", "bert", "vit")
_PRECISIONS = {HIGHEST: "highest"}
MEMORY = "memory"


def optimizer() -> optax.GradientTransformation:
    """Returns AdamW, as in card 3."""
    return optax.adamw(1e-4)


def plain_step(loss: Any, tx: optax.GradientTransformation) -> tuple[Any, Callable[..., Any]]:
    """Returns a jitted step as one writes it without mpjax, and what makes its state."""

    def step(state: Any, batch: Any) -> Any:
        params, opt_state = state
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    return jax.jit(step, donate_argnums=0), lambda params: (params, tx.init(params))


def step_of(network: Network, variant: str) -> tuple[Any, Callable[..., Any]]:
    """Returns the variant's step, which has a `lower`, and what makes its state of parameters."""
    tx = optimizer()
    if variant in (FLOAT32, HIGHEST):
        return plain_step(network.loss, tx)
    if variant == HAND_CUDNN:
        return plain_step(network.hand_cast_by_cudnn(jnp.bfloat16), tx)
    if variant == HAND:
        return plain_step(network.hand_cast(jnp.bfloat16), tx)
    policy = {AUTOCAST: "bf16-mixed", AUTOCAST_F16: "16-mixed"}[variant]
    step = mpjax.make_train_step(network.loss, tx, policy)
    return step, step.init


def timed(network: Network, values: Values, variant: str, make: Any = step_of) -> clock.JaxStep:
    """Returns the variant, compiled: a donated state goes in and comes out."""
    step, init = make(network, variant)

    def lower() -> Any:
        with jax.default_matmul_precision(_PRECISIONS.get(variant)):
            state = jax.eval_shape(init, network.params)
            return lowered(step, state, network.batch)

    program, facts = compiled(lower)
    values.prepare()
    return clock.JaxStep(
        program, lambda: (init(values.params()), values.batch()), facts, carries=True
    )


def with_rates(rows: dict[str, Row], network: Network, flops: int) -> dict[str, Row]:
    """Adds to each row what a second brings: samples or tokens, and products' operations."""
    count, unit = items(network)
    for row in rows.values():
        if "ms" in row:
            row["per_second"], row["unit"] = count / row["ms"] * 1e3, unit
            row["tflops"] = flops / row["ms"] / 1e9
    return rows


def jobs(plan: Plan, code: str) -> list[Job]:
    """Returns a job for each network, and one that checks how memory is counted."""
    found = [_job(plan, name, size, code) for name, size in plan.steps.items()]
    prepare = {"autocast bf16": lambda: None}
    check = functools.partial(_peaks, plan)
    return [*found, Job(2, MEMORY, plan.size, tuple(prepare), prepare, check, code, 30.0)]


def _job(plan: Plan, name: str, size: str, code: str) -> Job:
    network = NETWORKS[name](size)
    values = Values(network)
    is_gpu = jax.devices()[0].platform != "cpu"
    variants = (*VARIANTS, HAND_CUDNN) if is_gpu and name in ATTENDS else VARIANTS
    prepare: dict[str, Callable[[], Any]] = {
        variant: functools.partial(timed, network, values, variant) for variant in variants
    }
    counted = "products' operations"
    step = jax.value_and_grad(network.loss)
    prepare[counted] = functools.partial(product_flops, step, network.params, network.batch)

    def measure(prepared: dict[str, Any]) -> dict[str, Row]:
        flops = prepared.pop(counted)
        if isinstance(flops, Exception):
            raise flops
        rows = with_rates(clock.in_turns(prepared, plan.patience), network, flops)
        if "ms" in rows[AUTOCAST]:
            spent = attempted(lambda: kernels.by_kind(prepared[AUTOCAST]))
            rows[AUTOCAST]["kernels_ms"] = str(spent) if isinstance(spent, Exception) else spent
        return rows

    return Job(2, name, size, variants, prepare, measure, code, plan.first_s)


def _peaks(plan: Plan, prepared: dict[str, Any]) -> dict[str, Row]:
    """Returns the peak that the device saw in a process of its own, beside what was computed."""
    del prepared
    name, size = list(plan.steps.items())[-1]
    command = [sys.executable, "-m", "gpu_cards.peak", jax.devices()[0].platform, name, size]
    folder = pathlib.Path(__file__).parents[1]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[1:])}: {done.stderr[-300:]}")
    return {AUTOCAST: {"of": name, **json.loads(done.stdout.splitlines()[-1])}}
