"""The whole step of an NNX model: parameters, statistics and RNG counts go on or stay together."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _samples import normal
from flax import nnx

import mpjax
import mpjax.nnx
from mpjax.testing import assert_bitwise_equal

pytestmark = pytest.mark.standard_promotion("optax raises a float to the power of an integer count")

X = normal(0, 16, 2)
BATCH = {"x": X, "y": X[:, :1]}


class Model(nnx.Module):
    """Norm, dropout and a weight that is used twice."""

    def __init__(self, seed=0):
        rngs = nnx.Rngs(seed)
        self.first = nnx.Linear(2, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.middle = nnx.Linear(4, 4, rngs=rngs)
        self.again = self.middle
        self.last = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x):
        x = self.dropout(nnx.relu(self.norm(self.first(x))))
        return self.last(self.again(jnp.tanh(self.middle(x))))


def loss_fn(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def made(policy="32-true", model=None, **options):
    model = Model() if model is None else model
    return mpjax.nnx.make_train_step(model, optax.adam(0.01), policy, loss_fn, **options)


@functools.cache
def shared(policy):
    """Returns a step that leaves states as they are, compiled once for all tests."""
    return made(policy, donate=False)


def values(model):
    return jax.tree.map(lambda x: x, nnx.as_pure(nnx.state(model)))


def test_in_float32_it_is_the_loop_with_nnx_optimizer():
    model = Model()
    step = made(model=model)
    state = step.init()
    before = values(model)
    other = Model()
    optimizer = nnx.Optimizer(other, optax.adam(0.01), wrt=nnx.Param)

    @nnx.jit
    def loop(model, optimizer):
        loss, grads = nnx.value_and_grad(loss_fn)(model, BATCH)
        optimizer.update(model, grads)
        return loss

    for _ in range(3):
        state, metrics = step(state, BATCH)
        want = loop(other, optimizer)
    np.testing.assert_allclose(metrics["loss"], want, rtol=2**-20)
    assert_bitwise_equal(values(model), before)  # until it is told
    merged = step.merge(state)
    step.update(model, state)
    for found in (merged, model):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=2**-18, atol=2**-20),
            *(nnx.as_pure(nnx.state(m, nnx.Any(nnx.Param, nnx.BatchStat))) for m in (found, other)),
        )
        assert found.again is found.middle
    assert int(merged.dropout.rngs.count.get_value()) == 3


def test_the_mode_is_that_of_the_model_and_another_model_starts_a_state():
    model = Model()
    model.eval()
    step = made(model=model)
    other = Model(1)
    state, _ = step(step.init(other), BATCH)
    assert_bitwise_equal(state.extra_state["norm"]["mean"], jnp.zeros(4))  # as evaluated
    assert int(state.extra_state["dropout"]["rngs"]["count"]) == 0


def test_aux_accumulation_and_only_some_variables():
    def with_aux(model, batch):
        model.seen = nnx.Intermediate(batch["x"].sum())
        return loss_fn(model, batch), {"rows": batch["x"].shape[0]}

    only_last = nnx.All(nnx.Param, nnx.PathContains("last"))
    step = mpjax.nnx.make_train_step(
        Model(), optax.sgd(0.1), None, with_aux, has_aux=True, accumulate=4, wrt=only_last
    )
    start = step.init()
    assert set(start.params) == {"last"}
    first = np.asarray(start.extra_state["first"]["kernel"])
    state, metrics = step(start, BATCH)
    assert metrics["aux"]["rows"].tolist() == [4] * 4
    assert int(state.extra_state["dropout"]["rngs"]["count"]) == 4
    np.testing.assert_array_equal(state.extra_state["first"]["kernel"], first)


def test_a_state_of_another_policy_is_adopted():
    old = shared("bf16-mixed")
    state, _ = old(old.init(), BATCH)
    step = shared("16-mixed")
    state, metrics = step(step.adopt(state), BATCH)
    assert int(state.step) == 2
    assert float(metrics["loss_scale"]) == 2.0**15
    assert step.lower(state, BATCH).as_text().count("f16") > 0


def test_rules_of_a_policy_map_find_the_modules():
    wide = made(mpjax.PolicyMap("bf16-mixed", {"first": "f32", "again": "f32", "last": "f32"}))
    text = str(jax.make_jaxpr(wide)(wide.init(), BATCH))
    assert "dot_general" in text
    assert "bf16" not in text
    lost = made(mpjax.PolicyMap("bf16-mixed", {"frist": "float32"}))
    with pytest.warns(mpjax.PolicyWarning, match="'frist'"):
        jax.make_jaxpr(lost)(lost.init(), BATCH)


def test_a_variable_that_goes_away_is_an_error():
    def forgetful(model, batch):
        loss = loss_fn(model, batch)
        del model.dropout
        return loss

    step = mpjax.nnx.make_train_step(Model(), optax.sgd(0.1), None, forgetful)
    with pytest.raises(ValueError, match=r"nnx.make_train_step: the trees differ; 'dropout/rngs"):
        step(step.init(), BATCH)


def test_a_loss_of_the_model_outside_trains_nothing_and_is_warned_of():
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    step = mpjax.nnx.make_train_step(
        model, optax.sgd(0.1), "bf16-mixed", lambda _, batch: loss_fn(model, batch)
    )
    with pytest.warns(mpjax.PolicyWarning, match="does not depend on the parameters"):
        step(step.init(), BATCH)
