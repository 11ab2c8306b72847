"""`rounding=` of a train step: what each does, and what is said where none was chosen."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _optimizers import OWNERS
from flax import nnx

import mpjax
from mpjax import optim
from mpjax.testing import assert_bitwise_equal

pytestmark = pytest.mark.standard_promotion("adamw decays bfloat16 weights in float32")


def loss_fn(params, x):
    return jnp.mean((params["w"] * x).astype(jnp.float32))  # its gradient is x / 768


START = {"w": jnp.full(768, 0.5)}


def moved_after_100_steps(policy, rounding, tx=None):
    """Adam at 6e-4, whose steps are 6e-4: half a unit in the last place of 0.5 is 2e-3."""
    step = mpjax.make_train_step(loss_fn, tx or optax.adam(6e-4), policy, rounding=rounding)
    state = step.init(START)
    run = jax.jit(lambda state: jax.lax.scan(step, state, jnp.ones((100, 768)))[0])
    params = np.asarray(run(state).params["w"], np.float32)
    return int((params != 0.5).sum()), params


def test_nearest_moves_no_weight_in_100_steps_and_the_others_move_all():
    full, want = moved_after_100_steps("32-true", None)
    assert full == 768
    assert moved_after_100_steps("bf16-true", "nearest")[0] == 0
    for rounding in ("stochastic", "kahan"):
        count, params = moved_after_100_steps("bf16-true", rounding)
        assert count == 768
        assert abs(params.mean() / want.mean() - 1) < 0.005
    for policy in ("16-true", "O2"):
        assert moved_after_100_steps(policy, "kahan")[0] == 768


# What is left of a weight of 1 in one step: it is on the grid of 2⁻²⁴, as 1 and every step near it.
FALLS = {"bfloat16": 2.0**-20 * 1.25, "float16": 2.0**-14 * 1.5}


def falling(params, x):
    return jnp.sum((params["w"] * x).astype(jnp.float32))


def almost_all(dtype):
    """A float32 step that leaves next to nothing of a weight of 1; no 16-bit gradient is one."""
    return optax.GradientTransformation(
        lambda _: optax.EmptyState(),
        lambda g, s, p=None: (jax.tree.map(lambda g: -(1 - FALLS[dtype]) * jnp.sign(g), g), s),
    )


@pytest.mark.parametrize(
    ("name", "policy"), [("master", "bf16-true"), ("stochastic", "bf16-true"), ("kahan", "16-true")]
)
def test_law_17_a_weight_that_all_but_vanishes_in_a_train_step_lands(name, policy):
    dtype = mpjax.get_policy(policy).param_dtype
    left = jnp.asarray(FALLS[dtype.name], dtype)
    tx = OWNERS[name](almost_all(dtype.name))
    step = mpjax.make_train_step(falling, tx, policy, donate=False)
    state, _ = step(step.init({"w": jnp.ones(8)}), jnp.ones(8))
    assert_bitwise_equal(state.params["w"], jnp.full(8, left))


def test_law_17_a_train_step_lands_on_copies_that_no_update_leads_to():
    tx = optim.with_master_weights(optax.sgd(1.0))
    step = mpjax.make_train_step(falling, tx, "bf16-true", loss_scale=1, donate=False)
    tiny = jnp.full(8, 1.9921875 * 2.0**-20, jnp.bfloat16)  # 8 bits that 1 + 2⁻²³ cannot hold
    state = step.init({"w": tiny})
    elsewhere = state._replace(params={"w": jnp.ones(8, jnp.bfloat16)})
    nudge = jnp.full(8, 2.0**-40, jnp.bfloat16)
    moved, _ = step(elsewhere, nudge)
    assert_bitwise_equal(moved.params["w"], tiny)
    skipped, metrics = step(elsewhere, jnp.full(8, jnp.inf))
    assert not bool(metrics["grads_finite"])
    assert_bitwise_equal(skipped.params, elsewhere.params)


def test_law_17_an_nnx_step_lands_on_copies_that_no_update_leads_to():
    class Model(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.full(8, 1.9921875 * 2.0**-20))

    def loss(model, x):
        return falling({"w": model.w[...]}, x)

    tx = optim.with_master_weights(optax.sgd(1.0))
    step = mpjax.nnx.make_train_step(Model(), tx, "bf16-true", loss, loss_scale=1, donate=False)
    state = step.init()
    elsewhere = state._replace(params=jax.tree.map(jnp.ones_like, state.params))
    moved, _ = step(elsewhere, jnp.full(8, 2.0**-40, jnp.bfloat16))
    assert_bitwise_equal(jax.tree.leaves(moved.params), jax.tree.leaves(state.params))


KEEPING = {
    "master": (OWNERS["master"], "bf16-true", 0.0),
    "split": (OWNERS["split"], "bf16-true", 2.0**-16),  # half of 1/256 of a last place
    "split of float16": (OWNERS["split"], "16-true", 2.0**-19),
    "kahan": (OWNERS["kahan"], "bf16-true", 2.0**-17),
    "float32": (lambda tx: tx, "16-mixed", 0.0),
}


@pytest.mark.standard_promotion("adam divides an int32 count into a float")
@pytest.mark.parametrize("name", KEEPING)
def test_law_17_parameters_that_are_loaded_are_those_that_are_trained(name):
    own, policy, error = KEEPING[name]
    step = mpjax.make_train_step(falling, own(optax.adam(2.0**-10)), policy)
    state, _ = step(step.init({"w": jnp.ones(8)}), jnp.ones(8))
    before = jax.tree.map(jnp.copy, state)
    loaded = {"w": jnp.linspace(2.0, 3.0, 8, dtype=jnp.float32)}
    state = state.with_params(loaded)
    assert_bitwise_equal(state.params["w"], loaded["w"].astype(state.params["w"].dtype))
    full = optim.full_params(state.params, state)["w"]
    assert jnp.max(jnp.abs(full / loaded["w"] - 1)) <= error
    adams = [optax.tree_utils.tree_get(x.opt_state, "mu") for x in (state, before)]
    assert_bitwise_equal(*adams)
    assert_bitwise_equal(mpjax.current_loss_scale(state), mpjax.current_loss_scale(before))
    state, _ = step(state, jnp.ones(8))
    moved = optim.full_params(state.params, state)["w"] - loaded["w"]
    assert jnp.max(jnp.abs(moved)) < 2.0**-7  # a few learning rates, and not back at 1
    assert not loaded["w"].is_deleted()


def test_parameters_are_loaded_to_where_the_old_ones_lie():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    step = mpjax.make_train_step(falling, OWNERS["master"](optax.sgd(0.1)), "bf16-true")
    state = step.init({"w": jax.device_put(jnp.ones(8), sharding)})
    state = state.with_params({"w": np.full(8, 2, np.float32)})
    for x in (state.params, optim.full_params(state.params, state)):
        assert x["w"].sharding == sharding


def test_rounding_goes_around_a_loss_scale_of_ones_own():
    tx = mpjax.with_loss_scale(optax.adam(6e-4), mpjax.DynamicLossScale(8))
    assert moved_after_100_steps("bf16-true", "kahan", tx)[0] == 768


@pytest.mark.parametrize(
    ("policy", "lost"),
    [
        ("bf16-true", r"c=bf16,o=bf16 keeps weights in bfloat16, and loses an update below 2⁻⁹"),
        ("16-true", r"c=f16,o=f16 keeps weights in float16, and loses an update below 2⁻¹²"),
    ],
)
def test_a_policy_that_loses_updates_says_so_in_one_line(policy, lost):
    step = mpjax.make_train_step(loss_fn, optax.adam(1e-3), policy)
    text = rf"^make_train_step: .*{lost} of its weight: type rounding='stochastic' or "
    text += r"'kahan', or wrap tx in mpjax\.optim\.with_master_weights; rounding='nearest' if.*\.$"
    with pytest.warns(mpjax.PolicyWarning, match=text) as found:
        state = step.init(START)
    assert found[0].filename == __file__
    assert "\n" not in str(found[0].message)
    with pytest.warns(mpjax.PolicyWarning, match=text) as found:
        step.adopt(state)
    assert found[0].filename == __file__


def test_nothing_is_said_where_nothing_is_lost_or_it_was_chosen():
    owner = optim.with_master_weights(optax.adam(1e-3), bits=24)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mpjax.make_train_step(loss_fn, optax.adam(1e-3), "bf16-mixed").init(START)
        mpjax.make_train_step(loss_fn, owner, "bf16-true").init(START)
        for rounding in ("nearest", "stochastic", "kahan"):
            step = mpjax.make_train_step(loss_fn, optax.adam(1e-3), "bf16-true", rounding=rounding)
            step.init(START)


@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
def test_rounding_of_float32_parameters_is_said_to_do_nothing(rounding):
    text = rf"parameters in float32, where '{rounding}' does nothing\.\n  Leave it out, or train "
    with pytest.warns(mpjax.PolicyWarning, match=text) as found:
        step = mpjax.make_train_step(loss_fn, optax.adam(1e-3), "bf16-mixed", rounding=rounding)
    assert found[0].filename == __file__
    plain = mpjax.make_train_step(loss_fn, optax.adam(1e-3), "bf16-mixed").init(START)
    assert jax.tree.structure(step.init(START)) == jax.tree.structure(plain)


def test_a_rounding_takes_the_parameters_of_a_map_that_are_narrow():
    policy = mpjax.PolicyMap("bf16-true", {"*norm": "float32"})
    step = mpjax.make_train_step(loss_fn, optax.adam(1e-3), policy, rounding="kahan")
    state = step.init({**START, "norm": jnp.ones(2)})
    kept = state.opt_state.inner_state.compensations
    assert kept["w"].dtype == jnp.bfloat16
    assert kept["norm"] == optax.MaskedNode()
    assert state.params["norm"].dtype == jnp.float32
    assert "rounding='kahan'" in repr(step)


def test_an_nnx_step_takes_it_too():
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    step = mpjax.nnx.make_train_step(
        model, optax.adam(1e-3), "bf16-true", lambda m, x: jnp.mean(m(x)), rounding="stochastic"
    )
    state = step.init()
    assert isinstance(state.opt_state.inner_state, optim.StochasticRoundingState)


def test_second_moments_in_float16_are_named_and_float32_ones_are_right():
    def tiny(params, x):  # gradients of 1.6e-5: their squares are 0 in float16
        return (params["w"] * x).mean().astype(jnp.float32) * 1e-3

    def moved(tx, rounding):
        step = mpjax.make_train_step(tiny, tx, "16-true", rounding=rounding)
        run = jax.jit(lambda state: jax.lax.scan(step, state, jnp.ones((100, 64)))[0])
        return float(run(step.init({"w": jnp.zeros(64)})).params["w"][0])

    with pytest.warns(mpjax.PolicyWarning, match=r"Second moments \(nu\) are float16.*_dtypes\(tx"):
        assert moved(optax.adam(1e-3), None) < -0.3
    mended = mpjax.optim.with_state_dtypes(optax.adam(1e-3))
    assert moved(mended, "nearest") == pytest.approx(-0.1, rel=0.05)
