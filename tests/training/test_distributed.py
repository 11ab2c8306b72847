"""Law 15 on eight devices: one decision for all shards, and gradients that are means."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _helpers import over_shards
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mpjax
from mpjax.testing import assert_bitwise_equal

SHARDS = 8
PARAMS = {"w": jnp.array([1.0, -2.0, 0.5]), "b": jnp.array(0.25)}


def loss_fn(params, batch):
    # Products and sums of small whole numbers and powers of two: exact in any order.
    out = batch["x"] @ params["w"] + params["b"]
    return jnp.mean(out.astype(jnp.float32) ** 2)


def batch_of(bad_row=None):
    x = jnp.asarray(np.random.default_rng(0).integers(-4, 5, (2 * SHARDS, 3)), jnp.float32)
    return {"x": x if bad_row is None else x.at[bad_row, 0].set(jnp.inf)}


def make_step(*, fun=loss_fn, **options):
    loss_scale = mpjax.DynamicLossScale(8, growth_interval=2)
    options = {"loss_scale": loss_scale, "donate": False, **options}
    tx = optax.sgd(0.125, momentum=0.5)
    return mpjax.make_train_step(fun, tx, "32-true", **options)


def mesh(devices):
    return jax.make_mesh((SHARDS,), ("data",), (AxisType.Auto,), devices=devices)


def under(kind, step, devices):
    """Returns the step under one of JAX's ways to be parallel, and how to read its state."""
    if kind == "pmap":
        mapped = jax.pmap(step, axis_name="data", in_axes=(0, 0), devices=devices)

        def call(state, batch):
            first = jax.tree.leaves(state)[0]
            if first.ndim == 0:
                state = jax.tree.map(lambda x: jnp.stack([x] * SHARDS), state)
            split = jax.tree.map(lambda x: x.reshape(SHARDS, -1, *x.shape[1:]), batch)
            return mapped(state, split)

        # Read by the host: each `x[i]` would be a program over all devices, and many of those at a
        # time wait for each other on two cores, for ever (XLA:CPU of JAX 0.10.2).
        def members(tree):
            tree = jax.device_get(tree)
            return [jax.tree.map(lambda x, i=i: x[i], tree) for i in range(SHARDS)]

        return call, members
    if kind == "jit":
        sharding = NamedSharding(mesh(devices), P("data"))
        return lambda state, batch: step(state, jax.device_put(batch, sharding)), lambda t: [t]
    check_vma = kind == "shard_map checked"
    mapped = over_shards(step, mesh(devices), P(), P("data"), check_vma=check_vma)
    return mapped, lambda tree: [tree]


