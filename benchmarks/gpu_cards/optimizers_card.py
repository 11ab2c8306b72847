"""Card 6: the time of AdamW's update, in float32 and in fewer bits, and the bytes it holds."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from low_precision_steps import FORMS

from mpjax import optim

from . import clock
from .jobs import Job, Row
from .plans import Plan
from .programs import compiled, lowered, random


def jobs(plan: Plan, code: str) -> list[Job]:
    """Returns the one job of this card."""
    forms = list(FORMS)[: plan.most_forms]
    prepare = {form: functools.partial(_timed, plan, form) for form in forms}
    shape = " × ".join(map(str, plan.optimizer_shape))

    def measure(prepared: dict[str, Any]) -> dict[str, Row]:
        return clock.in_turns(prepared, plan.patience)

    return [Job(6, shape, plan.size, tuple(forms), prepare, measure, code, plan.first_s)]


def _timed(plan: Plan, form: str) -> clock.JaxStep:
    dtype, wrap = FORMS[form]
    tx = wrap(optax.adamw(1e-3))
    params = {"up": jax.ShapeDtypeStruct(plan.optimizer_shape, dtype)}
    state = jax.eval_shape(tx.init, params)

    def step(kept: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, kept[1], kept[0])
        return (optax.apply_updates(kept[0], updates), state), jnp.zeros(())

    jitted = jax.jit(step, donate_argnums=0)
    program, facts = compiled(lambda: lowered(jitted, (params, state), params))
    held = optim.bytes_per_parameter(tx, params, grad_dtype=dtype).total
    make = random(plan.optimizer_shape, dtype)
    init = jax.jit(tx.init)

    def start() -> tuple[Any, ...]:
        drawn = {"up": make()}
        return (drawn, init(drawn)), {"up": make()}

    return clock.JaxStep(program, start, {**facts, "bytes_a_parameter": held}, carries=True)
