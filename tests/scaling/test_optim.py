"""The optax wrapper: what a skipped step leaves, what its state tells, what it composes with."""

import pickle

import _optimizers
import chex
import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx
from flax.training import train_state

import mpjax
from mpjax import optim
from mpjax.testing import assert_bitwise_equal

OPTAX = pytest.mark.standard_promotion("optax.apply_updates and adam mix dtypes")
PARAMS = {"layer": {"w": jnp.array([[1.0, -2.0], [0.5, 4.0]]), "b": jnp.array([0.25, -0.0])}}
SCALARS = ("loss_scale", "grads_finite", "skipped_steps", "consecutive_skips", "diverged")


def grads_like(params, seed=0, bad=None):
    random = np.random.default_rng(seed)
    grads = jax.tree.map(lambda p: jnp.asarray(random.normal(size=p.shape), jnp.float32), params)
    if bad is None:
        return grads
    leaves, tree = jax.tree.flatten(grads)
    leaves[-1] = leaves[-1].at[(0,) * leaves[-1].ndim].set(bad)
    return tree.unflatten(leaves)


def train(tx, batches, params=PARAMS):
    return _optimizers.train(tx, params, batches)


# -- law 10: a skipped step never was -------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_law_10_skipped_update_is_minus_zero_and_keeps_the_sign_of_minus_zero(bad):
    params = {"w": jnp.array([-0.0, 0.0, 1.5])}
    tx = mpjax.with_loss_scale(optax.sgd(0.1))
    updates, _ = tx.update({"w": jnp.array([1.0, bad, 1.0])}, tx.init(params), params)
    assert_bitwise_equal(updates, {"w": jnp.full(3, -0.0)})
    assert_bitwise_equal(optax.apply_updates(params, updates), params)


@OPTAX
def test_law_10_eager_and_jitted_steps_agree():
    tx = mpjax.with_loss_scale(optax.sgd(0.5, momentum=0.5), mpjax.DynamicLossScale(8))
    eager, jitted = tx.init(PARAMS), tx.init(PARAMS)
    for batch in (grads_like(PARAMS), grads_like(PARAMS, bad=jnp.nan), grads_like(PARAMS, 1)):
        first, eager = tx.update(batch, eager, PARAMS)
        second, jitted = jax.jit(tx.update)(batch, jitted, PARAMS)
        chex.assert_trees_all_close(first, second, rtol=4 * 2**-24)  # one fused multiply-add
        assert_bitwise_equal(eager._replace(inner_state=()), jitted._replace(inner_state=()))


def test_law_6_gradients_that_only_unscaling_makes_infinite_are_skipped():
    tx = mpjax.with_loss_scale(optax.sgd(1.0), mpjax.StaticLossScale(2.0**-100))
    params = {"w": jnp.ones(2)}
    updates, state = tx.update({"w": jnp.full(2, 1e10)}, tx.init(params), params)
    assert not bool(state.grads_finite)
    assert_bitwise_equal(updates, {"w": jnp.full(2, -0.0)})


@OPTAX
@pytest.mark.parametrize("loss_scale", [None, 256])
def test_law_12_half_gradients_reach_the_optimizer_in_f32(loss_scale):
    # A norm taken in float16 would overflow: optax's clip would then make zeros of all.
    tx = mpjax.with_loss_scale(optax.clip_by_global_norm(1.0), loss_scale)
    grads = {"w": jnp.full(4, 60000.0, jnp.float16)}
    updates, _ = tx.update(grads, tx.init({"w": jnp.zeros(4)}), {"w": jnp.zeros(4)})
    chex.assert_trees_all_close(updates, {"w": jnp.full(4, 0.5)}, rtol=4 * 2**-24)
    assert updates["w"].dtype == jnp.float32


def test_another_grad_than_the_updates_is_unscaled_too_and_not_lost():
    def update(updates, state, params=None, **extra):
        return jax.tree.map(lambda u, g: u + 10 * g, updates, extra["grad"]), state

    inner = optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)
    tx = mpjax.with_loss_scale(inner, mpjax.StaticLossScale(8))
    params = {"w": jnp.ones(2)}
    scaled, other = {"w": jnp.full(2, 8.0)}, {"w": jnp.full(2, 16.0, jnp.float16)}
    for grad, want in ((other, 21.0), (scaled, 11.0)):
        steps, _ = tx.update(scaled, tx.init(params), params, grad=grad)
        assert_bitwise_equal(steps, {"w": jnp.full(2, want)})


