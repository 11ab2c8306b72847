"""The ways of running one network that are compared, each made from its plain float32 loss."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import mpjax
from mpjax._jaxpr.op_rules import OP_RULES, OpClass

Loss = Callable[[Any, Any], Any]
POLICIES = {"bf16": "bf16-mixed", "f16": "16-mixed"}
INSIDE = "gradient inside"
"""Autocast around the gradient too. Its loss is that of "autocast": it is compiled and timed."""
DTYPES = {"bf16": jnp.bfloat16, "f16": jnp.float16}


def f32(network: Any, dtype: str) -> Loss:
    """Returns the plain model."""
    del dtype
    return network.loss


def hand_cast(network: Any, dtype: str) -> Loss:
    """Returns the model with `dtype=` written into its modules."""
    return network.hand_cast(DTYPES[dtype])


def hand_cast_cudnn(network: Any, dtype: str) -> Loss:
    """Returns the hand cast that asks JAX for cuDNN's attention; it compiles for GPUs alone."""
    return network.hand_cast_by_cudnn(DTYPES[dtype])


def autocast(network: Any, dtype: str) -> Loss:
    """Returns the plain model under `mpjax.autocast`."""
    return mpjax.autocast(network.loss, POLICIES[dtype])


def widest(network: Any, dtype: str) -> Loss:
    """Returns it under PyTorch's rule: a float32 operand wins over a low one."""
    return mpjax.autocast(network.loss, POLICIES[dtype], rules="widest")


def products_only(network: Any, dtype: str) -> Loss:
    """Returns it with low products and nothing else low: what follows them reads float32."""
    rules = {r.primitive: "full" for r in OP_RULES.values() if r.op_class is OpClass.FOLLOW}
    return mpjax.autocast(network.loss, POLICIES[dtype], rules=rules)


def int8(network: Any, dtype: str) -> Loss:
    """Returns it with int8 products: forward and for the input's gradient."""
    return mpjax.autocast(network.loss, mpjax.QuantizedPolicy(POLICIES[dtype], "int8"))


def float8(network: Any, dtype: str) -> Loss:
    """Returns it with float8 products, a scale a tensor."""
    return mpjax.autocast(network.loss, mpjax.QuantizedPolicy(POLICIES[dtype], "float8"))


def value_and_grad(variant: str, network: Any, dtype: str) -> Callable[..., Any]:
    """Returns the value and the gradient of a variant's loss: a function of `params, batch`."""
    if variant == INSIDE:
        return mpjax.autocast(jax.value_and_grad(network.loss), POLICIES[dtype])
    return jax.value_and_grad(VARIANTS[variant](network, dtype))


VARIANTS: dict[str, Callable[[Any, str], Loss]] = {
    "f32": f32,
    "hand-cast": hand_cast,
    "hand-cast cuDNN": hand_cast_cudnn,
    "autocast": autocast,
    INSIDE: autocast,
    "widest": widest,
    "products only": products_only,
    "int8": int8,
    "float8": float8,
}
ANYWHERE = [name for name in VARIANTS if name not in ("hand-cast cuDNN", INSIDE)]
