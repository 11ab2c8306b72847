"""The whole step: one shape for every precision, guarded state, accumulation, one compilation."""

import functools
import types

import flax.core
import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx
from jax.experimental import sparse

import mpjax
from mpjax import SupportWarning
from mpjax._training.checks import checked_call
from mpjax.testing import assert_bitwise_equal

PRECISIONS = ["32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "mixed_float16", "O2"]
OPTAX = pytest.mark.standard_promotion("optax mixes dtypes")
LR = 2.0**-4


def params_of(width=4):
    random = np.random.default_rng(0)
    w = jnp.asarray(random.normal(size=(width, width)), jnp.float32)
    return {"w": w, "b": jnp.zeros(width)}


def batch_of(size=8, seed=1, width=4):
    random = np.random.default_rng(seed)
    x, y = (jnp.asarray(random.normal(size=(size, width)), jnp.float32) for _ in range(2))
    return {"x": x, "y": y, "label": jnp.arange(size) % width}


def loss_fn(params, batch):
    out = batch["x"] @ params["w"] + params["b"]
    return jnp.mean((out - batch["y"]).astype(jnp.float32) ** 2)


def spoilt(batch):
    return {**batch, "x": batch["x"].at[0, 0].set(jnp.inf)}


def counted(fun):
    calls = []

    def wrapped(*args):
        calls.append(1)
        return fun(*args)

    return wrapped, calls


# -- every precision ------------------------------------------------------------------------------


@OPTAX
@pytest.mark.parametrize("policy", PRECISIONS)
def test_every_precision_has_the_same_step_and_learns(policy):
    step = mpjax.make_train_step(loss_fn, optax.adam(0.05), policy, rounding="nearest")
    state = step.init(params_of())
    losses = []
    for _ in range(12):
        state, metrics = step(state, batch_of())
        losses.append(float(metrics["loss"]))
    wanted = mpjax.get_policy(policy)
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {wanted.param_dtype}
    assert metrics["loss"].dtype == jnp.float32
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]
    is_half = wanted.compute_dtype == jnp.float16
    kind = mpjax.DynamicLossScale if is_half else mpjax.NoOpLossScale
    assert isinstance(mpjax.current_loss_scale(state), kind)
    assert int(state.step) == 12 - int(metrics["skipped_steps"])


def test_integer_labels_keys_and_scalars_reach_the_loss_untouched():
    seen = {}

    def watch(params, batch):
        seen.update(jax.tree.map(lambda x: getattr(x, "dtype", type(x)), batch))
        logits = batch["x"] @ params["w"]
        return optax.softmax_cross_entropy_with_integer_labels(
            logits.astype(jnp.float32), batch["label"]
        ).mean()

    step = mpjax.make_train_step(watch, optax.sgd(0.1), "bf16-mixed")
    batch = {**batch_of(), "key": jax.random.key(0), "mask": jnp.ones(3, bool)}
    step(step.init(params_of()), batch)
    assert seen["x"] == jnp.float32  # the model is traced as it is written
    assert (seen["label"], seen["mask"]) == (jnp.int32, jnp.bool_)
    assert jax.dtypes.issubdtype(seen["key"], jax.dtypes.prng_key)


def test_a_true_policy_computes_with_everything_in_its_dtype():
    seen = {}

    def watch(params, batch):
        seen.update(params=params["w"].dtype, batch=batch.dtype)
        return jnp.sum(batch @ params["w"])

    step = mpjax.make_train_step(watch, optax.sgd(0.1), "bf16-true", rounding="nearest")
    step(step.init({"w": jnp.ones((4, 4))}), jnp.ones((2, 4)))
    assert seen == {"params": jnp.bfloat16, "batch": jnp.bfloat16}


# -- extra state, aux, randomness -----------------------------------------------------------------