def test_what_was_not_finite_is_remembered_after_finite_steps():
    tx = mpjax.with_loss_scale(optax.sgd(0.1))
    good = {"a": jnp.ones(2), "b": jnp.ones(2)}
    state = tx.init(good)
    for grads, want in (
        (good, [True, True]),
        ({**good, "b": jnp.array([1, jnp.nan])}, [True, False]),
        (good, [True, False]),
        ({**good, "a": jnp.array([1, jnp.inf])}, [False, True]),
        (good, [False, True]),
    ):
        _, state = tx.update(grads, state, good)
        assert state.leaf_finite.tolist() == want


# What an update makes of a state (a, b) and a gradient, and what of (1, 2) and (4, 5).
ORIGINS = {
    "swapped": (lambda a, b, g: (b, a), (2, 1)),
    "promoted": (lambda a, b, g: (a.astype(jnp.float32) * 3, b + a), (3, 3)),
    "unchanged": (lambda a, b, g: (a, b * 2), (1, 4)),
    "shared": (lambda a, b, g: (a + b,) * 2, (3, 3)),
    "constant": (lambda a, b, g: (jnp.bfloat16(7), 8.0), (7, 8)),
    "input": (lambda a, b, g: (g[0], g[1]), (4, 5)),
}


@pytest.mark.parametrize("bad", [1.0, jnp.nan])
@pytest.mark.parametrize("kind", ORIGINS)
def test_state_of_any_origin_is_chosen_as_a_whole(kind, bad):
    """Not only what the update computes: what it hands through, too, stays where it was."""
    make, finite = ORIGINS[kind]

    def update(updates, state, params=None):
        return updates, make(*state, updates["w"])

    start = jnp.bfloat16(1), jnp.bfloat16(2)
    tx = mpjax.with_loss_scale(optax.GradientTransformation(lambda _: start, update))
    grads = {"w": jnp.array([4.0, 5.0 * bad])}
    with jax.numpy_dtype_promotion("standard"):
        params = {"w": jnp.ones(2)}
        _, state = jax.jit(tx.update)(grads, tx.init(params), params)
    want = finite if bad == 1.0 else (1, 2)
    assert_bitwise_equal(state.inner_state, tuple(map(jnp.bfloat16, want)))


# -- law 11: it never gives up silently -----------------------------------------------------------


def test_law_11_diverged_at_the_nth_skip_in_a_row_and_ever_after():
    tx = mpjax.with_loss_scale(optax.sgd(0.1), max_consecutive_skips=2)
    params, state = {"w": jnp.ones(2)}, None
    state, flags = tx.init(params), []
    for bad in (np.inf, 1.0, np.nan, np.inf, 1.0):
        updates, state = tx.update({"w": jnp.array([bad, 1.0])}, state, params)
        assert bool(jnp.all(jnp.isfinite(updates["w"])))
        flags.append((int(state.consecutive_skips), bool(state.diverged)))
    assert flags == [(1, False), (0, False), (1, False), (2, True), (0, True)]
    assert bool(jnp.all(updates["w"] < 0))  # the last batch is good, and applied
    with pytest.raises(mpjax.NonFiniteError, match=r"limit of skips in a row was reached, 3 in"):
        mpjax.raise_if_diverged(state, params)


def test_law_11_error_names_the_first_bad_leaf():
    tx = mpjax.with_loss_scale(optax.sgd(0.1), mpjax.DynamicLossScale(4), max_consecutive_skips=2)
    _, state = train(tx, [grads_like(PARAMS, bad=jnp.nan)] * 2)
    text = (
        r"with_loss_scale: 2 steps in a row were skipped; loss scale is 1\.\n"
        r"  First bad leaf: 'layer/w', f32\[2,2\]\.\n"
        r"  Lower the learning rate, .* PolicyMap\.\n"
        r"  Nothing bad was applied\. Mended, go on with opt_state = optax\.tree\.set\(.*\)\.\n"
        r"  More in the documentation, 'Where did it go wrong\?'\."
    )
    with pytest.raises(mpjax.NonFiniteError, match=text):
        mpjax.raise_if_diverged((optax.EmptyState(), {"deep": state}), PARAMS)
    with pytest.raises(mpjax.NonFiniteError, match=r"number 2 of 2; pass the parameters"):
        mpjax.raise_if_diverged(state)


