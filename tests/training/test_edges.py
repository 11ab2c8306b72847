"""Edges of a train step: numbers that float32 or float16 cannot hold, batches of nothing, types."""

import functools
import weakref

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from mpjax._training import state as train_state
from mpjax._training.line_search import with_scaled_cotangents
from mpjax.testing import assert_bitwise_equal

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
Y = X @ np.arange(4, dtype=np.float32)
NOISY = np.sin(40 * Y)
OPTAX = pytest.mark.standard_promotion("optax mixes dtypes")
LINE_SEARCH = pytest.mark.no_leak_check(
    "JAX's linear_call keeps tracers until its program is freed"
)


def fit(params, batch):
    return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)


def start():
    return {"w": jnp.zeros(4)}


# -- what no float of the step holds ---------------------------------------------------------------


@OPTAX
@pytest.mark.parametrize("policy", ["bf16-mixed", "16-mixed"])
def test_a_line_search_sees_gradients_that_float16_alone_would_lose(policy):
    """The loss in another unit; below 2**-24 a gradient is 0 in float16."""

    def small(params, batch):
        return 1e-7 * fit(params, batch)

    def fitted(policy):
        step = mpjax.make_train_step(small, optax.lbfgs(), policy)
        state = step.init(start())
        for _ in range(20):
            state, _ = step(state, {"x": X, "y": NOISY})
        return float(fit(state.params, {"x": X, "y": NOISY}))

    assert fitted(policy) == pytest.approx(fitted("32-true"), rel=0.01)


def test_gradients_of_the_value_are_the_true_ones_forward_and_backward():
    def value(p):
        return jnp.sum(jnp.sin(p["w"]) * jnp.arange(1.0, 4.0)) + p["n"]

    scaled = with_scaled_cotangents(value, mpjax.StaticLossScale(2.0**10))
    params = {"w": jnp.array([0.3, 1.0, -2.0]), "n": 2}
    tangents = {"w": jnp.ones(3), "n": np.zeros((), jax.dtypes.float0)}
    assert_bitwise_equal(scaled(params), value(params))
    got, want = (jax.grad(f, allow_int=True)(params)["w"] for f in (scaled, value))
    assert_bitwise_equal(got, want)
    got, want = (jax.jvp(f, (params,), (tangents,))[1] for f in (scaled, value))
    assert_bitwise_equal(got, want)
    rows = jax.tree.map(lambda x: jnp.stack([jnp.asarray(x, jnp.float32)] * 2), params)
    got, want = (jax.vmap(jax.grad(f))(rows)["w"] for f in (scaled, value))
    assert_bitwise_equal(got, want)


def test_under_64_true_a_loss_that_float32_cannot_hold_is_no_overflow():
    with jax.enable_x64(True):
        step = mpjax.make_train_step(lambda w, x: w * x, optax.sgd(1e-50), "64-true")
        state, metrics = step(step.init(jnp.float64(1)), jnp.float64(1e40))
        assert bool(metrics["grads_finite"])
        assert int(state.step) == 1


@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_optimizer_gets_the_value_of_a_float64_loss_unrounded(accumulate):
    with jax.enable_x64(True):
        given = []

        def update(updates, state, params=None, *, value, **_):
            given.append(value.dtype)
            return updates, state

        init = optax.identity().init
        tx = optax.GradientTransformationExtraArgs(init, update)
        step = mpjax.make_train_step(
            lambda w, x: jnp.sum(w * x), tx, "64-true", accumulate=accumulate
        )
        _, metrics = step(step.init(jnp.float64(1)), jnp.ones(2))
        assert set(given) == {jnp.dtype("float64")}
        assert metrics["loss"].dtype == jnp.float32


# -- batches of nothing ----------------------------------------------------------------------------


def masked(params, batch):
    count = batch["mask"].sum()
    errors = (batch["x"] @ params["w"] - batch["y"]) ** 2
    return (errors * batch["mask"]).sum() / count, count


@OPTAX
def test_a_batch_without_weight_leaves_no_trace_in_the_loss_scale():
    step = mpjax.make_train_step(
        masked, optax.adam(0.1), "16-mixed", weighted=True, max_consecutive_skips=2, donate=False
    )
    batch = {"x": X, "y": Y, "mask": np.ones(8, np.float32)}
    before, _ = step(step.init(start()), batch)
    state = before
    for _ in range(3):
        state, metrics = step(state, {**batch, "mask": np.zeros(8, np.float32)})
        assert not bool(metrics["grads_finite"])
    assert_bitwise_equal(state, before)
    assert not bool(metrics["diverged"])


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("weight", ["rows", "row", "pair", "imaginary"])
def test_a_weight_is_one_number(weight, accumulate):
    wrong = {
        "rows": lambda mask: mask,
        "row": lambda mask: mask.sum(keepdims=True),
        "pair": lambda mask: (mask.sum(), mask.sum()),
        "imaginary": lambda mask: jax.lax.complex(mask.sum(), mask.sum()),
    }[weight]

    def loss(params, batch):
        return masked(params, batch)[0], wrong(batch["mask"])

    step = mpjax.make_train_step(loss, optax.sgd(0.1), weighted=True, accumulate=accumulate)
    batch = {"x": X, "y": Y, "mask": np.ones(8, np.float32)}
    with pytest.raises(TypeError, match=r"the weight must be one number; got(.|\n)*mask\.sum\(\)"):
        step(step.init(start()), batch)


