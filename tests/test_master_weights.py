"""Float32 copies of half-precision parameters, and updates that lead exactly to them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpjax
from mpjax import optim
from mpjax.testing import assert_bitwise_equal

HALVES = [jnp.float16, jnp.bfloat16]
pytestmark = pytest.mark.standard_promotion("optax.apply_updates adds float32 to half parameters")


@pytest.mark.parametrize("dtype", HALVES)
def test_parameters_are_the_rounded_copies_at_every_step(dtype):
    random = np.random.default_rng(0)
    params = {"w": jnp.asarray(random.normal(size=(16, 16)), dtype), "b": jnp.array([-0.0], dtype)}
    tx = optim.with_master_weights(optax.adamw(0.01))
    state, update = tx.init(params), jax.jit(tx.update)
    for _ in range(20):
        grads = jax.tree.map(lambda p: jnp.asarray(random.normal(size=p.shape), dtype), params)
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        assert {x.dtype for x in jax.tree.leaves(state.master_params)} == {np.dtype("float32")}
        assert_bitwise_equal(params, optax.tree.cast(state.master_params, dtype))


@pytest.mark.parametrize("dtype", HALVES)
def test_training_is_that_of_float32_parameters(dtype):
    params = {"w": jnp.linspace(-1, 1, 8).astype(dtype)}
    full = optax.tree.cast(params, jnp.float32)
    tx, plain = optim.with_master_weights(optax.adam(1e-4)), optax.adam(1e-4)
    state, plain_state = tx.init(params), plain.init(full)
    for seed in range(5):
        grads = {"w": jnp.asarray(np.random.default_rng(seed).normal(size=8), jnp.float32)}
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        updates, plain_state = plain.update(grads, plain_state, full)
        full = optax.apply_updates(full, updates)
    assert_bitwise_equal(state.master_params, full)


def test_updates_too_small_for_the_parameter_are_not_lost():
    params = jnp.bfloat16(1)
    tx = optim.with_master_weights(optax.sgd(1.0))
    state, plain = tx.init(params), params
    for _ in range(64):
        updates, state = tx.update(jnp.float32(2.0**-12), state, params)
        params = optax.apply_updates(params, updates)
        plain = optax.apply_updates(plain, jnp.bfloat16(-(2.0**-12)))
    assert float(plain) == 1.0
    assert float(state.master_params) == 1 - 64 * 2.0**-12


@pytest.mark.parametrize("dtype", HALVES)
@given(values=st.tuples(*[st.floats(-(2.0**14), 2.0**14, width=16)] * 2))
def test_any_move_is_exact_unless_it_shrinks_the_parameter_by_more_than_8192(dtype, values):
    old, new = (jnp.asarray(v, dtype) for v in values)
    to_new = optax.stateless(lambda updates, params: jax.tree.map(lambda p: new - p, params))
    tx = optim.with_master_weights(to_new)
    updates, state = tx.update(jnp.float32(0), tx.init(old), old)
    moved, target = optax.apply_updates(old, updates), state.master_params.astype(dtype)
    if abs(float(target)) * 8192 >= abs(float(old)):
        assert float(moved) == float(target)
    else:
        assert abs(float(moved) - float(target)) <= 2.0**-23 * abs(float(old))


def test_other_leaves_are_updated_as_the_optimizer_says_and_none_is_shared():
    params = {"norm": jnp.ones(2), "w": jnp.ones(2, jnp.bfloat16)}
    tx = optim.with_master_weights(optax.sgd(0.25))
    state = tx.init(params)
    updates, _ = jax.jit(tx.update, donate_argnums=1)(params, state, params)
    assert_bitwise_equal(optax.apply_updates(params, updates)["norm"], jnp.full(2, 0.75))
    assert not params["norm"].is_deleted()


@pytest.mark.parametrize("policy", ["O2", "16-true"])
def test_a_train_step_of_half_parameters_skips_and_leaves_the_copies(policy):
    def loss_fn(w, x):
        return jnp.sum((w * x).astype(jnp.float32) ** 2)

    tx = optim.with_master_weights(optax.sgd(1e-4, momentum=0.5))
    step = mpjax.make_train_step(loss_fn, tx, policy, loss_scale=8, donate=False)
    state, _ = step(step.init(jnp.ones(3)), jnp.ones(3))
    assert state.params.dtype == jnp.float16
    skipped, metrics = step(state, jnp.full(3, jnp.inf))
    assert not bool(metrics["grads_finite"])
    assert_bitwise_equal(skipped.params, state.params)
    assert_bitwise_equal(skipped.opt_state.inner_state, state.opt_state.inner_state)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_a_parameter_of_minus_zero_that_does_not_move_keeps_its_sign(dtype):
    params = {"w": jnp.array([-0.0, 0.0, 1.5], dtype)}
    tx = optim.with_master_weights(optax.sgd(1.0))
    updates, _ = tx.update({"w": jnp.full(3, -0.0)}, tx.init(params), params)
    assert_bitwise_equal(optax.apply_updates(params, updates), params)
    assert_bitwise_equal(updates["w"], jnp.full(3, -0.0))
