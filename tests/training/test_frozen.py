"""Only gradients that are applied judge a step: those of frozen parameters, and a loss of NaN."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

import mpjax
from mpjax.testing import assert_bitwise_equal

PARAMS = {"adapter": jnp.ones(4), "frozen": jnp.full(4, 100.0)}
LABELS = {"adapter": "train", "frozen": "freeze"}
FROZEN = {"adapter": False, "frozen": True}
TRAINED = {"adapter": True, "frozen": False}
pytestmark = [
    pytest.mark.standard_promotion("optax raises a float to the power of an integer count"),
    pytest.mark.filterwarnings("ignore:.*here it does nothing"),  # float32 parameters here
]


def loss_fn(params, batch):
    spoilt = jnp.sum(jnp.sqrt(params["frozen"] - 100.0))  # the derivative of sqrt at 0 is inf
    return jnp.sum((params["adapter"] - batch) ** 2) + spoilt


def big(params, batch):
    return jnp.sum(params["adapter"] * batch) + 1e4 * jnp.sum(params["frozen"] ** 2)


def partition(inner=None):
    return optax.partition(
        {"train": inner or optax.adam(0.1), "freeze": optax.set_to_zero()}, LABELS
    )


def fully_frozen_by_mask(inner):
    return optax.chain(optax.masked(inner, TRAINED), optax.masked(optax.set_to_zero(), FROZEN))


FREEZING = {
    "partition": partition(),
    "masks": fully_frozen_by_mask(optax.adam(0.1)),
    "a mask behind": optax.chain(optax.adam(0.1), optax.masked(optax.set_to_zero(), FROZEN)),
    "a mask before": optax.chain(optax.masked(optax.set_to_zero(), FROZEN), optax.adam(0.1)),
    "clipped inside": partition(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))),
    "accumulated": optax.MultiSteps(partition(), every_k_schedule=2).gradient_transformation(),
    "ema": optax.chain(optax.ema(0.9), partition()),
    "wrapped": mpjax.with_loss_scale(partition(), mpjax.DynamicLossScale(64.0)),
    "master weights": mpjax.optim.with_master_weights(partition()),
    "kahan": mpjax.optim.with_kahan(partition()),
    "dtypes": mpjax.optim.with_state_dtypes(partition(), mu_dtype="bfloat16"),
    "lookahead's inside": optax.chain(optax.trace(0.9), partition(optax.sgd(0.1))),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", ["16-mixed", "32-true"])
@pytest.mark.parametrize("name", FREEZING)
def test_gradients_of_frozen_parameters_neither_skip_a_step_nor_count(name, policy):
    if name == "wrapped" and policy == "32-true":
        policy = "bf16-mixed"
    step = mpjax.make_train_step(loss_fn, FREEZING[name], policy)
    state = step.init(PARAMS)
    batch = jnp.zeros(4)
    for _ in range(3):
        state, metrics = step(state, batch)
    assert int(metrics["skipped_steps"]) == 0
    assert bool(metrics["grads_finite"])
    assert float(metrics["loss_scale"]) == float(step.init(PARAMS).opt_state.loss_scale)
    assert_bitwise_equal(state.params["frozen"], PARAMS["frozen"])
    assert float(jnp.max(state.params["adapter"])) < 1.0
    # Nothing of it is kept either: a state in which NaN sleeps is none to go on from.
    assert bool(mpjax.all_finite(state.opt_state.inner_state))

    step = mpjax.make_train_step(big, FREEZING[name], policy, loss_scale=None)
    _, metrics = step(step.init(PARAMS), jnp.ones(4))
    assert float(metrics["grad_norm"]) == pytest.approx(2.0)


def test_frozen_beside_a_wrapper_of_the_rest_does_not_count():
    tx = partition(mpjax.with_loss_scale(optax.adam(0.1)))
    step = mpjax.make_train_step(big, tx, "bf16-mixed")
    _, metrics = step(step.init(PARAMS), jnp.ones(4))
    assert float(metrics["grad_norm"]) == pytest.approx(2.0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [*FREEZING, "a norm of all"])
def test_what_is_applied_judges_all_the_same(name):
    all_norms = optax.chain(optax.clip_by_global_norm(1.0), partition())
    bad = "frozen" if name == "a norm of all" else "adapter"

    def loss(params, batch):
        return jnp.sum(params["adapter"] * 0 + 1) + jnp.sum(jnp.sqrt(params[bad] - batch))

    step = mpjax.make_train_step(loss, FREEZING.get(name, all_norms), "bf16-mixed", donate=False)
    state = step.init(PARAMS)
    after, metrics = step(state, PARAMS[bad])
    assert int(metrics["skipped_steps"]) == 1
    assert_bitwise_equal(after.params, state.params)


@pytest.mark.parametrize("jit", [False, True])
def test_a_step_by_hand_judges_as_the_whole_step_does(jit):
    tx = mpjax.with_loss_scale(partition(), 8.0)
    update = jax.jit(tx.update) if jit else tx.update
    grads = {"adapter": jnp.full(4, 8.0), "frozen": jnp.full(4, jnp.inf)}
    updates, state = update(grads, tx.init(PARAMS), PARAMS)
    assert bool(state.grads_finite)
    assert float(updates["adapter"][0]) == pytest.approx(-0.1, rel=1e-5)
    _, state = update(grads | {"adapter": jnp.full(4, jnp.nan)}, state, PARAMS)
    assert not bool(state.grads_finite)
    assert state.leaf_finite.tolist() == [False, True]


def test_an_optimizer_that_looks_at_values_judges_by_all_of_them():
    def update(updates, state, params=None):
        scale = 1.0 if float(jnp.sum(updates["adapter"])) > 0 else 2.0
        return jax.tree.map(lambda g: scale * g, updates), state

    tx = mpjax.with_loss_scale(optax.GradientTransformation(lambda _: (), update), 1.0)
    grads = {"adapter": jnp.ones(4), "frozen": jnp.full(4, jnp.inf)}
    _, state = tx.update(grads, tx.init(PARAMS), PARAMS)
    assert not bool(state.grads_finite)


# -- a loss that is not finite ---------------------------------------------------------------------


def hidden(bad, params, batch):
    """A loss that is not finite, and gradients that are."""
    return jnp.sum(params["w"] * batch) + jax.lax.stop_gradient(jnp.float32(bad) * jnp.sum(batch))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("policy", ["16-mixed", "bf16-mixed", "32-true"])
@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_a_loss_that_is_not_finite_skips_its_step(bad, policy, accumulate):
    step = mpjax.make_train_step(
        functools.partial(hidden, bad), optax.sgd(0.1), policy, max_consecutive_skips=2,
        accumulate=accumulate,
    )  # fmt: skip
    params = {"w": jnp.float32(1.0)}
    state = step.init(params)
    for _ in range(2):
        state, metrics = step(state, jnp.ones(4))
    assert (int(metrics["skipped_steps"]), int(state.step)) == (2, 0)
    assert not bool(metrics["grads_finite"])
    assert_bitwise_equal(state.params, params)
    said = r"2 steps in a row(.|\n)*The loss itself was inf or NaN(.|\n)*step\.diagnose"
    with pytest.raises(mpjax.NonFiniteError, match=said):
        mpjax.raise_if_diverged(state.opt_state, state.params)
    report = step.diagnose(state, jnp.ones(4), metrics)
    assert not report.finite
    assert not report.bad_gradients


def test_a_loss_given_to_a_step_by_hand_judges_it():
    tx = mpjax.with_loss_scale(optax.sgd(0.1), 8.0)
    params = {"w": jnp.ones(2)}
    grads = {"w": jnp.full(2, 8.0)}
    for value, finite in ((jnp.float32(1), True), (jnp.nan, False), (jnp.float16(jnp.inf), False)):
        _, state = tx.update(grads, tx.init(params), params, value=value)
        assert bool(state.grads_finite) is finite


# -- 8-bit weights in the extra state --------------------------------------------------------------

SMALL = mpjax.quantize({"w": jnp.eye(64) / 2}, "int8_from_mixed_bfloat16")


def of_adapters(adapters, base, x):
    """The loss of low-rank adapters beside weights in 8 bits, and how often it was taken."""
    y = x @ base["w"] + x @ adapters["a"] @ adapters["b"]
    return jnp.mean((y - 1) ** 2), {**base, "count": base["count"] + 1}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("policy", ["bf16-mixed", "16-mixed", "32-true", "bf16-true"])
def test_weights_in_8_bits_come_back_as_they_were(policy, accumulate):
    rounding = "kahan" if policy == "bf16-true" else None
    tx = optax.adam(1e-3)
    step = mpjax.make_train_step(of_adapters, tx, policy, accumulate=accumulate, rounding=rounding)
    adapters = {"a": jnp.full((64, 4), 0.1), "b": jnp.zeros((4, 64))}
    state = step.init(adapters, {**jax.tree.map(jnp.array, SMALL), "count": 0})
    losses = []
    for _ in range(4):
        state, metrics = step(state, jnp.ones((8, 64)))
        losses.append(float(metrics["loss"]))
    assert losses == sorted(losses, reverse=True)
    assert losses[0] == pytest.approx(0.25, rel=0.02)
    assert state.extra_state["count"] == 4 * accumulate
    assert_bitwise_equal(state.extra_state["w"].values, SMALL["w"].values)
    assert_bitwise_equal(state.extra_state["w"].scale, SMALL["w"].scale)


def test_weights_in_8_bits_that_were_changed_are_refused():
    def changing(adapters, base, x):
        loss, new = of_adapters(adapters, base, x)
        return loss, {**new, "w": 2 * new["w"]}

    step = mpjax.make_train_step(changing, optax.adam(1e-2), "bf16-mixed", donate=False)
    state = step.init({"a": jnp.ones((64, 4)), "b": jnp.ones((4, 64))}, {**SMALL, "count": 0})
    with pytest.raises(
        ValueError, match=r"'w' was Quantized.*f32\[64,64\].\n.*return them as they"
    ):
        step(state, jnp.ones((8, 64)))
