"""Wrappers that own the rounding of 16-bit parameters: what they keep, and what they refuse."""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _optimizers import CHECKPOINTS, OWNERS, stepper, train
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import mpjax
from mpjax import optim
from mpjax.testing import assert_bitwise_equal, assert_one_compilation

owners = pytest.mark.parametrize("own", OWNERS.values(), ids=OWNERS)
halves = pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bf16", "f16"])
pytestmark = pytest.mark.standard_promotion("optax.apply_updates adds float32 to half parameters")


def params_of(dtype=jnp.bfloat16):
    random = np.random.default_rng(0)
    w = random.normal(size=(4, 8)) * np.exp(random.normal(size=(4, 8)))
    return {"w": jnp.asarray(w, dtype), "b": jnp.array([-0.0, 0.0, 1.5], dtype)}


def grads_of(params, seed, bad=None):
    random = np.random.default_rng(seed)
    grads = jax.tree.map(lambda p: jnp.asarray(random.normal(size=p.shape), jnp.float32), params)
    return grads if bad is None else {**grads, "b": grads["b"].at[0].set(bad)}


# -- sums of a thousand small steps ---------------------------------------------------------------

# 1 + 1000 · 10⁻³ in bfloat16: where it ends, and how far its mean may be from there. 24 bits round
# each sum to 2⁻¹⁵ of the weight's power of two: 10⁻³ is 32.768 of these, and becomes 33.
ENDS = {
    "nearest": (lambda tx: tx, 1.0, 0.0),
    "master": (OWNERS["master"], 2.0, 0.0),
    "split": (OWNERS["split"], 2.0, 2.0**-6),
    "kahan": (OWNERS["kahan"], 2.0, 2.0**-6),
    "stochastic": (OWNERS["stochastic"], 2.0, 0.01),
}


def thousand_steps(tx, dtype=jnp.bfloat16, count=4096):
    params = jnp.ones(count, dtype)

    def body(carry, _):
        params, state = carry
        updates, state = tx.update(jnp.full(count, -1e-3, jnp.float32), state, params)
        return (optax.apply_updates(params, updates), state), None

    (params, _), _ = jax.lax.scan(body, (params, tx.init(params)), None, 1000)
    return params.astype(jnp.float32)


@pytest.mark.parametrize("name", ENDS)
def test_a_thousand_steps_of_a_thousandth(name):
    own, end, within = ENDS[name]
    got = np.asarray(jax.jit(lambda: thousand_steps(own(optax.sgd(1.0))))())
    assert abs(got.mean(dtype=np.float64) - end) <= within
    if name not in ("stochastic", "nearest"):
        assert np.ptp(got) == 0


# -- law 17: updates land -------------------------------------------------------------------------


@functools.cache
def in_float32(dtype):
    """Returns where 40 steps in float32 end from what a 16-bit dtype holds."""
    params = params_of(dtype)
    batches = [grads_of(params, seed) for seed in range(40)]
    return train(optax.adamw(1e-3), optax.tree.cast(params, jnp.float32), batches)[0]


@owners
@halves
def test_law_17_parameters_follow_float32_training(own, dtype):
    params = params_of(dtype)
    batches = [grads_of(params, seed) for seed in range(40)]
    got, state = train(own(optax.adamw(1e-3)), params, batches)
    want = in_float32(dtype)
    ulp = float(jnp.finfo(dtype).eps)
    for key in params:
        rounded = np.asarray(got[key], np.float32)
        # Chance adds up as a random walk: √40 half units are a deviation, of which these are five.
        bound = (16 if own is OWNERS["stochastic"] else 1.2) * ulp * np.abs(want[key]) + 1e-6
        assert (np.abs(rounded - want[key]) <= bound).all()
        known = np.asarray(optim.full_params(got, state)[key])
        if own is not OWNERS["stochastic"]:
            # 24 bits are rounded by up to half of 1/256 of a unit in each of 40 steps.
            lost = (40 / 512 if own is OWNERS["split"] else 2.0**-7) * ulp * np.abs(want[key])
            assert (np.abs(known - want[key]) <= lost + 1e-6).all()


