"""Where values are stored low: what a plan's steps leave, and what their backward pass keeps."""

import jax
import jax.numpy as jnp
from jax import lax

from mpjax._autocast import autocast


def test_a_group_keeps_its_statistics_and_no_wide_copies_of_what_is_small():
    def loss(x, w, rows):
        def step(state, row):
            state = 0.9 * state + row[:, None] * jnp.exp(row)[:, None]
            return state, jnp.sum(state, -1)

        _, sums = lax.scan(step, jnp.zeros((32, 64)), rows @ w)
        return jnp.sum((sums @ w) ** 2)

    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 32), (32, 32), (16, 32))]
    grad = jax.make_jaxpr(jax.grad(autocast(loss, "bf16-mixed"), argnums=1))(*args)
    forward = next(e for e in grad.jaxpr.eqns if e.primitive.name == "scan")
    stacked = [v.aval for v in forward.outvars[1:]]  # behind the carry
    assert {a.dtype.name for a in stacked} == {"bfloat16"}
