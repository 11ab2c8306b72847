"""Moments in 16 and 8 bits: what codes keep, what averages of them do, what is refused."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from _optimizers import CHECKPOINTS, train
from _places import ROOT
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import mpjax
from mpjax import optim
from mpjax._low_precision import codes, rounding
from mpjax.testing import assert_bitwise_equal

KINDS = ["int8", "float8"]
kinds = pytest.mark.parametrize("kind", KINDS)
pytestmark = pytest.mark.standard_promotion(
    "optax mixes dtypes, and apply_updates adds f32 to bf16"
)


decode = jax.jit(codes.decode)


@functools.partial(jax.jit, static_argnames=("kind", "size", "second"))
def encode(x, kind, *, size=256, second, count=0):
    """Returns codes of a moment; each count has chances of its own."""
    random = rounding.scattered(x.shape, jnp.asarray(count, jnp.int32), 1)
    return codes.encode(x, kind, size, random, is_second=second)


def moment(shape=(8, 512), *, second, seed=0):
    random = np.random.default_rng(seed)
    x = random.normal(size=shape) * np.exp(3 * random.normal(size=shape))
    return jnp.asarray(x**2 if second else x, jnp.float32)


# -- codes ----------------------------------------------------------------------------------------


seconds = pytest.mark.parametrize("second", [False, True], ids=["first", "second"])


@kinds
@seconds
def test_codes_that_are_decoded_come_back_whatever_the_chance(kind, second):
    coded = encode(moment(second=second), kind, second=second)
    for count in range(1, 5):
        assert_bitwise_equal(encode(decode(coded), kind, second=second, count=count), coded)


@kinds
def test_a_second_moment_that_is_not_zero_does_not_become_zero(kind):
    x = np.exp2(np.linspace(-120.0, 60.0, 8 * 512, dtype=np.float32)).reshape(8, 512)
    x[0, 3] = 0.0
    for count in range(4):
        back = np.asarray(decode(encode(x, kind, second=True, count=count)))
        assert_bitwise_equal(back == 0, x == 0)
        assert (back >= 0).all()


# Codes are at most this far from what they stand for: of the number itself near the top of a
# block, and of the block's largest anywhere. int8: two codes are 3.3 % and 2 % apart at the top;
# float8: an eighth, which is 1.5 times as much in the power 1.5, and 3 times in the cube.
REACH = {("int8", False): 0.033, ("int8", True): 0.02}
REACH |= {("float8", False): 1.5 / 8, ("float8", True): 3 / 8}


@pytest.mark.parametrize(("kind", "second"), REACH)
def test_codes_are_near_and_right_in_the_mean(kind, second):
    x = moment(second=second)
    coded = jax.vmap(lambda count: encode(x, kind, second=second, count=count))(jnp.arange(200))
    draws = np.asarray(jax.vmap(decode)(coded))
    largest = np.abs(np.asarray(x)).reshape(8, 2, 256).max(-1).repeat(256, -1).reshape(8, 512)
    error = np.abs(draws - x)
    assert (error <= (REACH[kind, second] + 2.0**-8) * largest).all()
    spread = draws.std(0) + 1e-6 * largest
    assert (
        np.abs(np.mean(draws, 0) - x) <= 6 * spread / np.sqrt(200) + 1e-6 * largest
    ).mean() > 0.9


@kinds
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@seconds
def test_what_is_not_finite_is_seen_and_stays_in_its_block(kind, bad, second):
    x = moment((2, 8192), second=second).at[0, 5000].set(bad)  # XLA:CPU's maximum passes over NaN
    back = np.asarray(decode(encode(x, kind, second=second)))
    assert np.isnan(back[0, 4864:5120]).all()
    assert np.isfinite(back[0, :4864]).all()
    assert np.isfinite(back[0, 5120:]).all()


@kinds
@seconds
def test_a_row_can_be_one_block(kind, second):
    x = moment((2, 8192), second=second).at[0, 5000].set(np.nan)
    coded = encode(x, kind, size=None, second=second)
    assert coded.scales.shape == (2, 1)
    assert float(coded.scales[1, 0]) == float(np.abs(np.asarray(x)[1]).max())
    back = np.asarray(decode(coded))
    assert np.isnan(back[0]).all()
    assert ((back[1] != 0) | (not second)).all()
    assert np.abs(back[1] - np.asarray(x)[1]).max() <= float(coded.scales[1, 0]) / 4


@kinds
@pytest.mark.parametrize("size", [1, 257, 1000])  # alone, one left over, four of 250
def test_blocks_of_any_length(kind, size):
    x = np.array(moment((3, size), second=False))
    x[2] = 0
    coded = encode(x, kind, second=False)
    assert coded.codes.shape == x.shape
    assert coded.scales.shape == (3, -(-size // 256))
    back = np.asarray(decode(coded))
    assert (np.abs(back - x) <= np.abs(x).max() / 7).all()
    assert (back[2] == 0).all()


# -- blocks that span decades ---------------------------------------------------------------------


def _trainer(tx):
    """Returns a function of sizes: weights after noisy gradients of these, the largest update."""
    target = jax.random.normal(jax.random.key(9), (16, 256))
    keys = jax.random.split(jax.random.key(0), 100)

    @jax.jit
    def train(size):
        def step(carry, key):
            params, state, largest = carry
            noise = 0.5 * jax.random.normal(key, target.shape)
            updates, state = tx.update((params - target + noise) * size, state, params)
            largest = jnp.maximum(largest, jnp.max(jnp.abs(updates)))
            return (optax.apply_updates(params, updates), state, largest), None

        start = (jnp.zeros_like(target), tx.init(target), jnp.float32(0))
        (params, _, largest), _ = jax.lax.scan(step, start, keys)
        return params, largest

    return train


SIZES = (1, 1e2, 1e4, 1e6)
PATTERNS = {
    "an outlier": lambda size: jnp.ones((16, 256)).at[:, 5].set(size),
    "a small one": lambda size: jnp.ones((16, 256)).at[:, 5].set(1 / size),
    "all over": lambda size: size ** jax.random.uniform(jax.random.key(3), (16, 256)),
}
# docs/optimizers.md: by spread, how many times Adam's largest update a single one can be.
ROW = r"^\| (\d[\d,]*) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$"
STORES = {
    "int8": optim.with_quantized_state,
    "float8": lambda tx: optim.with_quantized_state(tx, "float8"),
    "bfloat16": lambda tx: optim.with_quantized_state(tx, rules={"**": "bfloat16"}),
}


@functools.cache
def most_by_spread():
    text = (ROOT / "docs" / "optimizers.md").read_text()
    rows = re.findall(ROW, text, re.MULTILINE)
    sizes = [float(row[0].replace(",", "")) for row in rows]
    assert sizes == list(SIZES)
    cells = zip(sizes, rows, strict=True)
    return {(s, k): float(x) for s, row in cells for k, x in zip(STORES, row[1:], strict=True)}


@functools.cache
def _trained_by(kind):
    adam = optax.adam(1e-2)
    return _trainer(STORES[kind](adam) if kind in STORES else adam)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("size", SIZES)
def test_updates_are_bounded_at_every_spread_as_the_docs_say(size, kind):
    times = []
    for pattern in PATTERNS if size > 1 else ("an outlier",):
        sizes = PATTERNS[pattern](size)
        (want, most), (got, largest) = _trained_by("float32")(sizes), _trained_by(kind)(sizes)
        # Codes of equal steps in a root made updates of 36 times Adam's, and weights 76 % off.
        off = float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
        assert off < (0.005 if kind == "bfloat16" else 0.15)
        times.append(float(largest / most))
    most_said = most_by_spread()[size, kind]
    assert max(times) <= most_said
    assert max(times) > 0.75 * most_said  # the docs do not frighten either
    assert kind != "bfloat16" or most_said <= 1.1


def _after_steps(columns, kind="int8"):
    tx = mpjax.with_loss_scale(optim.with_quantized_state(optax.adam(1e-3), kind))
    params = {"in": {"w": jnp.ones((64, 256))}, "out": jnp.ones((64, 256))}
    grads = {"in": {"w": jnp.ones((64, 256)) * columns}, "out": jnp.ones((64, 256))}
    return tx.update(grads, tx.init(params), params)[1], params


@kinds
@pytest.mark.parametrize("size", [1, 1e2, 1e4, 1e6])
def test_what_is_too_wide_for_8_bits_is_said_with_what_to_type(size, kind):
    state, params = _after_steps(jnp.ones(256).at[5].set(size), kind)
    found = optim.moment_spread(state, params)
    (path, widest, share), (other, plain, none) = found.rows
    assert (path, other, plain, none) == ("in/w", "out", 1.0, 0.0)
    assert size / 1.5 < widest < 1.5 * size
    assert share == (pytest.approx(255 / 256) if size > 1e3 else 0)
    if size < 1e3:
        assert found.rules == {}
        mpjax.raise_if_diverged(state.inner_state, params)
        return mpjax.raise_if_diverged(state, params)
    assert found.rules == {"in/w": "bfloat16"}
    text = r"raise_if_diverged: gradients within a block of 'in/w' are \de\+0\d times apart, too "
    text += (
        r"far for moments in 8 bits: single updates of Adam are up to 3 times float32's, and of "
    )
    text += r"others more(.|\n)*moment_spread\(opt_state, params\)\.rules"
    for seen in (state, state.inner_state):  # with a loss scale, and without one
        with pytest.warns(mpjax.PolicyWarning, match=text):
            mpjax.raise_if_diverged(seen, params)
    # What it says to type: a state that follows Adam, and of which there is nothing more to say.
    tx = mpjax.with_loss_scale(
        optim.with_quantized_state(optax.adam(1e-3), kind, rules=found.rules)
    )
    state = optim.adopt_state(tx, state, params)
    assert state.inner_state.inner_state[0].nu["in"]["w"].dtype == jnp.bfloat16
    mpjax.raise_if_diverged(state, params)
    return None


def test_a_spread_is_read_on_the_host_of_any_state():
    state, params = _after_steps(jnp.ones(256).at[5].set(1e4))
    with pytest.raises(ValueError, match=r"moment_spread: it was called inside a traced function"):
        jax.jit(lambda s: optim.moment_spread(s).rows)(state)
    assert optim.moment_spread(state).rows[0][0].endswith("in/w")
    assert optim.moment_spread(optax.adam(1e-3).init(params)).rows == ()
    assert "1 of 2 wide" in repr(optim.moment_spread(state, params))


# -- averages -------------------------------------------------------------------------------------

AVERAGES = {
    "bf16": lambda tx, **_: optim.with_state_dtypes(tx, mu_dtype="bf16", nu_dtype="bf16"),
    "int8": optim.with_quantized_state,
    "float8": lambda tx, **options: optim.with_quantized_state(tx, "float8", **options),
}


@pytest.mark.parametrize("store", AVERAGES.values(), ids=AVERAGES)
def test_averages_follow_float32_where_each_step_is_less_than_a_code(store):
    kind = "float8" if store is AVERAGES["float8"] else "int8"
    params = {"w": jnp.zeros((2, 256))}  # the smallest that shows it
    adam = optax.scale_by_adam(b2=0.999)
    tx = store(adam, rules={"w": kind})
    state, plain = tx.init(params), adam.init(params)

    @jax.jit
    def steps(scale, state, plain, seed):
        def body(carry, key):
            grads = {"w": scale * jax.random.normal(key, (2, 256))}
            return (tx.update(grads, carry[0])[1], adam.update(grads, carry[1])[1]), None

        keys = jax.random.split(jax.random.key(seed), 1000)
        return jax.lax.scan(body, (state, plain), keys)[0]

    for scale, seed in ((1.0, 0), (0.1, 1)):  # up to a level, and down
        state, plain = steps(scale, state, plain, seed)
        nu = state.inner_state.nu["w"]
        nu = decode(nu) if isinstance(nu, optim.SecondMoment) else nu.astype(jnp.float32)
        ratio = float(jnp.mean(jnp.sqrt(nu)) / jnp.mean(jnp.sqrt(plain.nu["w"])))
        assert abs(ratio - 1) < 0.05
        assert bool(jnp.all(nu > 0))


@pytest.mark.parametrize("store", AVERAGES.values(), ids=AVERAGES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_arithmetic_is_float32_and_small_leaves_are_left_alone(store, dtype):
    seen = []

    def look(updates, state, params=None):
        seen.append({x.dtype for x in jax.tree.leaves((updates, state))})
        return updates, state

    adam = optax.scale_by_adam()
    spy = optax.GradientTransformation(
        adam.init, lambda u, s, p=None: (look(u, s), adam.update(u, s, p))[1]
    )
    params = {"w": jnp.ones((64, 64), dtype), "embedding": jnp.ones((64, 128), dtype)}
    params |= {"norm": jnp.ones(5000, dtype), "bias": jnp.ones(10, dtype)}
    tx = store(spy)
    state = jax.eval_shape(tx.init, params)
    updates, after = jax.eval_shape(tx.update, params, state, params)
    assert seen == [{np.dtype("float32"), np.dtype("int32")}]
    assert {u.dtype for u in jax.tree.leaves(updates)} == {np.dtype("float32")}
    assert [x.dtype for x in jax.tree.leaves(after)] == [x.dtype for x in jax.tree.leaves(state)]
    if isinstance(state, optim.QuantizedState):
        for name in ("embedding", "norm", "bias"):
            assert state.inner_state.mu[name].dtype == jnp.float32
        assert isinstance(state.inner_state.mu["w"], optim.FirstMoment)


MOMENTS = {
    "adamw": (lambda: optax.adamw(0.1), 2),
    "sgd": (lambda: optax.sgd(0.1, momentum=0.9), 1),
    "rmsprop centred": (lambda: optax.rmsprop(0.1, centered=True, momentum=0.9), 1),
    "ademamix": (lambda: optax.contrib.ademamix(0.1), 3),
    "muon": (lambda: optax.contrib.muon(0.1), 1),
    "schedule_free": (lambda: optax.contrib.schedule_free_adamw(0.1), 1),
    "injected": (lambda: optax.inject_hyperparams(optax.adam)(0.1), 2),
    "masked": (lambda: optax.masked(optax.adam(0.1), {"w": True}), 2),
    "partition": (lambda: optax.partition({"a": optax.adam(0.1)}, {"w": "a"}), 2),
    "multi": (lambda: optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(), 2),
}


@pytest.mark.parametrize("name", MOMENTS)
def test_moments_are_found_in_any_optimizer(name):
    make, count = MOMENTS[name]
    params = {"w": jnp.ones((64, 64))}
    tx = optim.with_quantized_state(make())
    state = tx.init(params)
    coded = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, tuple) and hasattr(x, "codes"))
    assert sum(hasattr(x, "codes") for x in coded) == count
    updates, after = tx.update({"w": jnp.full((64, 64), 0.5)}, state, params)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert [x.dtype for x in jax.tree.leaves(after)] == [x.dtype for x in jax.tree.leaves(state)]
    assert bool(jnp.isfinite(updates["w"]).all())


# -- composition ----------------------------------------------------------------------------------


def small():
    return {"w": jnp.asarray(np.random.default_rng(0).normal(size=(64, 128)), jnp.bfloat16)}


def batch(seed):
    return {"w": jnp.asarray(np.random.default_rng(seed).normal(size=(64, 128)), jnp.float32)}


def run(tx, batches):
    return train(tx, small(), batches)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("store", AVERAGES.values(), ids=AVERAGES)
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
def test_law_10_a_skipped_step_leaves_every_code(store, inside):
    scale = mpjax.StaticLossScale(1)
    adam = optax.adam(0.01)
    tx = store(mpjax.with_loss_scale(adam, scale)) if inside else mpjax.with_loss_scale(store(adam))
    bad = {"w": batch(9)["w"].at[0, 0].set(np.nan)}
    want, want_state = run(tx, [batch(0), batch(1)])
    got, got_state = run(tx, [batch(0), bad, batch(1)])
    assert_bitwise_equal(got, want)
    wanted, gotten = want_state.inner_state, got_state.inner_state
    assert_bitwise_equal(*((x.inner_state if inside else x) for x in (gotten, wanted)))


@kinds
def test_with_an_owner_of_the_rounding_inside_and_outside(kind):
    adam = optax.adamw(1e-2)
    outside = optim.with_kahan(optim.with_quantized_state(adam, kind))
    inside = optim.with_quantized_state(optim.with_kahan(adam), kind)
    got, state = run(outside, [batch(0)])
    assert_bitwise_equal(run(inside, [batch(0)])[0], got)
    assert state.compensations["w"].dtype == jnp.bfloat16


@kinds
def test_law_16_checkpoints_and_nnx_keep_every_code(kind, tmp_path):
    tx = optim.with_quantized_state(optax.adam(1e-2), kind)
    _, state = run(tx, [batch(0)])
    empty = tx.init(small())
    for through in CHECKPOINTS:
        assert_bitwise_equal(through(state, empty, tmp_path), state)
    model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    optimizer.update(model, jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param)))
    mu = nnx.as_pure(optimizer.opt_state).inner_state[0].mu["kernel"]
    assert mu.codes.dtype == (jnp.int8 if kind == "int8" else jnp.float8_e4m3fn)


@pytest.mark.parametrize("size", [256, None], ids=["blocks", "rows"])
def test_law_15_blocks_along_the_last_axis_move_nothing_between_devices(size, devices):
    mesh = Mesh(np.array(devices).reshape(2, 4), ("data", "model"))
    placed = NamedSharding(mesh, PartitionSpec("data", "model"))
    params, grads = (
        {"w": jax.device_put(jnp.ones((8, 1024), d), placed)} for d in (jnp.bfloat16, jnp.float32)
    )
    tx = optim.with_kahan(optim.with_quantized_state(optax.adamw(1e-3), block_size=size))
    state = jax.jit(tx.init)(params)
    compiled = jax.jit(tx.update).lower(grads, state, params).compile()
    text = compiled.as_text()
    for word in ("all-gather", "all-to-all", "collective-permute"):
        assert f" {word}" not in text
    assert (" all-reduce" in text) == (size is None)  # of what is largest in a row
    _, after = compiled(grads, state, params)
    assert after.inner_state.inner_state[0].mu["w"].codes.sharding.spec == placed.spec


# -- what is refused ------------------------------------------------------------------------------


def test_rules_choose():
    params = {"head": {"kernel": jnp.ones((64, 64))}, "embedding": jnp.ones((64, 64))}
    rules = {"head/*": "float32", "embed*": "float8"}
    state = optim.with_quantized_state(optax.adam(0.1), rules=rules).init(params)
    assert state.inner_state[0].mu["head"]["kernel"].dtype == jnp.float32
    assert state.inner_state[0].mu["embedding"].codes.dtype == jnp.float8_e4m3fn


def test_a_state_of_another_form_is_refused_while_tracing():
    params = small()
    forms = {**AVERAGES, "blocks": lambda tx: optim.with_quantized_state(tx, block_size=64)}
    states = {name: store(optax.adam(0.1)).init(params) for name, store in forms.items()}
    for name, store in forms.items():
        for other, state in states.items():
            if other != name:
                with pytest.raises(ValueError, match=r"update: the state is .*\n .*adopt_state\("):
                    jax.eval_shape(store(optax.adam(0.1)).update, batch(0), state, params)


@pytest.mark.parametrize("store", [optim.with_quantized_state, optim.with_state_dtypes])
@pytest.mark.parametrize("jit", [False, True])
def test_what_is_complex_passes_through_both_ways(store, jit):
    params = {"spectral": jnp.ones((9, 64, 64), jnp.complex64), "linear": jnp.ones((64, 64))}
    grads = jax.tree.map(lambda p: p * 0.5, params)
    plain, tx = optax.adam(1e-2), store(optax.adam(1e-2))
    update = jax.jit(tx.update) if jit else tx.update
    want, before = plain.update(grads, plain.init(params), params)
    for state in (tx.init(params), optim.adopt_state(tx, tx.init(params), params)):
        got, after = update(grads, state, params)
        np.testing.assert_allclose(got["spectral"], want["spectral"], rtol=1e-6)
        assert after.inner_state[0].mu["spectral"].dtype == jnp.complex64
        update(grads, after, params)
    # From a state of another form, and back to one.
    there = optim.adopt_state(tx, before, params)
    back = optim.adopt_state(plain, there, params)
    assert_bitwise_equal(back[0].mu["spectral"], before[0].mu["spectral"])
    assert_bitwise_equal(back[0].nu["spectral"], before[0].nu["spectral"])
