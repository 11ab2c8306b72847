"""What scaling, checking and skipping add to the bytes that a compiled step accesses."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import mpjax

WIDTH, DEPTH = 256, 3
# Extra readings of all gradients in float32. XLA of JAX before 0.12 writes the booleans of
# `isfinite` out where the gradients are in memory already: a quarter of their size, there and back.
OLDER = 0.5 if jax.__version_info__ < (0, 12) else 0.0
ALLOWED = {"bf16-mixed": 1.0, "16-mixed": 1.0 + OLDER, "32-true": 1.0 + OLDER}

pytestmark = pytest.mark.standard_promotion("optax raises a float to the power of an integer count")


def loss_fn(params: Any, batch: Any) -> Any:
    x = batch
    for layer in params:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return jnp.mean(x.astype(jnp.float32) ** 2)


def accessed(step: Any, *args: Any) -> float:
    return jax.jit(step, donate_argnums=0).lower(*args).compile().cost_analysis()["bytes accessed"]


@pytest.mark.parametrize("policy", ALLOWED)
def test_scaling_and_skipping_cost_one_read_of_the_gradients(policy: str):
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    layer = {"w": jnp.ones((WIDTH, WIDTH)), "b": jnp.ones(WIDTH)}
    params, batch = [layer] * DEPTH, jnp.ones((64, WIDTH))
    policies = mpjax.get_policy(policy)

    def plain(state: Any, batch: Any) -> Any:
        def cast_loss(p: Any) -> Any:
            return loss_fn(policies.cast_to_compute(p), policies.cast_to_compute(batch))

        loss, grads = jax.value_and_grad(cast_loss)(state[0])
        updates, opt_state = tx.update(grads, state[1], state[0])
        return (optax.apply_updates(state[0], updates), opt_state), loss

    step = mpjax.make_train_step(loss_fn, tx, policy, donate=False)
    base = accessed(plain, (params, tx.init(params)), batch)
    added = accessed(step, step.init(params), batch) - base
    gradients = 4 * DEPTH * WIDTH * (WIDTH + 1)
    assert added <= ALLOWED[policy] * gradients + 0.01 * base
