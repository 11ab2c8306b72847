"""Card 0: how fast the device copies and multiplies, and its clocks before and after."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from . import clock, device
from .jobs import Job, Row
from .plans import Plan
from .programs import compiled, lowered, random

PRODUCT = "bf16 product"
# The dtype of the operands and the precision of the product.
PRODUCTS: dict[str, tuple[Any, str | None]] = {
    PRODUCT: (jnp.bfloat16, None),
    "f16 product": (jnp.float16, None),
    "float32 product": (jnp.float32, None),  # TF32, on a GPU
    "float32 product, highest": (jnp.float32, "highest"),
}
COPY, CLOCKS = "copy", "clocks"


def jobs(plan: Plan, code: str) -> list[Job]:
    """Returns the one job of this card."""
    prepare = {name: functools.partial(_product, plan, name) for name in PRODUCTS}
    prepare[COPY] = functools.partial(_copy, plan)
    variants = (*prepare, CLOCKS)
    return [Job(0, "device", plan.size, variants, prepare, _measure(plan), code, 20.0)]


def _copy(plan: Plan) -> clock.JaxStep:
    shape = (plan.copy_bytes // 4,)
    program, _ = compiled(lambda: lowered(jax.jit(jnp.negative), _spec(shape, jnp.float32)))
    make = random(shape, jnp.float32)
    return clock.JaxStep(program, lambda: (make(),), {"bytes": 2 * plan.copy_bytes})


def _product(plan: Plan, name: str) -> clock.JaxStep:
    dtype, precision = PRODUCTS[name]
    shape = (plan.product, plan.product)
    multiply = jax.jit(functools.partial(jnp.matmul, precision=precision))
    program, _ = compiled(lambda: lowered(multiply, _spec(shape, dtype), _spec(shape, dtype)))
    make = random(shape, dtype)
    return clock.JaxStep(program, lambda: (make(), make()), {"flops": 2 * plan.product**3})


def _spec(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _measure(plan: Plan) -> Any:
    def measure(prepared: dict[str, Any]) -> dict[str, Row]:
        before = device.clocks()
        rows = clock.in_turns(prepared, plan.patience)
        for row in rows.values():
            seconds = row.get("ms", float("nan")) / 1e3
            if "bytes" in row:
                row["gb_s"] = row["bytes"] / seconds / 1e9
            if "flops" in row:
                row["tflops"] = row["flops"] / seconds / 1e12
        return {**rows, CLOCKS: {"before": before, "after": device.clocks()}}

    return measure