def test_law_11_of_a_whole_state_the_leaf_is_named_and_what_to_type_to_go_on():
    step = mpjax.make_train_step(
        lambda params, x: jnp.sum(params["layer"]["w"]) * x, optax.sgd(0.1), max_consecutive_skips=1
    )
    for leaf in ("w", "none"):
        state, _ = step(step.init(PARAMS), jnp.array(jnp.nan))
        if leaf == "none":
            state = optax.tree.set(state, leaf_finite=jnp.ones(2, bool))
        text = rf"(?s)First bad leaf: .*{leaf}.* state = optax\.tree\.set\(state, diverged="
        with pytest.raises(mpjax.NonFiniteError, match=text):
            mpjax.raise_if_diverged(state)
        mpjax.raise_if_diverged(optax.tree.set(state, diverged=jnp.array(False)))


def test_law_11_a_run_that_was_mended_goes_on_as_its_message_says():
    tx = mpjax.with_loss_scale(optax.sgd(0.1), max_consecutive_skips=2)
    _, opt_state = train(tx, [grads_like(PARAMS, bad=jnp.nan)] * 2)
    opt_state = optax.tree.set(opt_state, diverged=jnp.array(False))
    mpjax.raise_if_diverged(opt_state, PARAMS)
    _, opt_state = tx.update(grads_like(PARAMS), opt_state, PARAMS)
    mpjax.raise_if_diverged(opt_state, PARAMS)
    assert int(opt_state.consecutive_skips) == 0


def test_law_11_without_a_limit_nothing_is_raised_and_nothing_bad_applied():
    tx = mpjax.with_loss_scale(optax.sgd(0.1))
    params, state = train(tx, [grads_like(PARAMS, bad=jnp.nan)] * 9)
    assert_bitwise_equal(params, PARAMS)
    mpjax.raise_if_diverged(state, params)


def test_raise_if_diverged_looks_at_every_wrapper_in_a_partition():
    one, two = (mpjax.with_loss_scale(optax.sgd(0.1), max_consecutive_skips=1) for _ in range(2))
    tx = optax.partition({"one": one, "two": two}, {"w": "one", "b": "two"})
    params = {"w": jnp.ones(3), "b": jnp.ones(2)}
    _, state = tx.update({"w": jnp.ones(3), "b": jnp.full(2, jnp.nan)}, tx.init(params), params)
    with pytest.raises(mpjax.NonFiniteError, match=r"number 1 of 1; pass the parameters that"):
        mpjax.raise_if_diverged(state, params)
    with pytest.raises(mpjax.NonFiniteError, match=r"First bad leaf: 'b', f32\[2\]"):
        mpjax.raise_if_diverged(state, {"b": params["b"]})
    with pytest.raises(ValueError, match=r"holds 2 loss scales, at .*one.*two"):
        mpjax.current_loss_scale(state)


def test_raise_if_diverged_names_a_leaf_beside_masked_ones():
    inner = optax.masked(optax.sgd(0.1, 0.9), {"layer": {"w": False, "b": True}})
    tx = mpjax.with_loss_scale(inner, max_consecutive_skips=1)
    grads = {"layer": {"w": jnp.full((2, 2), jnp.inf), "b": jnp.ones(2)}}
    _, state = tx.update(grads, tx.init(PARAMS), PARAMS)
    with pytest.raises(mpjax.NonFiniteError, match=r"First bad leaf: 'layer/w', f32\[2,2\]"):
        mpjax.raise_if_diverged(state, PARAMS)
    outside = optax.masked(tx, {"layer": {"w": True, "b": False}})
    _, state = outside.update(grads, outside.init(PARAMS), PARAMS)
    with pytest.raises(mpjax.NonFiniteError, match=r"number 1 of 1; pass the parameters that"):
        mpjax.raise_if_diverged(state, PARAMS)


def test_raise_if_diverged_reads_a_state_with_the_leading_axis_of_vmap():
    tx = mpjax.with_loss_scale(optax.sgd(0.1), max_consecutive_skips=1)
    params = {"a": jnp.ones((3, 2)), "b": jnp.ones((3, 2))}
    grads = {"a": jnp.ones((3, 2)), "b": jnp.ones((3, 2)).at[1].set(jnp.inf)}
    _, state = jax.vmap(tx.update)(grads, jax.vmap(tx.init)(params), params)
    with pytest.raises(mpjax.NonFiniteError, match=r"1 step in a row .*\n.*'b', f32\[3,2\]"):
        mpjax.raise_if_diverged(state, params)


# -- law 13: it composes --------------------------------------------------------------------------

SCALE = 2.0**10


def wrapped(inner):
    return mpjax.with_loss_scale(inner, mpjax.StaticLossScale(SCALE))


def adam():
    return optax.adam(0.1)