# -- types of the state ----------------------------------------------------------------------------

_WEAK = {
    "a Python number among the parameters": ({"w": 0.5}, None),
    "a weakly typed parameter": ({"w": jnp.full((), 0.5)}, None),
    "a Python number as extra state": ({"w": jnp.ones(())}, {"n": 0}),
}


@pytest.mark.parametrize("name", _WEAK)
def test_law_09_compiles_once_whatever_the_state_starts_from(name):
    params, extra = _WEAK[name]

    def loss(params, *rest):
        value = params["w"] * rest[-1]
        return value if extra is None else (value, {"n": rest[0]["n"] + 1})

    traces = []
    step = mpjax.make_train_step(lambda *a: (traces.append(1), loss(*a))[1], optax.sgd(0.1))
    state = step.init(params, extra)
    state, _ = step(state, jnp.ones(()))
    once = len(traces)
    for _ in range(2):
        state, _ = step(state, jnp.ones(()))
    assert len(traces) == once


_SHARDED = {
    "float32": ("32-true", lambda: optax.adam(1e-3)),
    "float16": ("16-mixed", lambda: optax.adam(optax.linear_schedule(1e-3, 1e-4, 9))),
    "8-bit moments": ("bf16-mixed", lambda: mpjax.optim.with_quantized_state(optax.adam(1e-3))),
    "master weights": ("bf16-true", lambda: mpjax.optim.with_master_weights(optax.adam(1e-3))),
}


@OPTAX
@pytest.mark.parametrize(
    "kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit], ids=["auto", "explicit"]
)
@pytest.mark.parametrize("again", ["init", "adopt"])
@pytest.mark.parametrize("name", _SHARDED)
def test_law_09_compiles_once_with_sharded_parameters(name, again, kind):
    policy, tx = _SHARDED[name]
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    split = jax.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))

    def loss(params, seen, x):
        return jnp.mean((x @ params["w"]) ** 2), {"key": jax.random.split(seen["key"])[0]}

    step = mpjax.make_train_step(loss, tx(), policy, donate=False)
    state = step.init({"w": jax.device_put(jnp.ones((16, 4)), split)}, {"key": jax.random.key(0)})
    state = step.adopt(state) if again == "adopt" else state
    x = jax.device_put(jnp.ones((8, 16)), split)
    compiled = []

    def count(event, _, **__):
        compiled.append(event == "/jax/core/compile/backend_compile_duration")

    jax.monitoring.register_event_duration_secs_listener(count)
    for _ in range(3):
        state, _ = step(state, x)
    jax.monitoring.clear_event_listeners()
    assert sum(compiled) == 1


def test_a_skip_keeps_python_numbers_of_the_extra_state_without_jit():
    def loss(w, seen, x):
        return w * x, {"n": seen["n"] + 1}

    step = mpjax.make_train_step(loss, optax.sgd(0.1))
    with jax.disable_jit():
        state, _ = step(step.init(jnp.ones(()), {"n": 0}), jnp.inf)
    assert int(state.extra_state["n"]) == 0


# -- adopting a checkpoint -------------------------------------------------------------------------

_FORMS = {
    "stochastic": (mpjax.optim.with_stochastic_rounding, "bf16-true"),
    "24 bits": (functools.partial(mpjax.optim.with_master_weights, bits=24), "bf16-true"),
    "int8 moments": (mpjax.optim.with_quantized_state, "bf16-mixed"),
}


@OPTAX
@pytest.mark.parametrize("form", _FORMS)
def test_a_checkpoint_of_bare_dictionaries_is_adopted_whatever_stores_its_moments(form):
    wrap, policy = _FORMS[form]
    step = mpjax.make_train_step(fit, wrap(optax.adam(0.1)), policy, donate=False)
    state, _ = step(step.init(start()), {"x": X, "y": Y})
    bare = flax.serialization.to_state_dict(jax.tree.map(np.asarray, state))
    assert_bitwise_equal(jax.tree.leaves(step.adopt(bare)), jax.tree.leaves(state))


def test_adopting_keeps_the_name_of_what_diverged():
    def diverging(params, batch):
        return fit(params, batch) + jnp.sum(params["c"] * jnp.inf)

    step = mpjax.make_train_step(diverging, optax.sgd(0.1), "16-mixed", max_consecutive_skips=1)
    state, _ = step(step.init({**start(), "c": jnp.ones(2)}), {"x": X, "y": Y})
    other = mpjax.make_train_step(diverging, optax.sgd(0.1), "bf16-mixed", max_consecutive_skips=1)
    adopted = other.adopt(state)
    with pytest.raises(FloatingPointError, match="First bad leaf: 'c'"):
        mpjax.raise_if_diverged(adopted.opt_state, adopted.params)


def test_a_state_is_copied_leaf_by_leaf_so_that_init_holds_no_tree_twice(monkeypatch):
    made, alive = [], []

    def copied(x):
        alive.append(sum(ref() is not None for ref in made))
        return jnp.array(x, copy=True)

    def tree():
        leaves = [jnp.full(8, i) for i in range(6)]
        made.extend(map(weakref.ref, leaves))
        return leaves

    monkeypatch.setattr(train_state, "copied", copied)
    train_state.copied_in_turn(tree())
    assert alive == [6, 5, 4, 3, 2, 1]
