"""What scaling, checking and skipping add to the bytes that a compiled step accesses."""

import jax
import jax.numpy as jnp
import optax
import pytest

import mpjax
from mpjax import autocast

WIDTH, DEPTH = 256, 3
# The budget: one reading of all gradients in float32, and 1 % of the step.
READS, SHARE = 1.0, 0.01

pytestmark = pytest.mark.standard_promotion("optax raises a float to the power of an integer count")


def loss_fn(params, batch):
    x = batch
    for layer in params:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return jnp.mean(x.astype(jnp.float32) ** 2)


def cast_by_hand(policy):
    cast = mpjax.get_policy(policy).cast_to_compute
    return lambda params, batch: loss_fn(cast(params), cast(batch))


def wrapped(loss, tx, policy, loss_scale, params):
    tx = mpjax.with_loss_scale(tx, loss_scale or mpjax.get_loss_scale(policy))

    def step(state, batch):
        scale = mpjax.current_loss_scale(state[1])
        value_and_grad = mpjax.value_and_grad(loss, loss_scale=scale)
        value, grads = value_and_grad(state[0], batch)
        updates, opt_state = tx.update(grads, state[1], state[0])
        return (optax.apply_updates(state[0], updates), opt_state), value

    return step, (params, tx.init(params))


def accessed(step, *args):
    return jax.jit(step, donate_argnums=0).lower(*args).compile().cost_analysis()["bytes accessed"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("policy", "loss_scale"),
    [
        ("32-true", None),
        ("32-true", mpjax.StaticLossScale(1024)),
        ("32-true", mpjax.DynamicLossScale()),
        ("bf16-mixed", None),
        ("bf16-mixed", mpjax.DynamicLossScale()),
        ("16-mixed", None),
    ],
)
@pytest.mark.parametrize("is_by_hand", [False, True])
def test_scaling_and_skipping_cost_one_read_of_the_gradients(policy, loss_scale, is_by_hand):
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    layer = {"w": jnp.ones((WIDTH, WIDTH)), "b": jnp.ones(WIDTH)}
    params, batch = [layer] * DEPTH, jnp.ones((64, WIDTH))
    loss = cast_by_hand(policy) if is_by_hand else autocast(loss_fn, policy)

    def plain(state, batch):
        value, grads = jax.value_and_grad(loss)(state[0], batch)
        updates, opt_state = tx.update(grads, state[1], state[0])
        return (optax.apply_updates(state[0], updates), opt_state), value

    base = accessed(plain, (params, tx.init(params)), batch)
    if is_by_hand:
        added = accessed(*wrapped(loss, tx, policy, loss_scale, params), batch) - base
    else:
        step = mpjax.make_train_step(loss_fn, tx, policy, loss_scale=loss_scale, donate=False)
        added = accessed(step, step.init(params), batch) - base
    gradients = 4 * DEPTH * WIDTH * (WIDTH + 1)
    assert added <= READS * gradients + SHARE * base
