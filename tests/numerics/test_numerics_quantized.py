"""What is looked at under a policy of 8 bits is the program that the step runs, its history too."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from mpjax import numerics
from mpjax.numerics._subject import of_loss

DELAYED = mpjax.QuantizedPolicy("bf16-mixed", mpjax.DelayedScaling(amax_history_len=2))
PARAMS = [np.random.default_rng(i).normal(size=(64, 64)).astype(np.float32) / 8 for i in range(3)]
BATCH = {"x": np.ones((4, 64), np.float32), "y": np.zeros((4, 64), np.float32)}


def loss_fn(params, batch):
    x = batch["x"]
    for name, w in zip("abc", params, strict=True):
        with jax.named_scope(name):
            x = jnp.tanh(x @ w)
    return jnp.mean((x - batch["y"]) ** 2)


@functools.cache
def train_step():
    """Returns a step that looks each time, and a state whose products were told to clip."""
    step = mpjax.make_train_step(loss_fn, optax.sgd(0.1), DELAYED, donate=False, watch=1)
    state = step.init(PARAMS, batch=BATCH)
    return step, state._replace(amax_history=jax.tree.map(lambda h: h * 0.01, state.amax_history))


@pytest.mark.no_leak_check("a diagnosis holds what it traced")
def test_law_a_diagnosis_reads_the_amax_history_of_the_state_as_its_step_does():
    step, state = train_step()
    moved, metrics = step(state, BATCH)
    assert step.diagnose(state, BATCH).loss == float(metrics["loss"])
    other = step.diagnose(moved, BATCH).loss  # its history has seen how large values are
    assert abs(other - float(metrics["loss"])) > 0.5 * other


def test_law_what_is_watched_is_of_the_amax_history_of_the_state():
    step, state = train_step()
    seen = step(state, BATCH)[1]["watched"]["activation"]
    assert float(seen["c"]["amax"]) < 1e-3  # of what is clipped to a hundredth
    untold = step.init(PARAMS, batch=BATCH)
    assert float(step(untold, BATCH)[1]["watched"]["activation"]["c"]["amax"]) > 0.1


def test_a_product_of_8_bits_is_watched_with_its_scales():
    policies = mpjax.QuantizedPolicy("bf16-mixed", mpjax.Float8CurrentScaling()), "bf16-mixed"
    found = []
    for policy in policies:
        step = mpjax.make_train_step(loss_fn, optax.sgd(0.1), policy, donate=False, watch=1)
        found.append(step(step.init(PARAMS), BATCH)[1]["watched"]["activation"])
    for module in "abc":
        low, want = (float(seen[module]["amax"]) for seen in found)
        assert low == pytest.approx(want, rel=2**-4)  # the last bit of float8_e4m3fn


@pytest.mark.no_leak_check("a diagnosis holds what it traced")
def test_a_skipped_step_with_a_history_is_run_once_more():
    step, state = train_step()
    bad = BATCH | {"y": np.full_like(BATCH["y"], np.nan)}
    state, metrics = step(state, bad)
    report = step.diagnose(state, bad, metrics)
    assert report.cause.kind == "leaf"
    assert "'batch/y'" in report.cause.text


@pytest.mark.slow
@pytest.mark.no_leak_check("a diagnosis holds what it traced")
def test_a_function_with_a_history_of_its_own_can_be_looked_at_in_float32_as_the_message_says():
    fast = mpjax.with_amax_history(loss_fn, DELAYED)
    step, state = train_step()

    def loss(params, history, batch):
        return fast.apply(history, params, batch)

    clipped = numerics.diagnose(loss, "float32")(PARAMS, state.amax_history, BATCH).loss
    assert clipped == float(step(state, BATCH)[1]["loss"])


@pytest.mark.parametrize("base", ["float32", "bf16-true", "bf16-mixed"])
def test_law_products_of_8_bits_are_looked_at_in_8_bits_whatever_else_is(base):
    policy = mpjax.QuantizedPolicy(base, mpjax.Float8CurrentScaling())
    subject, _ = of_loss(loss_fn, policy, None, has_aux=False, where="numerics.diagnose")
    program = str(jax.make_jaxpr(subject.make(policy))(1.0, PARAMS, BATCH))
    assert "f8_e4m3fn[4,64]" in program
    assert "f8_e4m3fn[64,64]" in program


def test_products_in_a_loop_are_compared_without_their_8_bit_copies():
    def looped(params, x):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["w"])
        return jnp.mean(x**2)

    policy = mpjax.PolicyMap("bf16-mixed", {"w": "float8_from_mixed_bfloat16"})
    found = numerics.compare(looped, policy)({"w": np.stack(PARAMS)}, BATCH["x"])
    assert found.loss < 2**-3
    assert 2**-8 < found.gradient < 2**-2  # of values with two bits behind the point
