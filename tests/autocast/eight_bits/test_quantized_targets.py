"""8-bit products stay 8-bit in what XLA compiles for GPUs and TPUs that are not here."""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _helpers import compiled_for

import mpjax

WIDTH, ROWS = 1024, 2048
E4M3, E5M2 = "f8e4m3fn", "f8e5m2"
FLOAT8 = {("dot", E4M3, E4M3): 1, ("dot", E5M2, E4M3): 1, ("dot", E4M3, E5M2): 1}
INT8 = {("dot", "s8", "s8"): 2}  # wgrad stays 16-bit
ALL_INT8 = {("dot", "s8", "s8"): 3}
DELAYED = mpjax.QuantizedPolicy("bf16-mixed", mpjax.DelayedScaling(amax_history_len=16))
INT8_WGRAD = mpjax.QuantizedPolicy("bf16-mixed", mpjax.Int8CurrentScaling(wgrad="int8"))
_PRODUCT = re.compile(r"= \w+\[[^\]]*\]\S* (?:dot|convolution)\(([^)]*)\)")
_VALUE = re.compile(r"(%?[\w.\-]+) = (\w+)\[")


def three(params, x):
    for name in ("first", "middle", "last"):
        x = jax.nn.relu(x @ params[name])
    return jnp.mean(x**2)


def spec(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


PARAMS = {name: spec(WIDTH, WIDTH) for name in ("first", "middle", "last")}
X = spec(ROWS, WIDTH)


def products_in(text):
    """Returns how many products there are of which operands, of those with an 8-bit one."""
    types = dict(_VALUE.findall(text))
    found: collections.Counter[tuple[str, ...]] = collections.Counter()
    for operands in _PRODUCT.findall(text):
        read = [types[operand.strip().split(" ")[-1]] for operand in operands.split(",")]
        if any(dtype.startswith(("f8", "s8")) for dtype in read):
            found["dot", *read] += 1
    return dict(found)


def eight_bit_products(target, policy):
    """Returns the 8-bit products of loss and gradients of three layers."""
    if policy == DELAYED:
        fast = mpjax.with_amax_history(three, DELAYED)
        history = jax.eval_shape(fast.init, PARAMS, X)
        step = jax.grad(fast.apply, argnums=(0, 1))
        return products_in(compiled_for(target, step, history, PARAMS, X))
    return products_in(compiled_for(target, jax.grad(mpjax.autocast(three, policy)), PARAMS, X))


def there(target, *values):
    """Returns a case that is compiled for a target."""
    compiler = pytest.mark.gpu_compiler if target == "h100" else pytest.mark.tpu_compiler
    return pytest.param(target, *values, marks=[pytest.mark.slow, compiler])


@pytest.mark.parametrize(
    ("target", "policy", "products"),
    [
        there("h100", "float8_from_mixed_bfloat16", FLOAT8),
        there("h100", "int8_from_mixed_bfloat16", INT8),
        there("h100", INT8_WGRAD, ALL_INT8),
        there("h100", DELAYED, FLOAT8),
        there("v6e-4", "float8_from_mixed_bfloat16", FLOAT8),
        there("v6e-4", INT8_WGRAD, ALL_INT8),
        there("v5e-4", "int8_from_mixed_bfloat16", INT8),
        there("tpu7x-8", DELAYED, FLOAT8),
    ],
)
def test_products_are_of_8_bit_operands_forward_and_back(target, policy, products):
    assert eight_bit_products(target, policy) == products


def heads(params, x):
    x = jax.nn.relu(x @ params["first"])
    q, k, v = (x @ params[name] for name in ("middle", "last", "value"))
    return jnp.mean(jax.nn.relu(q * k + v) ** 2)


def stored_in(text):
    """Returns what a program writes to memory: the types of its results, fused ones left out."""
    entry = [line for line in text[text.index("\nENTRY") :].splitlines() if " = " in line]
    return "\n".join(line.partition(" fusion(")[0] for line in entry if " parameter(" not in line)


@pytest.mark.slow
@pytest.mark.gpu_compiler
def test_an_h100_writes_neither_float32_nor_masks_for_a_history():
    def middle(params, x):
        x = jax.nn.gelu(x @ params["first"])
        return jnp.mean((jax.nn.gelu(x @ params["middle"]) @ params["last"]) ** 2)

    everywhere = mpjax.PolicyMap("bf16-mixed", {"*": DELAYED})
    fast = mpjax.with_amax_history(middle, everywhere)
    history = jax.eval_shape(fast.init, PARAMS, X)
    step = jax.grad(fast.apply, argnums=(0, 1))
    made = stored_in(compiled_for("h100", step, history, PARAMS, X))
    assert f"{E4M3}[2048,1024]" in made
    assert "pred[1024,1024]" not in made
    assert made.count("= f32[2048,1024]") == 2  # cotangents, and no activation


@pytest.mark.slow
@pytest.mark.gpu_compiler
@pytest.mark.parametrize("recipe", ["float8", "int8"])
def test_an_h100_stores_no_8_bit_product_in_32_bits(recipe):
    of_heads, images = PARAMS | {"value": spec(WIDTH, WIDTH)}, spec(8, ROWS // 8, WIDTH)
    everywhere = mpjax.PolicyMap("bf16-mixed", {"*": f"{recipe}_from_mixed_bfloat16"})
    text = compiled_for("h100", mpjax.autocast(heads, everywhere), of_heads, images)
    made = stored_in(text)
    assert re.search(r"(?:s8|f8e4m3fn)\[(?:2048|8,256),1024\]", made)
    assert not re.search(r"[sf]32\[(?:2048|8,256),(?:1024|3072)", made)


def forward(params, x):
    for name in ("first", "middle", "last"):
        x = jax.nn.relu(x @ params[name])
    return x


def scanned(params, x):
    return jax.lax.scan(lambda x, w: (jax.nn.relu(x @ w), None), x, params["stack"])[0]


@pytest.mark.parametrize(
    ("target", "name", "fun"),
    [
        there("h100", "int8", forward),
        there("h100", "float8", forward),
        there("h100", "int8", scanned),
        there("v6e-4", "int8", forward),
        there("v6e-4", "int8", scanned),
        there("tpu7x-8", "float8", forward),
    ],
)
def test_stored_weights_are_multiplied_as_they_are(target, name, fun):
    """No product reads what is no 8-bit weight, and none is widened on its way."""
    policy = f"{name}_from_mixed_bfloat16"
    params = {"stack": spec(3, WIDTH, WIDTH)} if fun is scanned else PARAMS
    zeros = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), params)
    small = jax.eval_shape(lambda: mpjax.quantize(zeros, policy))
    everywhere = mpjax.PolicyMap("bf16-mixed", {"*": policy})
    text = compiled_for(target, mpjax.autocast(fun, everywhere), small, X)
    dtype = "s8" if name == "int8" else E4M3
    assert products_in(text) == {("dot", dtype, dtype): 1 if fun is scanned else 3}
    assert not re.search(rf"(?:f32|bf16|f16)\[(?:\d,)?{WIDTH},{WIDTH}\]", text)