class Network(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.BatchNorm(use_running_average=False)(linen.Dense(4)(x))
        return linen.Dense(4)(x)


def with_batch_norm():
    model = Network()
    variables = model.init(jax.random.key(0), jnp.ones((2, 4)))

    def loss(params, extra, batch):
        stats, average, key = extra
        out, new = model.apply(
            {"params": params, "batch_stats": stats}, batch["x"], mutable=["batch_stats"]
        )
        value = jnp.mean((out - batch["y"]).astype(jnp.float32) ** 2)
        average = jax.tree.map(lambda a, p: 0.5 * a + 0.5 * p.astype(a.dtype), average, params)
        return value, (new["batch_stats"], average, jax.random.split(key)[0])

    extra = (variables["batch_stats"], variables["params"], jax.random.key(7))
    return loss, variables["params"], extra


@pytest.mark.standard_promotion("flax's BatchNorm adds its float32 statistics to half inputs")
@pytest.mark.parametrize("policy", ["32-true", "16-mixed"])
def test_law_10_batch_norm_ema_keys_and_moments_never_saw_the_bad_batch(policy):
    loss, params, extra = with_batch_norm()
    tx = optax.adamw(optax.linear_schedule(0.1, 0.0, 9))
    step = mpjax.make_train_step(loss, tx, policy, loss_scale=mpjax.DynamicLossScale(2.0**8))
    first, second = batch_of(), batch_of(seed=2)
    ends = []
    for batches in ([first, spoilt(first), second], [first, second]):
        state = step.init(params, extra)
        for batch in batches:
            state, metrics = step(state, batch)
        ends.append((state.step, state.params, state.opt_state.inner_state, state.extra_state))
        assert int(metrics["skipped_steps"]) == len(batches) - 2
    assert_bitwise_equal(*ends)


# -- optimizers that take less than their type says, and states that hold keys ---------------------

SAM = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05), sync_period=2)
PICKY = {
    "sam": SAM,
    "in a chain": optax.chain(optax.clip_by_global_norm(1.0), SAM),
    "wrapped": mpjax.with_loss_scale(SAM),
    "value alone": optax.GradientTransformationExtraArgs(
        lambda params: (), lambda g, state, params=None, *, value: (g, state)
    ),
    "nothing by name": optax.GradientTransformationExtraArgs(
        lambda params: (), lambda g, state, params: (g, state)
    ),
}


@OPTAX
@pytest.mark.no_leak_check("a refused argument leaves the frame of a trace that was given up")
@pytest.mark.parametrize("name", PICKY)
def test_an_optimizer_gets_no_argument_that_it_has_no_place_for(name):
    step = mpjax.make_train_step(lambda p, x: jnp.sum((p["w"] - x) ** 2), PICKY[name], "bf16-mixed")
    state, metrics = step(step.init({"w": jnp.ones(4)}), jnp.zeros(4))
    assert int(state.step) == 1
    assert float(metrics["grad_norm"]) == 4.0


def test_a_type_error_of_the_optimizers_own_comes_through():
    def update(g, state, params=None, **extra):
        raise TypeError("mine")

    tx = optax.GradientTransformationExtraArgs(lambda params: (), update)
    step = mpjax.make_train_step(lambda p, x: jnp.sum(p * x), tx)
    with pytest.raises(TypeError, match="mine"):
        step(step.init(jnp.float32(1)), jnp.ones(2))


def test_an_optimizer_is_not_run_again_without_an_argument_that_its_own_code_misspells():
    def halved(g, *, loss):
        return jax.tree.map(lambda x: x / 2 if loss is not None else x, g)

    def update(g, state, params=None, *, value=None, **extra):
        return (g if value is None else halved(g, value=value)), state

    tx = optax.GradientTransformationExtraArgs(lambda params: (), update)
    step = mpjax.make_train_step(lambda p, x: jnp.sum(p * x), tx)
    with pytest.raises(TypeError, match=r"halved.* unexpected keyword argument 'value'"):
        step(step.init(jnp.float32(1)), jnp.ones(2))


@pytest.mark.parametrize("abstract", [False, True])
def test_a_state_with_keys_in_it_is_shown(abstract):
    extra = {"rng": jax.random.key(0), "more": jax.random.split(jax.random.key(1), 3)}
    step = mpjax.make_train_step(lambda p, e, x: (jnp.sum(p * x), e), optax.sgd(0.1))
    make = functools.partial(jax.eval_shape, step.init) if abstract else step.init
    assert "extra_state 32 B key<fry>" in repr(make(jnp.ones(3), extra))
    dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    model = nnx.Sequential(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), dropout)
    step = mpjax.nnx.make_train_step(model, optax.sgd(0.1), None, lambda m, x: jnp.mean(m(x)))
    assert "key<fry>" in repr(step.init())


