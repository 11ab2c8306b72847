"""What scaling, checking and skipping add to the bytes that a compiled step accesses."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import mpjax
from mpjax._autocast import autocast

WIDTH, DEPTH = 256, 3
# Extra readings of all gradients in float32. XLA of JAX before 0.12 writes the booleans of
# `isfinite` out where the gradients are in memory already (a quarter of their size, there and
# back), and the unscaled gradients too, where 0.12 repeats the division in each fusion.
OLDER = jax.__version_info__ < (0, 12)
PLAIN, SCALED = (1.5, 3.5) if OLDER else (1.0, 1.0)

pytestmark = pytest.mark.standard_promotion("optax raises a float to the power of an integer count")


def loss_fn(params: Any, batch: Any) -> Any:
    x = batch
    for layer in params:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return jnp.mean(x.astype(jnp.float32) ** 2)


def accessed(step: Any, *args: Any) -> float:
    return jax.jit(step, donate_argnums=0).lower(*args).compile().cost_analysis()["bytes accessed"]


@pytest.mark.parametrize(
    ("policy", "loss_scale", "allowed"),
    [
        ("32-true", None, PLAIN),
        ("32-true", mpjax.DynamicLossScale(), SCALED),
        ("bf16-mixed", None, PLAIN),
        ("16-mixed", None, SCALED),
    ],
)
def test_scaling_and_skipping_cost_one_read_of_the_gradients(
    policy: str, loss_scale: Any, allowed: float
):
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    layer = {"w": jnp.ones((WIDTH, WIDTH)), "b": jnp.ones(WIDTH)}
    params, batch = [layer] * DEPTH, jnp.ones((64, WIDTH))

    def plain(state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(autocast(loss_fn, policy))(state[0], batch)
        updates, opt_state = tx.update(grads, state[1], state[0])
        return (optax.apply_updates(state[0], updates), opt_state), loss

    step = mpjax.make_train_step(loss_fn, tx, policy, loss_scale=loss_scale, donate=False)
    base = accessed(plain, (params, tx.init(params)), batch)
    added = accessed(step, step.init(params), batch) - base
    gradients = 4 * DEPTH * WIDTH * (WIDTH + 1)
    assert added <= allowed * gradients + 0.01 * base