@owners
def test_law_17_the_inner_optimizer_reads_float32_gradients_and_the_weights_as_they_are_known(own):
    seen = []

    def look(grads, weights):
        seen.append((grads, weights))
        return jax.tree.map(lambda g: -1e-3 * g, grads)

    tx, params = own(optax.stateless(look)), params_of()
    state = tx.init(params)
    for seed in range(3):
        grads = jax.tree.map(lambda g: g.astype(jnp.bfloat16), grads_of(params, seed))
        full = jax.tree.map(lambda x: x.astype(jnp.float32), grads)
        known = optim.full_params(params, state)
        updates, state = tx.update(grads, state, params)
        assert_bitwise_equal(seen[-1], (full, known))
        params = optax.apply_updates(params, updates)


@halves
def test_law_17_what_is_known_rounds_to_the_parameters(dtype):
    params = params_of(dtype)
    for own in (OWNERS["master"], OWNERS["split"]):
        tx = own(optax.adamw(0.01))
        state, step = tx.init(params), stepper(tx)
        moved = params
        for seed in range(10):
            moved, state = step(moved, state, grads_of(params, seed))
            assert_bitwise_equal(optax.tree.cast(optim.full_params(moved, state), dtype), moved)


@owners
@halves
def test_no_step_leaves_every_bit(own, dtype):
    tx, start = own(optax.sgd(0.01)), params_of(dtype)
    nothing = jax.tree.map(lambda p: jnp.zeros(p.shape), start)
    for params, state in ((start, tx.init(start)), train(tx, start, [grads_of(start, 0)])):
        for zero in (nothing, jax.tree.map(jnp.negative, nothing)):
            updates, after = tx.update(zero, state, params)
            assert_bitwise_equal(optax.apply_updates(params, updates), params)
            assert_bitwise_equal(updates, jax.tree.map(lambda p: jnp.full(p.shape, -0.0), params))
            if not isinstance(state, optim.StochasticRoundingState):
                assert_bitwise_equal(after, state)


@halves
@pytest.mark.parametrize("name", ["master", "split", "kahan"])
@pytest.mark.parametrize("jit", [False, True])
def test_a_step_that_is_lost_even_on_what_is_kept_is_counted_as_lost(name, dtype, jit):
    tx, start = OWNERS[name](optax.sgd(1.0)), params_of(dtype)
    update = jax.jit(tx.update) if jit else tx.update
    params, state = train(tx, start, [grads_of(start, 0)])
    for size, share in ((2.0**-12, 0.0), (2.0**-40, 1.0)):
        grads = jax.tree.map(lambda p, size=size: p.astype(jnp.float32) * size, params)
        grads["b"] = grads["b"].at[0].set(0.0)  # of a parameter that is 0 or nearly so: none
        updates, after = update(grads, state, params)
        lost = mpjax.numerics.lost_updates(params, updates)
        assert {path: float(x) for path, x in lost.items()} == dict.fromkeys(params, share)
        if share:
            assert_bitwise_equal(optax.apply_updates(params, updates), params)
            assert_bitwise_equal(after, state)
    zeros = {"w": jnp.array([0.0, -0.0], dtype)}
    steps = jax.tree.map(lambda p: jnp.full(p.shape, 1e-40, jnp.float32), zeros)
    updates, _ = update(steps, tx.init(zeros), zeros)
    if name == "split":  # a correction of zero has a least unit
        assert_bitwise_equal(optax.apply_updates(zeros, updates), zeros)