# -- 16-bit parameters and a float32 loss: Apex's O2 -----------------------------------------------

RETURNS_FLOAT32 = {
    "O2": "O2",
    "bfloat16": "p=bf16,c=bf16,o=f32",
    "a rule": mpjax.PolicyMap("O2", {"b": "float32"}),
}


def _apex(params, batch, dtype):
    out = batch["x"].astype(dtype) @ params["w"].astype(dtype)
    return jnp.mean((out.astype(jnp.float32) + params["b"] - batch["y"]) ** 2)


@pytest.mark.parametrize("size", [300.0, 1e5])
@pytest.mark.parametrize("name", RETURNS_FLOAT32)
def test_loss_and_targets_stay_in_the_output_dtype(name, size):
    policy = RETURNS_FLOAT32[name]
    params, batch = params_of(), batch_of() | {"y": size * (1 + batch_of()["y"] ** 2 / 8)}
    params["w"] = jnp.round(4 * params["w"]) / 4  # exact in both
    step = mpjax.make_train_step(
        lambda p, b: jnp.mean((b["x"] @ p["w"] + p["b"] - b["y"]) ** 2),
        optax.sgd(0.0),
        policy,
        loss_scale=2.0**-16,
        rounding="nearest",
    )
    dtype = getattr(mpjax.get_policy(policy), "default", mpjax.get_policy(policy)).compute_dtype
    state, metrics = step(step.init(params), batch)
    # Products of order one are rounded, and the loss of order size² is not: each row's error is
    # below 16 units in the last place of a product, and twice that of a relative size.
    want = float(_apex(params, batch, dtype))
    assert float(metrics["loss"]) == pytest.approx(
        want, rel=32 * float(jnp.finfo(dtype).eps) / size
    )
    assert bool(metrics["grads_finite"])
    assert int(state.step) == 1


# -- accumulation ---------------------------------------------------------------------------------


def test_micro_batches_get_keys_of_their_own_and_repeated_scalars():
    def noisy(w, batch):
        draw = jax.random.normal(batch["key"], ())
        return jnp.sum(w * batch["x"]) * batch["rate"], draw

    step = mpjax.make_train_step(noisy, optax.sgd(0.1), "32-true", has_aux=True, accumulate=4)
    batch = {"x": jnp.ones(8), "key": jax.random.key(0), "rate": jnp.float32(0.5)}
    _, metrics = step(step.init(jnp.float32(1)), batch)
    want = [jax.random.normal(jax.random.fold_in(batch["key"], i), ()) for i in range(4)]
    assert_bitwise_equal(metrics["aux"], jnp.stack(want))
    assert float(metrics["loss"]) == 1.0


# What a batch may hold besides rows, and the axes with which it means the same in 4 parts.
BESIDES = {
    "class weights": (jnp.arange(1.0, 5.0), None, r"'more', f32|batch leaf 'more': is f32\[4\]"),
    "as many as divide": (jnp.arange(1.0, 9.0), None, r"batch leaf 'more': is f32\[8\]"),
    "a broadcast row": (jnp.ones((1, 3)), None, r"batch leaf 'more': is f32\[1,3\]"),
    "another network": (
        {"w": jnp.ones((8, 4)), "b": jnp.ones(8), "head": jnp.ones((4, 8))},
        None,
        r"batch leaf 'more/b': is f32\[8\]",
    ),
    "keys": (jax.random.split(jax.random.key(0), 4), None, r"batch leaf 'more': is key<fry>\[4\]"),
    "an old key": (jax.random.PRNGKey(0), None, r"u32\[2\](.|\n)*Type jax\.random\.key\(0\)"),
    "rows in the last axis": (jnp.ones((6, 16)), 1, r"batch leaf 'more': is f32\[6,16\]"),
}


def _sum_of_all(w, batch):
    leaves = jax.tree.leaves(batch["more"])
    more = (
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for x in leaves
    )
    return jnp.mean(w * batch["x"]) * sum(jnp.mean(x.astype(jnp.float32) ** 2) for x in more)


