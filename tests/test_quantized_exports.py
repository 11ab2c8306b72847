"""Programs with products of 8 bits that are exported: for every platform, with sizes left open."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax

PARAMS = {name: np.random.default_rng(i).normal(size=(64, 64)) / 8 for i, name in enumerate("abc")}
PARAMS = {name: value.astype(np.float32) for name, value in PARAMS.items()}
X = np.random.default_rng(3).normal(size=(8, 16, 64)).astype(np.float32)


def loss(params, x):
    for name in "abc":
        x = jax.nn.relu(x @ params[name])
    return jnp.mean(x**2)


@pytest.mark.parametrize("name", ["int8", "float8"])
def test_program_is_exported_for_every_platform_with_a_batch_that_is_left_open(name):
    policy = mpjax.PolicyMap("bf16-mixed", {"*": f"{name}_from_mixed_bfloat16"})
    grad = jax.jit(jax.grad(mpjax.autocast(loss, policy)))
    (batch,) = jax.export.symbolic_shape("batch")
    rows = jax.ShapeDtypeStruct((batch, 16, 64), jnp.float32)
    exported = jax.export.export(grad, platforms=["cpu", "cuda", "tpu"])(PARAMS, rows)
    found, expected = exported.call(PARAMS, X), grad(PARAMS, X)
    for key in PARAMS:
        np.testing.assert_allclose(found[key], expected[key], rtol=0.05, atol=1e-3)