def test_full_bits_survive_where_a_difference_is_beyond_float32():
    big = jnp.full(2, 3e38, jnp.bfloat16)
    tx = optim.with_master_weights(optax.sgd(1.0))
    state = tx.init(-big)
    state = state._replace(master_params=big.astype(jnp.float32))
    updates, state = tx.update(jnp.zeros(2), state, -big)
    assert not bool(jnp.isfinite(optim.apply_updates(-big, updates)).all())
    assert_bitwise_equal(optim.apply_updates(-big, updates, state), big)


# -- weights in float32 beside the parameters ----------------------------------------------------


@halves
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


def test_with_master_weights_other_leaves_are_updated_as_the_optimizer_says_and_none_is_shared():
    params = {"norm": jnp.ones(2), "w": jnp.ones(2, jnp.bfloat16)}
    tx = optim.with_master_weights(optax.sgd(0.25))
    state = tx.init(params)
    updates, _ = jax.jit(tx.update, donate_argnums=1)(params, state, params)
    assert_bitwise_equal(optax.apply_updates(params, updates)["norm"], jnp.full(2, 0.75))
    assert not params["norm"].is_deleted()


@pytest.mark.parametrize("policy", ["O2", "16-true"])
def test_a_train_step_of_half_parameters_skips_and_leaves_the_master_weights(policy):
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


# -- skipped steps --------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@owners
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
def test_law_10_a_run_with_a_bad_batch_is_the_run_without(own, inside):
    params = params_of()
    scaled, plain = mpjax.with_loss_scale, optax.adamw(1e-2)
    scale = mpjax.StaticLossScale(1)
    tx = own(scaled(plain, scale)) if inside else scaled(own(plain), scale)
    good = [grads_of(params, seed) for seed in range(3)]
    with_bad = [good[0], grads_of(params, 9, np.inf), good[1], grads_of(params, 9, np.nan), good[2]]
    (want, want_state), (got, got_state) = train(tx, params, good), train(tx, params, with_bad)
    assert_bitwise_equal(got, want)
    clear = lambda state: jax.tree.map(  # noqa: E731 - what counts skips differs, as it should
        lambda x: x.inner_state if isinstance(x, optim.LossScaleState) else x,
        state,
        is_leaf=lambda x: isinstance(x, optim.LossScaleState),
    )
    assert_bitwise_equal(clear(got_state), clear(want_state))


# -- stochastic rounding --------------------------------------------------------------------------


def test_chances_come_from_seed_count_and_path():
    params = {"a": jnp.ones((8, 8), jnp.bfloat16), "b": jnp.ones((8, 8), jnp.bfloat16)}
    grads = jax.tree.map(lambda p: jnp.full(p.shape, -(2.0**-9)), params)

    def moved(seed, params=params, steps=1):
        grads_here = {key: grads[key] for key in params}
        tx = optim.with_stochastic_rounding(optax.sgd(1.0), seed)
        return train(tx, params, [grads_here] * steps)[0]

    first = moved(0)
    assert_bitwise_equal(moved(0), first)
    assert_bitwise_equal(moved(jax.random.key(0)), first)
    assert_bitwise_equal(moved(0, {"b": params["b"]})["b"], first["b"])  # another place in the tree
    for other in (moved(1)["a"], first["b"]):
        assert not np.array_equal(other, first["a"])
    twice = moved(0, steps=2)
    assert set(np.unique(np.asarray(twice["a"], np.float32))) == {1.0, 1.0078125, 1.015625}
    rbg = moved(jax.random.key(0, impl="rbg"))
    assert not np.array_equal(rbg["a"], first["a"])


@pytest.mark.sampled(2)
@owners
def test_law_15_shards_and_replicas_agree(own, devices):
    params = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(16, 64)), jnp.bfloat16)}
    batches = [{"w": jnp.full((16, 64), 0.3 * k)} for k in range(1, 4)]
    tx = own(optax.adamw(1e-3))
    want, want_state = train(tx, params, batches)
    mesh = Mesh(np.array(devices).reshape(2, 4), ("data", "model"))
    for spec in (PartitionSpec(), PartitionSpec("data", "model")):
        placed = NamedSharding(mesh, spec)
        here = jax.device_put(params, placed)
        got, state = train(tx, here, [jax.device_put(g, placed) for g in batches])
        assert_bitwise_equal((got, state), (want, want_state))
        for shard in got["w"].addressable_shards:  # replicas hold the same bits
            assert_bitwise_equal(np.asarray(shard.data), np.asarray(want["w"][shard.index]))