@pytest.mark.parametrize("name", BESIDES)
def test_a_leaf_that_is_no_batch_is_refused_and_whole_where_that_is_said(name):
    more, axis, said = BESIDES[name]
    batch = {"x": jnp.arange(16.0), "more": more}
    loss = functools.partial(mpjax.make_train_step, _sum_of_all, optax.sgd(0.1))
    parts = loss(accumulate=4)
    with pytest.raises(ValueError, match=said) as error:
        parts(parts.init(jnp.float32(1)), batch)
    if axis is None and "PRNGKey" not in str(error.value):
        assert "Type accumulate_axes={'more': None, 'x': 0}" in str(error.value)
    losses = []
    for step in (loss(), loss(accumulate=4, accumulate_axes={"more": axis, "x": 0})):
        state, metrics = step(step.init(jnp.float32(1)), batch)
        losses.append((float(metrics["loss"]), float(state.params)))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_the_norm_of_gradients_is_right_from_1e19_down_to_1e_minus_19():
    step = mpjax.make_train_step(lambda w, batch: jnp.sum(w * batch), optax.sgd(0.1), "32-true")
    state = step.init(jnp.ones(2))

    def norm(size):
        return float(step(step.init(jnp.ones(2)), jnp.float32(size))[1]["grad_norm"])

    for size in (1e-18, 1.0, 1e18):
        assert norm(size) == pytest.approx(2**0.5 * size, rel=1e-5)
    assert (norm(1e-22), norm(1e20)) == (0, np.inf)
    assert step(state, jnp.float32(1e20))[1]["grads_finite"]


@pytest.mark.parametrize("policy", ["32-true", "16-mixed"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_complex_parameters_are_trained_as_their_real_and_imaginary_parts(policy, accumulate):
    def loss(z, batch):
        return jnp.mean(jnp.abs(z * batch["x"] - batch["y"]) ** 2)

    def of_parts(parts, batch):
        return loss(jax.lax.complex(*parts), batch)

    x = jnp.arange(1.0, 9.0) / 8
    batch = {"x": x.astype(jnp.complex64), "y": jax.lax.complex(2 * x, 3 * x)}
    tx = optax.sgd(0.5, momentum=0.5)
    steps = [
        mpjax.make_train_step(fun, tx, policy, accumulate=accumulate) for fun in (loss, of_parts)
    ]
    whole, parts = (
        steps[0].init(jnp.complex64(0.5 + 1j)),
        steps[1].init((jnp.ones(()) / 2, jnp.ones(()))),
    )
    for _ in range(30):
        whole, metrics = steps[0](whole, batch)
        parts, _ = steps[1](parts, batch)
    np.testing.assert_allclose(whole.params, jax.lax.complex(*parts.params), rtol=1e-6)
    assert metrics["loss"] < 1e-3


def test_a_sparse_array_goes_whole_to_every_micro_batch():
    def loss(params, batch):
        return jnp.mean((batch["x"] @ (batch["graph"] @ params)) ** 2)

    graph = sparse.BCOO.fromdense(jnp.eye(4) + jnp.eye(4, k=1))
    batch = {"x": jnp.arange(16.0).reshape(4, 4), "graph": graph}
    states = []
    for options in ({}, {"accumulate": 2, "accumulate_axes": {"x": 0, "graph": None}}):
        step = mpjax.make_train_step(loss, optax.sgd(1e-3), "32-true", **options)
        states.append(step(step.init(jnp.ones(4)), batch)[0].params)
    np.testing.assert_allclose(*states, rtol=1e-6)


def test_what_is_whole_is_whole_for_the_amax_histories_and_for_nnx_too():
    def loss(params, batch):
        x = batch["x"]
        for w in params.values():
            x = x @ w
        return jnp.mean((x @ batch["whole"]) ** 2)

    policy = mpjax.QuantizedPolicy("bf16-mixed", mpjax.DelayedScaling())
    axes = {"x": 0, "whole": None}
    step = mpjax.make_train_step(loss, optax.sgd(0.1), policy, accumulate=2, accumulate_axes=axes)
    batch = {"x": jnp.ones((64, 64)), "whole": jnp.ones((64, 4))}
    state = step.init({name: jnp.eye(64) for name in "abc"}, batch=batch)
    assert jnp.isfinite(step(state, batch)[1]["loss"])
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))

    def of_model(model, batch):
        return jnp.mean(model(batch["x"]) @ batch["whole"])

    step = mpjax.nnx.make_train_step(
        model, optax.sgd(0.1), None, of_model, accumulate=2, accumulate_axes=axes
    )
    batch = {"x": jnp.ones((4, 2)), "whole": jnp.ones((2, 3))}
    assert jnp.isfinite(step(step.init(), batch)[1]["loss"])