HALF, PARTS = {"layer": {"w": True, "b": False}}, {"layer": {"w": 0, "b": 1}}
INJECT = optax.inject_hyperparams
# What may stand around an optimizer, of which `own` makes the wrapped one or leaves it plain.
AROUND = {
    "chain": lambda own: optax.chain(own(optax.chain(optax.clip(1.0), adam())), optax.scale(0.5)),
    "masked": lambda own: optax.masked(own(adam()), {"layer": True}),
    "masked in part": lambda own: optax.masked(own(adam()), HALF),
    "partition": lambda own: optax.partition({0: own(adam()), 1: own(optax.sgd(0.1))}, PARTS),
    "inject_hyperparams": lambda own: INJECT(lambda rate: own(optax.adam(rate)))(0.1),
    "schedule_free": lambda own: optax.contrib.schedule_free(own(adam()), 0.1),
    "lookahead": lambda own: optax.lookahead(own(optax.sgd(0.1)), 2, 0.5),
}
# A mask outside leaves gradients scaled that the wrapper does not see.
WAYS = [(name, way) for name in AROUND for way in ("inside", "outside")]
WAYS.remove(("masked in part", "outside"))


@pytest.mark.sampled(2)
@OPTAX
@pytest.mark.parametrize(("name", "way"), WAYS)
def test_law_13_composes_both_ways_round(name, way):
    around = AROUND[name]
    plain = around(lambda tx: tx)
    tx = wrapped(plain) if way == "inside" else around(wrapped)
    start = optax.LookaheadParams(PARAMS, PARAMS) if name == "lookahead" else PARAMS
    clean = [grads_like(PARAMS, seed) for seed in range(3)]
    scaled = [jax.tree.map(lambda g: g * SCALE, grads) for grads in clean]
    (params, state), (want, _) = train(tx, scaled, start), train(plain, clean, start)
    if jax.__version_info__ >= (0, 12) or name == "lookahead":
        assert_bitwise_equal(params, want)
    else:  # XLA:CPU contracts other products and sums to one rounding when gradients are scaled
        jax.tree.map(lambda a, b: np.testing.assert_array_max_ulp(a, b, 4), params, want)
    if (name, way) != ("partition", "outside"):  # which holds two
        assert float(mpjax.current_loss_scale(state).loss_scale) == SCALE


@OPTAX
def test_law_13_an_inf_micro_batch_never_reaches_the_accumulator_of_multisteps():
    tx = mpjax.with_loss_scale(optax.MultiSteps(adam(), 2).gradient_transformation())
    first, second = grads_like(PARAMS, 1), grads_like(PARAMS, 2)
    params, state = train(tx, [first, grads_like(PARAMS, bad=jnp.inf), second])
    want, clean = train(tx, [first, second])
    assert_bitwise_equal(params, want)
    assert_bitwise_equal(state.inner_state, clean.inner_state)


@OPTAX
def test_law_13_apply_if_finite_inside_never_gets_to_give_up():
    tx = mpjax.with_loss_scale(optax.apply_if_finite(adam(), 1))
    params, _ = train(tx, [grads_like(PARAMS, bad=jnp.nan)] * 5)
    assert_bitwise_equal(params, PARAMS)


# -- law 14: Flax's own loops ---------------------------------------------------------------------


class Network(linen.Module):
    @linen.compact
    def __call__(self, x, train=True):
        x = linen.BatchNorm(use_running_average=not train)(linen.Dense(4)(x))
        return linen.Dense(1)(x)


def test_law_14_flax_train_state_forwards_no_extra_arguments():
    model, x = Network(), jnp.ones((4, 3))
    variables = model.init(jax.random.key(0), x)
    state = train_state.TrainState.create(
        apply_fn=model.apply,
        params=variables["params"],
        tx=mpjax.with_loss_scale(optax.sgd(0.1), mpjax.DynamicLossScale(8)),
    )
    good = grads_like(state.params, 1)
    moved = state.apply_gradients(grads=jax.tree.map(lambda g: g * 8, good))
    want = jax.tree.map(lambda p, g: p + -0.1 * g, state.params, good)
    chex.assert_trees_all_close(moved.params, want, rtol=2**-23)
    skipped = moved.apply_gradients(grads=grads_like(state.params, 1, bad=jnp.inf))
    assert_bitwise_equal(skipped.params, moved.params)
    assert float(mpjax.current_loss_scale(skipped).loss_scale) == 4.0
    assert int(optax.tree.get(skipped.opt_state, "skipped_steps")) == 1