SHARDED = """
import jax, jax.numpy as jnp, numpy as np, optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from mpjax import optim
from mpjax.testing import assert_bitwise_equal

tx = optim.with_quantized_state(optax.adamw(1e-2), block_size=16)
owners = [optim.with_kahan, optim.with_stochastic_rounding, optim.with_master_weights]
params = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(64, 256)), jnp.bfloat16)}
mesh = Mesh(np.array(jax.devices()).reshape(16, 16), ("data", "model"))
for own in (*owners, lambda tx: optim.with_master_weights(tx, bits=24)):
    step = jax.jit(own(tx).update)
    ends = []
    for spec in (None, P("data", "model"), P()):
        here = params if spec is None else jax.device_put(params, NamedSharding(mesh, spec))
        state = own(tx).init(here)
        for k in range(1, 3):
            grads = jax.tree.map(lambda p: (0.1 * k * p.astype(jnp.float32)), here)
            updates, state = step(grads, state, here)
            here = optax.apply_updates(here, updates)
        ends.append([np.asarray(x).tobytes() for x in jax.tree.leaves((here, state))])
    assert ends[0] == ends[1] == ends[2]
print(len(jax.devices()), "agree")
"""


@pytest.mark.slow
def test_law_15_256_shards_agree():
    flags = "--xla_force_host_platform_device_count=256 --xla_backend_optimization_level=0"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", SHARDED]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.stdout == "256 agree\n", done.stderr[-2000:]


# -- composition ----------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@owners
def test_it_works_for_a_part_of_the_parameters(own):
    params = {**params_of(), "norm": jnp.ones(3)}
    parts = {"low": own(optax.adam(1e-2)), "high": optax.sgd(0.1)}
    tx = optax.partition(parts, {"w": "low", "b": "low", "norm": "high"})
    batches = [jax.tree.map(lambda p, k=k: jnp.full(p.shape, 0.1 * k), params) for k in (1, 2)]
    moved, state = train(tx, params, batches)
    assert moved["w"].dtype == jnp.bfloat16
    assert not np.array_equal(moved["w"], params["w"])
    floats = {x.dtype for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)}
    assert floats <= {np.dtype("float32"), jnp.dtype(jnp.bfloat16)}
    assert_bitwise_equal(train(mpjax.with_loss_scale(tx), params, batches)[0], moved)


@owners
def test_law_16_checkpoints_keep_every_bit(own, tmp_path):
    _, state = train(own(optax.adam(1e-2)), params_of(), [grads_of(params_of(), 0)])
    empty = own(optax.adam(1e-2)).init(params_of())
    for through in CHECKPOINTS:
        assert_bitwise_equal(through(state, empty, tmp_path), state)


@owners
def test_law_09_one_trace_and_donated_buffers(own):
    tx = own(optax.adam(1e-2))
    params = params_of()
    state = tx.init(params)

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optim.apply_updates(params, updates), state

    with assert_one_compilation(step, donate_argnums=(0, 1)) as traced:
        for seed in range(3):
            params, state = traced(params, state, grads_of(params_of(), seed))


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("own", OWNERS.values(), ids=OWNERS)
def test_a_state_of_another_form_is_refused_while_tracing(own):
    params = params_of()
    other = OWNERS["split"] if own is OWNERS["kahan"] else OWNERS["kahan"]
    with pytest.raises(ValueError, match=r"the state is no \w+; got a \w+State\.\n .*adopt_state"):
        jax.eval_shape(
            own(optax.sgd(0.1)).update, params, other(optax.sgd(0.1)).init(params), params
        )