@pytest.mark.parametrize("accumulate", [1, 4])
def test_extra_state_that_the_loss_promotes_keeps_its_dtype(accumulate):
    def loss(w, seen, x):
        return jnp.mean(w * x), {"sum": seen["sum"].astype(jnp.float32) + x.sum()}

    step = mpjax.make_train_step(loss, optax.sgd(0.1), accumulate=accumulate)
    state = step.init(jnp.float32(1), {"sum": jnp.bfloat16(0)})
    for _ in range(2):  # a promoted one would be another trace, and a scan that does not close
        state, _ = step(state, jnp.ones(4))
    assert_bitwise_equal(state.extra_state, {"sum": jnp.bfloat16(8)})


_STARTS = {"a mean": (0, 0.5), "seen": (False, 1), "a rotation": (1.0, 1j), "few": (np.int8(0), 3)}


@pytest.mark.parametrize("name", _STARTS)
def test_extra_state_that_would_be_truncated_is_refused(name):
    start, new = (jnp.asarray(x) for x in _STARTS[name])
    step = mpjax.make_train_step(lambda w, seen, x: (w * x, {name: new}), optax.sgd(0.1))
    state = step.init(jnp.float32(1), {name: start})
    with pytest.raises(ValueError, match=r"the loss function returned .*\n.*\n.*\.astype\("):
        step(state, jnp.float32(1))


@pytest.mark.parametrize("start", [0.0, 1j], ids=["float", "complex"])
def test_extra_state_takes_integers_that_its_dtype_holds(start):
    step = mpjax.make_train_step(lambda w, seen, x: (w * x, jnp.int32(3)), optax.sgd(0.1))
    state, _ = step(step.init(jnp.float32(1), jnp.asarray(start)), jnp.float32(1))
    assert state.extra_state == 3
    assert state.extra_state.dtype == jnp.asarray(start).dtype


@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_loss_of_bfloat16_is_reported_and_averaged_in_float32(accumulate):
    step = mpjax.make_train_step(
        lambda w, x: (w * jnp.max(x)).astype(jnp.bfloat16), optax.sgd(0.0), accumulate=accumulate
    )
    batch = jnp.array([1, 1, 1, 1 + 2.0**-7])
    _, metrics = step(step.init(jnp.float32(1)), batch)
    want = jnp.float32(1 + 2.0**-7 / (1 if accumulate == 1 else 4))  # a bfloat16 mean would be 1
    assert_bitwise_equal(metrics["loss"], want)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.filterwarnings("ignore:.*loses an update:mpjax.PolicyWarning")
@pytest.mark.filterwarnings("ignore:.*an update below:mpjax.PolicyWarning")
def test_a_loss_that_is_a_number_of_python_is_a_constant(precision, accumulate):
    step = mpjax.make_train_step(
        lambda params, extra, batch: (3.0, extra), optax.sgd(0.1), precision, accumulate=accumulate
    )
    _, metrics = step(step.init(params_of(), {"n": jnp.zeros(())}), batch_of())
    assert (metrics["loss"].dtype, float(metrics["loss"])) == (jnp.float32, 3.0)
    assert not metrics["loss"].weak_type
    assert float(metrics["grad_norm"]) == 0


def test_overwritten_leaves_are_the_last_micro_batchs():
    def fp8(params, x):
        # As Flax's fp8 rules do: the "gradient" of the history is its next value.
        history = params["_overwrite_with_gradient"]["amax"]
        return jnp.sum(params["w"] * x) + jnp.sum(_next_value(history, jnp.max(jnp.abs(x))))

    params = {"w": jnp.ones(()), "_overwrite_with_gradient": {"amax": jnp.zeros(2)}}
    step = mpjax.make_train_step(fp8, optax.sgd(0.0), "32-true", loss_scale=8.0, accumulate=2)
    state, _ = step(step.init(params), jnp.arange(1.0, 5.0))
    assert state.params["_overwrite_with_gradient"]["amax"].tolist() == [4.0, 4.0]


