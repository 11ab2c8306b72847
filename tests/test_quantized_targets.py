"""8-bit products stay 8-bit in what XLA compiles for GPUs and TPUs that are not here."""

import collections
import re

import jax
import jax.numpy as jnp
import pytest

import mpjax
from mpjax import pods

WIDTH, ROWS = 1024, 2048
E4M3, E5M2 = "f8e4m3fn", "f8e5m2"
FLOAT8 = {("dot", E4M3, E4M3): 1, ("dot", E5M2, E4M3): 1, ("dot", E4M3, E5M2): 1}
INT8 = {("dot", "s8", "s8"): 2}  # wgrad stays 16-bit
_PRODUCT = re.compile(r"= \w+\[[^\]]*\]\S* (?:dot|convolution)\(([^)]*)\)")
_VALUE = re.compile(r"(%?[\w.\-]+) = (\w+)\[")


def three(params, x):
    for name in ("first", "middle", "last"):
        x = jax.nn.relu(x @ params[name])
    return jnp.mean(x**2)


def eight_bit_products(target, policy):
    """Returns how many products there are of which operands, of those with an 8-bit one."""
    place = jax.sharding.SingleDeviceSharding(pods.get_topology(target).devices[0])

    def spec(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place)

    params = {name: spec(WIDTH, WIDTH) for name in ("first", "middle", "last")}
    step = jax.jit(jax.grad(mpjax.autocast(three, policy)))
    text = step.lower(params, spec(ROWS, WIDTH)).compile().as_text()
    types = dict(_VALUE.findall(text))
    found: collections.Counter[tuple[str, ...]] = collections.Counter()
    for operands in _PRODUCT.findall(text):
        read = [types[operand.strip().split(" ")[-1]] for operand in operands.split(",")]
        if any(dtype.startswith(("f8", "s8")) for dtype in read):
            found["dot", *read] += 1
    return dict(found)


@pytest.mark.slow
@pytest.mark.gpu_compiler
@pytest.mark.parametrize(
    ("policy", "products"),
    [("float8_from_mixed_bfloat16", FLOAT8), ("int8_from_mixed_bfloat16", INT8)],
)
def test_products_of_an_h100_are_of_8_bit_operands_forward_and_back(policy, products):
    assert eight_bit_products("h100", policy) == products


@pytest.mark.slow
@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
    ("target", "policy", "products"),
    [
        ("v6e-4", "float8_from_mixed_bfloat16", FLOAT8),
        ("v5e-4", "int8_from_mixed_bfloat16", INT8),
    ],
)
def test_products_of_a_tpu_are_of_8_bit_operands_forward_and_back(target, policy, products):
    found = eight_bit_products(target, policy)
    assert found == products