@pytest.mark.no_leak_check("nnx.jit keeps its graph's tracers until it is done")
@OPTAX
def test_law_14_nnx_optimizer_passes_extra_arguments_and_wraps_every_scalar():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    seen = []

    def watch(updates, state, params=None, *, value, **extra):
        seen.append(value)
        return updates, state

    spy = optax.GradientTransformationExtraArgs(lambda params: (), watch)
    tx = mpjax.with_loss_scale(
        optax.chain(spy, adam()), mpjax.DynamicLossScale(8), max_consecutive_skips=1
    )
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        loss_scale = mpjax.current_loss_scale(optimizer.opt_state)
        value, grads = nnx.value_and_grad(lambda m: loss_scale.scale(jnp.mean(m(x) ** 2)))(model)
        optimizer.update(model, grads, value=value)

    step(model, optimizer, jnp.ones((4, 3)))
    assert len(seen) == 1
    before = nnx.state(model)
    step(model, optimizer, jnp.full((4, 3), jnp.inf))
    assert_bitwise_equal(nnx.state(model), before)
    for state in (optimizer, optimizer.opt_state, nnx.state(optimizer)):
        assert float(mpjax.current_loss_scale(state).loss_scale) == 4.0
        with pytest.raises(mpjax.NonFiniteError, match=r"First bad leaf: 'bias', f32\[2\]"):
            mpjax.raise_if_diverged(state, nnx.state(model, nnx.Param))
    assert float(optax.tree.get(optimizer.opt_state, "loss_scale")[...]) == 4.0


# -- law 16: the state is visible -----------------------------------------------------------------


@OPTAX
def test_law_16_scalars_are_strong_typed_and_readable_anywhere_in_a_state():
    inner = optax.inject_hyperparams(lambda rate: wrapped(optax.adam(rate)))(0.1)
    tx = optax.chain(optax.masked(inner, {"layer": True}))
    state = tx.init(PARAMS)
    for _ in range(2):
        dtypes = [optax.tree.get(state, name).dtype for name in SCALARS]
        assert dtypes == [jnp.float32, jnp.bool_, jnp.int32, jnp.int32, jnp.bool_]
        assert not any(x.weak_type for x in jax.tree.leaves(state))
        _, state = tx.update(grads_like(PARAMS), state, PARAMS)


@pytest.mark.parametrize(
    "loss_scale",
    [
        mpjax.NoOpLossScale(),
        mpjax.StaticLossScale(8),
        mpjax.DynamicLossScale(8, growth_interval=3, min_loss_scale=2, counter=1),
    ],
    ids=["noop", "static", "dynamic"],
)
def test_law_4_current_loss_scale_is_the_one_given_field_by_field(loss_scale):
    tx = mpjax.with_loss_scale(optax.sgd(0.1), loss_scale)
    for state in (tx.init(PARAMS), pickle.loads(pickle.dumps(tx.init(PARAMS)))):
        found = mpjax.current_loss_scale(state)
        assert type(found) is type(loss_scale)
        assert_bitwise_equal(*map(jax.tree.leaves, (found, loss_scale)))


@OPTAX
def test_map_params_finds_the_moments_and_nothing_of_the_wrapper():
    tx = wrapped(optim.with_master_weights(adam()))
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)  # float32 needs no master
    marked = optax.tree.map_params(
        tx, lambda _: "moment", tx.init(params), transform_non_params=lambda _: "other"
    )
    assert jax.tree.leaves(marked).count("moment") == 3 * len(jax.tree.leaves(PARAMS))


# -- Flax's overwritten collection ----------------------------------------------------------------


def test_overwritten_leaves_are_replaced_never_scaled_clipped_or_averaged():
    params = {"w": jnp.ones(2), "_overwrite_with_gradient": {"amax": jnp.array([1.0, 2.0])}}
    grads = {"w": jnp.full(2, 8.0), "_overwrite_with_gradient": {"amax": jnp.array([900.0, 3.0])}}
    inner = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(1.0))
    tx = mpjax.with_loss_scale(inner, mpjax.StaticLossScale(8))
    updates, state = tx.update(grads, tx.init(params), params)
    moved = optim.apply_updates(params, updates)
    assert_bitwise_equal(moved["_overwrite_with_gradient"], grads["_overwrite_with_gradient"])
    chex.assert_trees_all_close(moved["w"], jnp.full(2, 1 - 0.5 / 2**0.5), rtol=2**-22)
    bad = {**grads, "w": jnp.array([jnp.inf, 8.0])}
    updates, state = tx.update(bad, state, params)
    assert_bitwise_equal(optim.apply_updates(params, updates), params)