@jax.custom_vjp
def _next_value(history, amax):
    return jnp.zeros_like(history)


_next_value.defvjp(
    lambda history, amax: (jnp.zeros_like(history), (history, amax)),
    lambda saved, _: (jnp.full_like(saved[0], saved[1]), jnp.zeros_like(saved[1])),
)


# -- optimizers that need more, parameters of other libraries -------------------------------------


NEED_MORE = {
    "polyak": optax.polyak_sgd(0.1),
    "momo": optax.contrib.momo(0.1),
    "lbfgs": optax.lbfgs(),
    "schedule_free": optax.contrib.schedule_free_sgd(0.1),  # its state starts as the parameters
}


@OPTAX
@pytest.mark.parametrize("name", NEED_MORE)
def test_optimizers_that_need_the_value_get_the_true_one(name):
    step = mpjax.make_train_step(loss_fn, NEED_MORE[name], "16-mixed", loss_scale=2.0**6)
    state = step.init(params_of())
    before = float(loss_fn(params_of(), batch_of()))
    for _ in range(4):
        state, metrics = step(state, batch_of())
    assert float(metrics["loss"]) < before


PYTREES = {
    "frozen": (flax.core.freeze(params_of()), lambda p, x: x @ p["w"] + p["b"]),
    "list": ([params_of()["w"]], lambda p, x: x @ p[0]),
}


@OPTAX
@pytest.mark.parametrize("kind", PYTREES)
def test_parameters_may_be_any_pytree(kind):
    params, call = PYTREES[kind]

    def loss(params, batch):
        return jnp.mean((call(params, batch["x"]) - batch["y"]).astype(jnp.float32) ** 2)

    step = mpjax.make_train_step(loss, optax.adam(0.01), "16-mixed", loss_scale=2.0**6)
    state, first = step(step.init(params), batch_of())
    _, second = step(state, batch_of())
    assert jax.tree.structure(state.params) == jax.tree.structure(params)
    assert float(second["loss"]) < float(first["loss"])


# -- compilation, donation, transformations -------------------------------------------------------


@OPTAX
@pytest.mark.parametrize("accumulate", [1, 2])
def test_law_9_compiles_once_through_skips_and_growth(accumulate):
    loss, calls = counted(loss_fn)
    step = mpjax.make_train_step(
        loss, optax.adam(0.1), "16-mixed", accumulate=accumulate,
        loss_scale=mpjax.DynamicLossScale(8, growth_interval=1),
    )  # fmt: skip
    state = step.init(params_of())
    state, _ = step(state, batch_of())
    traced = len(calls)
    scales = []
    for batch in (batch_of(), spoilt(batch_of()), batch_of(seed=3)):
        state, metrics = step(state, batch)
        scales.append(float(metrics["loss_scale"]))
    assert scales == [16.0, 32.0, 16.0]
    assert len(calls) == traced


def test_the_state_is_donated_and_the_users_arrays_are_not():
    params, extra = params_of(), jnp.ones(3)

    def loss(p, e, batch):
        return loss_fn(p, batch), e + 1

    step = mpjax.make_train_step(loss, optax.sgd(0.1, momentum=0.9), "32-true")
    state = step.init(params, extra)
    step(state, batch_of())
    assert not any(x.is_deleted() for x in jax.tree.leaves((params, extra)))
    kept = mpjax.make_train_step(loss, optax.sgd(0.1), "32-true", donate=False)
    unshared = kept.init(params, extra)
    kept(unshared, batch_of())
    assert all(x.is_deleted() for x in jax.tree.leaves((state.params, state.extra_state)))
    assert not any(x.is_deleted() for x in jax.tree.leaves(unshared))
    # The optimizer's own constants outlive the donated state: a second run starts as the first.
    assert_bitwise_equal(step.init(params, extra).opt_state, step.init(params, extra).opt_state)


