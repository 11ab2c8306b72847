"""Programs in one form: a rounding that rounds nothing is a copy, and what is saved may be low."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import mpjax
from mpjax._jaxpr.one_form import in_one_form


@pytest.mark.parametrize(
    ("dtype", "bits", "name"),
    [
        (jnp.float32, (8, 23), "copy"),
        (jnp.float32, (11, 52), "copy"),
        (jnp.float32, (8, 22), "reduce_precision"),
        (jnp.float32, (7, 23), "reduce_precision"),
        (jnp.bfloat16, (8, 7), "copy"),
        (jnp.bfloat16, (8, 6), "reduce_precision"),
        (jnp.float16, (5, 10), "copy"),
        (jnp.float16, (5, 9), "reduce_precision"),
    ],
)
@pytest.mark.parametrize("cut", [lambda fun: fun, jax.jit, jax.checkpoint])
def test_a_rounding_to_all_the_bits_that_a_value_has_is_a_copy(dtype, bits, name, cut):
    jaxpr = jax.make_jaxpr(cut(lambda x: lax.reduce_precision(x, *bits)))(jnp.ones(3, dtype))
    found = str(in_one_form(jaxpr))
    assert name in found
    assert ("copy" in found) != ("reduce_precision" in found)


def test_a_checkpoint_with_a_policy_saves_low_values_where_the_program_takes_its_gradient():
    layer = jax.checkpoint(
        lambda x, w: jax.nn.gelu(x @ w), policy=jax.checkpoint_policies.dots_saveable
    )

    def loss(ws, x):
        for w in ws:
            x = layer(x, w)
        return jnp.mean(x**2)

    ws, x = [jnp.ones((8, 8))] * 3, jnp.ones((64, 8))
    jaxpr = jax.make_jaxpr(mpjax.autocast(jax.grad(loss), "bf16-mixed"))(ws, x)
    made = {v for e in jaxpr.eqns if e.primitive.name == "dot_general" for v in e.outvars}
    kept = [v for e in jaxpr.eqns if "remat" in e.primitive.name for v in e.invars]
    products = [v for v in kept if v.aval.shape == (64, 8) and v not in jaxpr.jaxpr.invars]
    assert products
    assert sum(v.aval.dtype == jnp.bfloat16 for v in products) >= 3
    assert not made & set(products)  # float32 sums
