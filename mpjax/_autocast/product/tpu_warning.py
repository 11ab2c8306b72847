"""Warns when a program that multiplies float16 is lowered for a TPU, which gains nothing by it.

The platform is known when a program is lowered. To ask while tracing would start a backend, and
could be about another device.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from mpjax._hardware import check_policy
from mpjax._policies.policy import get_policy

_FLOAT16 = jnp.dtype(jnp.float16)


def lower_operand(ctx: Any, x: Any) -> list[Any]:
    """Lowers an operand of a product to itself."""
    if ctx.avals_in[0].dtype == _FLOAT16 and "tpu" in ctx.module_context.platforms:
        check_policy(get_policy("16-mixed"), "tpu", where="autocast")
    return [x]