def test_debug_nans_that_cannot_repeat_a_donated_step_says_what_works_instead():
    state = mpjax.make_train_step(loss_fn, optax.sgd(0.1)).init(params_of())

    def repeated(state, batch):  # as JAX does where a compiled step gave NaN
        state.params["w"].delete()
        return state.params["w"] + 1

    said = r"jax.debug_nans found a NaN(.|\n)*step.diagnose"
    with jax.debug_nans(True), pytest.raises(ValueError, match=said):
        checked_call(repeated, state, batch_of())


def test_lowered_ahead_of_time_and_initialised_without_arrays():
    step = mpjax.make_train_step(loss_fn, optax.sgd(LR), "16-mixed", loss_scale=8)
    spec = jax.eval_shape(step.init, params_of())
    compiled = step.lower(spec, jax.eval_shape(lambda: batch_of())).compile()
    state, metrics = compiled(step.init(params_of()), batch_of())
    want, _ = step(step.init(params_of()), batch_of())
    assert_bitwise_equal(state, want)
    assert bool(metrics["grads_finite"])


def test_under_scan_and_vmap_it_is_the_loop():
    step = mpjax.make_train_step(
        loss_fn, optax.sgd(LR), "32-true", loss_scale=mpjax.DynamicLossScale(8), donate=False
    )
    batches = [batch_of(), spoilt(batch_of()), batch_of(seed=4)]
    state = step.init(params_of())
    for batch in batches:
        state, _ = step(state, batch)
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *batches)
    scanned, metrics = jax.lax.scan(step, step.init(params_of()), stacked)
    assert metrics["grads_finite"].tolist() == [True, False, True]
    assert_bitwise_equal(scanned, state)
    states = jax.vmap(lambda _: step.init(params_of()))(jnp.arange(3))
    mapped, metrics = jax.vmap(step)(states, stacked)
    assert metrics["loss_scale"].tolist() == [8.0] * 3
    assert mapped.step.tolist() == [1, 0, 1]
    assert mpjax.current_loss_scale(mapped).loss_scale.tolist() == [8.0, 4.0, 8.0]


@pytest.mark.parametrize(
    ("scale", "used"),
    [(None, 1), (mpjax.NoOpLossScale(), 1), (8.0, 8), (mpjax.DynamicLossScale(8), 8)],
)
def test_metrics_have_the_same_names_under_every_loss_scale_and_without_one(scale, used):
    step = mpjax.make_train_step(loss_fn, optax.sgd(LR), "32-true", loss_scale=scale)
    _, metrics = step(step.init(params_of()), batch_of())
    assert type(metrics) is dict
    assert set(metrics) == mpjax.train.Metrics.__required_keys__
    assert metrics["loss_scale"] == used


# -- bad input ------------------------------------------------------------------------------------


def test_float16_on_a_tpu_warns_where_the_state_is_made(monkeypatch):
    device = types.SimpleNamespace(platform="tpu", device_kind="TPU v5 lite")
    step = mpjax.make_train_step(loss_fn, optax.sgd(0.1), "16-mixed")
    params = params_of()
    monkeypatch.setattr(jax, "devices", lambda *_: [device])
    said = r"(?s)make_train_step: .*gains little.*Type 'bf16-mixed'"
    with pytest.warns(SupportWarning, match=said):
        step.init(params)


def test_a_rule_for_a_module_is_warned_of_once_and_only_where_it_matches_nothing():
    def loss(params, x):
        with jax.named_scope("net"):
            return jnp.mean(x @ params["w"])

    params, x = {"w": jnp.ones((2, 2))}, jnp.ones((2, 2))
    step = mpjax.make_train_step(loss, optax.sgd(0.1), mpjax.PolicyMap("16-mixed", {"net": "f32"}))
    step.adopt(step(step.init(params), x)[0])  # a warning would be an error
    policies = mpjax.PolicyMap("16-mixed", {"nett": "f32"})
    step = mpjax.make_train_step(loss, optax.sgd(0.1), policies)
    with pytest.warns(mpjax.PolicyWarning, match="autocast: .* 'nett', matches none") as caught:
        step(step.init(params), x)
    assert len(caught) == 1
    step = mpjax.make_train_step(loss, optax.sgd(0.1), mpjax.PolicyMap("f32", {"v": "f16"}))
    with pytest.warns(mpjax.PolicyWarning, match="PolicyMap: .* 'v', matches none"):
        step.init(params)