WAYS = ["jit", "shard_map checked", "shard_map unchecked", "pmap"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", WAYS)
def test_law_15_one_shards_inf_makes_all_skip_and_gradients_are_means(kind, accumulate, devices):
    axis_name = None if kind == "jit" else "data"
    step, members = under(kind, make_step(axis_name=axis_name, accumulate=accumulate), devices)
    single = make_step()
    state = want = single.init(PARAMS)
    for bad_row in (None, 5, None):
        # One program at a time: a worker on JAX 0.10.2 has crashed in this test, under load.
        state, metrics = jax.block_until_ready(step(state, batch_of(bad_row)))
        want, expected = single(want, batch_of(bad_row))
        for seen in members(metrics):
            assert bool(seen["grads_finite"]) == (bad_row is None)
            assert float(seen["loss_scale"]) == float(expected["loss_scale"])
    for member in members(state):
        # Sums of 16 small numbers, ordered by shard: a few units in the last place.
        chex.assert_trees_all_close(member, want, rtol=2**-19)
        assert (int(member.step), int(member.opt_state.skipped_steps)) == (2, 1)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", WAYS[1:])
def test_law_15_a_loss_that_is_a_mean_already_gives_the_same_step(kind, accumulate, devices):
    def loss(params, batch):
        return jax.lax.pmean(loss_fn(params, batch), "data")

    states = []
    for fun in (loss_fn, loss):
        step = make_step(axis_name="data", accumulate=accumulate, fun=fun)
        mapped, members = under(kind, step, devices)
        states.append(members(mapped(step.init(PARAMS), batch_of(None))[0])[0])
    chex.assert_trees_all_close(*states, rtol=2**-19)


@pytest.mark.no_leak_check("pytest.raises keeps the frame that holds the tracer")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_without_the_axis_over_which_its_batch_is_split_names_it(accumulate, devices):
    step = make_step(accumulate=accumulate)
    mapped = over_shards(step, mesh(devices), P(), P("data"))
    with pytest.raises(ValueError, match=r"(?s)'data' has a loss of its own.*axis_name='data'\)"):
        mapped(step.init(PARAMS), batch_of())


@pytest.mark.parametrize("kind", ["loss", "optimizer", "parameters", "unchecked", "vmap"])
def test_a_step_without_an_axis_runs_where_devices_agree_or_have_weights_of_their_own(
    kind, devices
):
    def loss(params, batch):
        return jax.lax.pmean(loss_fn(params, batch), "data")

    tx = optax.sgd(0.125)
    if kind == "optimizer":
        tx = mpjax.with_loss_scale(tx, axis_name="data")
    step = mpjax.make_train_step(loss if kind == "loss" else loss_fn, tx, donate=False)

    def taken(state, batch):
        if kind == "parameters":
            params = jax.tree.map(lambda x: jax.lax.pcast(x, "data", to="varying"), state.params)
            state = state._replace(params=params)
        state, metrics = step(state, batch)
        return jax.lax.pmin(metrics["grads_finite"].astype(jnp.int32), "data")

    if kind == "vmap":
        split = jax.tree.map(lambda x: x.reshape(SHARDS, -1, *x.shape[1:]), batch_of())
        assert jax.vmap(taken, (None, 0), axis_name="data")(step.init(PARAMS), split).all()
        return
    specs = {"check_vma": kind != "unchecked"}
    assert over_shards(taken, mesh(devices), P(), P("data"), **specs)(step.init(PARAMS), batch_of())


def test_a_first_state_on_the_mesh_compiles_once(devices):
    step, _ = under("shard_map checked", make_step(axis_name="data"), devices)
    run = jax.jit(step)
    state = jax.device_put(make_step().init(PARAMS), NamedSharding(mesh(devices), P()))
    for _ in range(3):
        state, _ = run(state, batch_of(None))
    assert run._cache_size() == 1


@pytest.mark.parametrize("check_vma", [True, False])
def test_law_15_the_wrapper_agrees_and_leaves_averaging_to_its_caller(check_vma, devices):
    tx = mpjax.with_loss_scale(optax.sgd(1.0), mpjax.StaticLossScale(4), axis_name="data")
    state = tx.init(jnp.zeros(1))

    def update(grads, state):
        updates, state = tx.update(grads, state)
        return updates, state.grads_finite[None], state.leaf_finite

    specs = {"out_specs": (P("data"), P("data"), P()), "check_vma": check_vma}
    mapped = over_shards(update, mesh(devices), P("data"), P(), **specs)
    grads = jnp.arange(8.0)
    updates, finite, _ = mapped(grads, state)
    assert_bitwise_equal(updates, jnp.where(grads == 0, -0.0, -grads / 4))
    assert finite.all()
    updates, finite, leaves = mapped(grads.at[3].set(jnp.nan), state)
    assert_bitwise_equal(updates, jnp.full(8, -0.0))
    assert not finite.any()
    assert leaves.tolist() == [False]


@pytest.mark.standard_promotion("optax raises a float to the power of an integer count")
@pytest.mark.parametrize("kind", ["shard_map checked", "shard_map unchecked", "pmap"])
def test_law_15_moments_and_extra_state_are_the_same_on_every_shard(kind, devices):
    def loss(params, count, batch):
        return loss_fn(params, batch), count + 1

    step = mpjax.make_train_step(
        loss, optax.adam(0.125), "bf16-mixed", axis_name="data", donate=False
    )
    call, members = under(kind, step, devices)
    state, metrics = call(step.init(PARAMS, jnp.int32(0)), batch_of())
    assert {int(member.extra_state) for member in members(state)} == {1}
    assert all(bool(member["grads_finite"]) for member in members(metrics))


def test_sharded_parameters_stay_sharded_through_steps_and_skips(devices):
    sharding = NamedSharding(mesh(devices), P("data"))
    step = mpjax.make_train_step(
        lambda w, x: jnp.mean((w * x).astype(jnp.float32) ** 2), optax.sgd(0.5, momentum=0.5)
    )
    state = jax.device_put(step.init(jnp.arange(16.0)), NamedSharding(mesh(devices), P()))
    state = state._replace(params=jax.device_put(state.params, sharding))
    for x in (jnp.ones(16), jnp.full(16, jnp.inf)):
        state, _ = step(state, jax.device_put(x, sharding))
        assert state.params.sharding.is_equivalent_to(sharding, 1)
    assert int(state.opt_state.skipped_steps) == 1


def test_autocast_inside_shard_map_leaves_nothing_for_jit_on_the_same_mesh(devices):
    """A program that is kept from one is of devices apart, in the other of all of them."""

    def loss(w, x):
        return jnp.mean((x @ w) ** 2)

    args = jnp.ones((7, 5)), jnp.ones((9, 7))
    grad = jax.grad(mpjax.autocast(loss, "bf16-mixed"))
    with jax.set_mesh(mesh(devices)):
        inside = jax.shard_map(grad, in_specs=P(), out_specs=P(), check_vma=False)
        assert_bitwise_equal(jax.jit(inside)(*args), jax.jit(grad)(*args))


@pytest.mark.no_leak_check("a diagnosis holds what it traced")
def test_what_overflows_in_a_step_in_a_shard_map_is_found_in_the_sum_of_its_losses(devices):
    """The step divides gradients by the number of devices after the backward pass."""

    def loss(params, x):
        return jnp.mean(jax.nn.relu(x @ params) ** 2)

    specs = {"mesh": mesh(devices), "in_specs": (P(), P("data")), "out_specs": P()}
    params, batch = jnp.full((4, 4), 2.0), jnp.ones((8, 4))
    kinds = []
    for joined in (jax.lax.psum, jax.lax.pmean):
        whole = jax.shard_map(lambda p, x, join=joined: join(loss(p, x), "data"), **specs)
        look = mpjax.numerics.diagnose(whole, "16-mixed", loss_scale=2.0**15)
        kinds.append(look(params, batch).cause.kind)
    step = mpjax.make_train_step(
        loss, optax.sgd(0.1), "16-mixed", axis_name="data", loss_scale=2.0**15
    )
    _, metrics = jax.jit(jax.shard_map(step, **specs))(step.init(params), batch)
    assert not metrics["grads_finite"]
    assert kinds == ["loss_scale", "none"]
