"""Slips that would stop learning with no error: scaled twice, averaged wrongly, never looked at."""

import functools
import gc
import pickle
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _helpers import Traced, over_shards
from _places import ROOT
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import mpjax
from mpjax._base.gradient_tags import _KNOWN
from mpjax._scaling.chains import skipped_whole
from mpjax._scaling.owned import is_owned, owned
from mpjax.testing import assert_bitwise_equal

PARAMS = {"w": jnp.array([1.0, -2.0])}


def square(params, x):
    return jnp.mean((params["w"] * x) ** 2)


# -- scaled once, unscaled once --------------------------------------------------------------------


@pytest.mark.parametrize("unscale", [None, False])
@pytest.mark.parametrize("scale", [1024.0, mpjax.DynamicLossScale(2.0**15), None])
def test_a_wrapped_optimizer_trains_at_full_speed_without_a_word_about_unscaling(scale, unscale):
    tx = mpjax.with_loss_scale(optax.sgd(0.25), scale)

    @jax.jit
    def step(params, state, x):
        loss_scale = mpjax.current_loss_scale(state)
        grads = mpjax.grad(square, loss_scale=loss_scale, unscale=unscale)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, _ = step(PARAMS, tx.init(PARAMS), jnp.ones(2))
    assert_bitwise_equal(params, {"w": jnp.array([0.75, -1.5])})


class Halving:
    """A loss scale of a user's own class: half as much after each overflow, and a count of them."""

    def __init__(self, loss_scale=64.0, overflows=0):
        self.loss_scale = jnp.asarray(loss_scale, jnp.float32)
        self.overflows = jnp.asarray(overflows, jnp.int32)

    def scale(self, tree):
        return jax.tree.map(lambda x: x * self.loss_scale, tree)

    def unscale(self, tree):
        return jax.tree.map(lambda x: x / self.loss_scale, tree)

    def adjust(self, grads_finite):
        smaller = jnp.where(grads_finite, self.loss_scale, self.loss_scale / 2)
        return Halving(smaller, self.overflows + (~grads_finite).astype(jnp.int32))


def made(_, children):
    new = object.__new__(Halving)
    new.loss_scale, new.overflows = children
    return new


jax.tree_util.register_pytree_node(Halving, lambda s: ((s.loss_scale, s.overflows), None), made)


@pytest.mark.parametrize("scale", [mpjax.StaticLossScale(8), mpjax.DynamicLossScale(8), Halving()])
def test_the_mark_of_the_optimizers_scale_survives_what_a_step_does_with_it(scale):
    state = mpjax.with_loss_scale(optax.sgd(0.1), scale).init(PARAMS)
    assert not any(map(is_owned, jax.tree.leaves(state, is_leaf=lambda x: hasattr(x, "adjust"))))
    found = mpjax.current_loss_scale(state)
    assert is_owned(found)
    assert is_owned(jax.jit(lambda s: s)(found))
    assert is_owned(jax.tree.map(lambda x: x, found))
    assert is_owned(found.adjust(jnp.array(True)))
    assert is_owned(pickle.loads(pickle.dumps(found)))
    assert is_owned(
        jax.lax.scan(lambda s, _: (s.adjust(jnp.array(True)), None), found, length=2)[0]
    )
    assert owned(found) is found
    assert repr(found) == repr(scale) or isinstance(scale, Halving)
    # No cache takes one for the other, and the mark is no leaf, so that no checkpoint holds it.
    traced = Traced(taken)
    factor = float(scale.loss_scale)
    for given, want in ((found, factor), (scale, 1.0), (found, factor)):
        assert traced(given)["w"].tolist() == [want, -2 * want]
    assert traced.traces == 2
    assert len(jax.tree.leaves(found)) == len(jax.tree.leaves(scale))


# -- gradients of another scale than the optimizer's -----------------------------------------------


def scaled_by_own(state):
    return taken(mpjax.current_loss_scale(state))


def at(value, state):
    return state._replace(loss_scale=jnp.float32(value))


DYNAMIC = mpjax.with_loss_scale(optax.sgd(0.25), mpjax.DynamicLossScale(8.0))
ONLY_SKIPS = mpjax.with_loss_scale(optax.sgd(0.25))
START = DYNAMIC.init(PARAMS)
SCALE = mpjax.current_loss_scale(START)


def taken(scale):
    return mpjax.grad(square, loss_scale=scale)(PARAMS, jnp.ones(2))


def update(grads, state=START, tx=DYNAMIC):
    return tx.update(grads, state, PARAMS)


# What a step made of the scales, and what is said of it.
SLIPS = {
    "of an earlier state": (
        lambda: update(scaled_by_own(START), at(16, START)),
        r"'w' was taken with a loss scale of 8, and that of this optimizer is 16(.|\n)*earlier",
    ),
    "of an earlier state, traced": (
        lambda: jax.jit(functools.partial(update_with, SCALE))(START),
        r"a loss scale of 8 that was read outside of this traced step(.|\n)*Type loss_scale=mpjax",
    ),
    "of another optimizer": (
        lambda: update(scaled_by_own(at(512, START))),
        r"taken with a loss scale of 512, and that of this optimizer is 8",
    ),
    "for one that only skips": (
        lambda: update(scaled_by_own(START), ONLY_SKIPS.init(PARAMS), ONLY_SKIPS),
        r"of another optimizer, and this one holds none",
    ),
    "unscaled by hand": (
        lambda: update(SCALE.unscale(scaled_by_own(START))),
        r"'w' is not scaled, and this optimizer would divide it(.|\n)*unscale\(grads\) has been",
    ),
    "taken with none": (
        lambda: jax.jit(lambda s: update(taken(None), s))(START),
        r"'w' is not scaled(.|\n)*current_loss_scale\(opt_state\)",
    ),
    "taken with one's own": (lambda: update(taken(mpjax.DynamicLossScale())), r"'w' is not scaled"),
    "a number": (lambda: update(taken(START.loss_scale)), r"'w' is not scaled"),
    "clipped before": (
        lambda: mpjax.optim.clip_by_global_norm(1.0).update(scaled_by_own(START), None),
        r"clip_by_global_norm: gradient 'w' is multiplied(.|\n)*Clip inside",
    ),
    "measured before": (
        lambda: mpjax.optim.global_norm(scaled_by_own(START)),
        r"global_norm: gradient 'w' is multiplied(.|\n)*loss_scale\.unscale\(grads\)",
    ),
}


@pytest.mark.parametrize("name", SLIPS)
@pytest.mark.no_leak_check("pytest.raises keeps the frame that holds the tracer")
def test_gradients_that_are_known_to_be_of_another_scale_are_refused(name):
    run, said = SLIPS[name]
    with pytest.raises(ValueError, match=said):
        run()


FASTER = mpjax.with_loss_scale(optax.sgd(0.25), mpjax.DynamicLossScale(512.0))


def update_with(scale, state):
    return update(taken(scale), state)[0]


@pytest.mark.parametrize(
    ("scale", "state"),
    [
        (SCALE, START),  # the same number under two names
        (mpjax.current_loss_scale(FASTER.init(PARAMS)), START),  # another optimizer's
        (SCALE, at(64, START)),  # of an earlier state
    ],
)
def test_a_scale_that_comes_in_as_an_argument_is_the_one_that_gradients_are_divided_by(
    scale, state
):
    want = {"w": -0.25 * square_grads()["w"]}
    assert_bitwise_equal(jax.jit(update_with)(scale, state), want)


def square_grads():
    return jax.grad(square)(PARAMS, jnp.ones(2))


def test_a_static_scale_may_be_read_outside_and_gradients_may_be_taken_apart():
    tx = mpjax.with_loss_scale(optax.sgd(0.25), 8.0)
    state = tx.init(PARAMS)
    scale = mpjax.current_loss_scale(state)

    @jax.jit
    def step(state):
        return tx.update(taken(scale), state, PARAMS)[0]

    want = {"w": -0.25 * square_grads()["w"]}
    assert_bitwise_equal(step(state), want)
    # Through a jit of their own, and a sum: other arrays, of which nothing is known or said.
    grads = jax.jit(taken)(scale)
    assert_bitwise_equal(tx.update(grads, state, PARAMS)[0], want)
    halves = jax.tree.map(lambda g: g / 2 + g / 2, scaled_by_own(state))
    assert_bitwise_equal(tx.update(halves, state, PARAMS)[0], want)


TRUE = {"w": jnp.array([-0.25, 0.5])}  # the updates of a step that is right
OTHER = mpjax.with_loss_scale(optax.sgd(0.25), mpjax.DynamicLossScale(8.0)).init(PARAMS)


def updates_of(grads, state=START):
    return update(grads, state)[0]


@jax.custom_vjp
def normalised(params):
    """`params`, whose cotangent is at most 2: that of `square` is, and a scaled one is not."""
    return params


normalised.defvjp(
    lambda params: (params, None),
    lambda _, cts: ({"w": cts["w"] * jnp.minimum(1, 2 / abs(cts["w"]).max())},),
)


def square_of_normalised(params, x):
    return square(normalised(params), x)


# As docs/recipes.md lists them: what nobody sees, and by how much its updates are wrong.
UNSEEN = {
    "`jax.grad` into an optimizer that is wrapped": (lambda: updates_of(square_grads()), 1 / 8),
    "Gradients changed by your own arithmetic": (
        lambda: updates_of({"w": scaled_by_own(START)["w"] / SCALE.loss_scale}),
        1 / 8,
    ),
    "A derivative of your own that clips or normalises cotangents": (
        lambda: updates_of(
            mpjax.grad(square_of_normalised, loss_scale=SCALE)(PARAMS, jnp.ones(2)),
        ),
        1 / 8,
    ),
    "Scaled and unscaled gradients added": (
        lambda: updates_of(jax.tree.map(jnp.add, scaled_by_own(START), square_grads())),
        9 / 8,
    ),
    "Gradients from one jitted function into another": (
        lambda: updates_of(jax.jit(taken)(SCALE), at(16, START)),
        1 / 2,
    ),
    "Scaled gradients into an optimizer that is not wrapped": (
        lambda: optax.sgd(0.25).update(scaled_by_own(START), (optax.EmptyState(),) * 2)[0],
        8.0,
    ),
    "Gradients taken with the scale of one optimizer and given to another": (
        lambda: updates_of(scaled_by_own(OTHER)),
        1.0,
    ),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_what_is_not_seen_is_listed_openly_and_counted(name):
    run, factor = UNSEEN[name]
    got = run()  # no error: where one comes, the docs have one fewer
    np.testing.assert_allclose(got["w"], factor * np.asarray(TRUE["w"]), rtol=1e-6)
    text = (ROOT / "docs" / "recipes.md").read_text()
    _, _, rest = text.partition("It cannot see these ")
    count, _, rest = rest.partition(" mistakes, because")
    bullets = re.findall(r"^- \*\*(.+?)\*\*", rest.partition("```python")[0], re.MULTILINE)
    assert [b for b in bullets if b.startswith(name)]
    assert len(bullets) == len(UNSEEN)
    assert count == {6: "six", 7: "seven", 8: "eight"}[len(UNSEEN)]


def test_tags_keep_no_gradient_alive():
    grads = scaled_by_own(START)
    before = len(_KNOWN)
    del grads
    gc.collect()
    assert len(_KNOWN) < before


def wrapped(tx=None):
    return mpjax.with_loss_scale(tx or optax.sgd(0.1), mpjax.DynamicLossScale())


BEHIND = {
    "chain": optax.chain(optax.clip_by_global_norm(1.0), wrapped()),
    "nested chain": optax.chain(optax.chain(optax.clip(1.0)), optax.chain(wrapped())),
    "chain in masked": optax.masked(optax.chain(optax.trace(0.9), wrapped()), {"w": True}),
    "named chain": optax.named_chain(("clip", optax.clip(1.0)), ("adam", wrapped())),
}


@pytest.mark.parametrize("name", BEHIND)
def test_what_stands_before_the_wrapper_is_refused_by_all_that_see_it(name):
    tx = BEHIND[name]
    said = r"stands behind 1 of its chain(.|\n)*Move them inside: with_loss_scale\(optax.chain\("
    state = tx.init(PARAMS)
    for opt_state in (state, {"params": PARAMS, "opt_state": state}, (PARAMS, state)):
        with pytest.raises(ValueError, match=said):
            mpjax.current_loss_scale(opt_state)
    with pytest.raises(ValueError, match=said):
        mpjax.make_train_step(square, tx).init(PARAMS)


@pytest.mark.parametrize(
    "tx",
    [
        optax.chain(wrapped(), optax.scale(0.5)),
        optax.named_chain(("sgd", wrapped()), ("half", optax.scale(0.5))),
        optax.partition({"a": wrapped(), "b": optax.sgd(1.0)}, {"w": "a"}),
        optax.partition({"z": wrapped(), "b": optax.sgd(1.0)}, {"w": "z"}),
    ],
)
def test_what_stands_behind_or_beside_the_wrapper_is_taken(tx):
    step = mpjax.make_train_step(square, tx)
    state, metrics = step(step.init(PARAMS), jnp.ones(2))
    assert bool(metrics["grads_finite"])
    assert mpjax.current_loss_scale((PARAMS, state)).loss_scale == 2.0**15


STEEP = {"w": jnp.array([1.0, -0.0])}
BEHIND_IT = {
    "weight decay": lambda inside: optax.chain(inside, optax.add_decayed_weights(0.1)),
    "momentum": lambda inside: optax.chain(inside, optax.trace(0.9)),
    "schedule": lambda inside: optax.chain(
        inside, optax.scale_by_schedule(optax.linear_schedule(1.0, 0.0, 10))
    ),
    "named": lambda inside: optax.named_chain(("a", inside), ("b", optax.trace(0.9))),
    "nested": lambda inside: optax.chain(optax.chain(inside), optax.trace(0.9)),
    "masked": lambda inside: optax.masked(optax.chain(inside, optax.trace(0.9)), {"w": True}),
}


@pytest.mark.parametrize("name", BEHIND_IT)
def test_what_stands_behind_the_wrapper_in_a_chain_is_skipped_with_it(name):
    tx = BEHIND_IT[name](mpjax.with_loss_scale(optax.sgd(0.25), 8.0))
    step = mpjax.make_train_step(square, tx, donate=False)
    good, bad = jnp.ones(2), jnp.array([1.0, jnp.inf])
    start = step.init(STEEP)
    assert_bitwise_equal(step(start, bad)[0].params, STEEP)  # -0.0 too
    state, _ = step(start, good)
    skipped, metrics = step(state, bad)
    assert not bool(metrics["grads_finite"])
    assert_bitwise_equal((skipped.params, skipped.step), (state.params, state.step))
    # A run that never saw the bad batch goes on as this one does.
    after, want = step(skipped, good)[0], step(state, good)[0]
    assert_bitwise_equal(after.params, want.params)
    assert not np.array_equal(after.params["w"], state.params["w"])
    grads = {"w": jnp.array([8.0, 16.0])}
    alone = tx.update(grads, state.opt_state, state.params)[0]  # a finite step is the chain's own
    assert_bitwise_equal(alone, skipped_whole(tx).update(grads, state.opt_state, state.params)[0])


AROUND = {
    "inject": lambda tx: optax.inject_hyperparams(lambda rate: optax.chain(tx, optax.scale(rate)))(
        rate=lambda count: 0.5**count
    ),
    "named": lambda tx: optax.named_chain(("scaled", tx), ("half", optax.scale(0.5))),
    "8 bits": mpjax.optim.with_quantized_state,
    "moments": mpjax.optim.with_state_dtypes,
}


@pytest.mark.standard_promotion("optax mixes dtypes")
@pytest.mark.parametrize("name", AROUND)
def test_a_skipped_step_leaves_what_is_around_the_loss_scale(name):
    tx = AROUND[name](mpjax.with_loss_scale(optax.adam(0.25), 8.0))
    step = mpjax.make_train_step(square, tx, donate=False)
    state, _ = step(step.init(STEEP), jnp.ones(2))
    skipped, metrics = step(state, jnp.array([1.0, jnp.inf]))
    assert not bool(metrics["grads_finite"])
    assert_bitwise_equal((skipped.params, skipped.step), (state.params, state.step))
    after, want = step(skipped, jnp.ones(2))[0], step(state, jnp.ones(2))[0]
    assert_bitwise_equal(after.params, want.params)
    counts = [x for x in jax.tree.leaves(state.opt_state) if x.dtype == jnp.int32]
    again = [x for x in jax.tree.leaves(skipped.opt_state) if x.dtype == jnp.int32]
    assert sum(map(int, again)) - sum(map(int, counts)) == 2  # two counts of skipped steps


@pytest.mark.parametrize("name", ["partition", "masked"])
def test_a_wrapper_around_some_of_the_parameters_is_refused(name):
    params = {"w": jnp.ones(2), "v": jnp.ones(2)}
    label = {"w": "a", "v": "b"}

    def around(inner, outer):
        if name == "masked":
            return outer(optax.masked(inner(optax.sgd(0.25)), {"w": True, "v": False}))
        return outer(optax.partition({"a": inner(optax.sgd(0.25)), "b": optax.sgd(0.25)}, label))

    def scaled(tx):
        return mpjax.with_loss_scale(tx, mpjax.StaticLossScale(8.0))

    def step_of(tx):
        return mpjax.make_train_step(lambda p, x: jnp.sum(p["w"] ** 2 + p["v"] ** 2) * x, tx)

    with pytest.raises(ValueError, match=r"1 arrays of 2 parameters: .* gradients scaled"):
        step_of(around(scaled, lambda tx: tx)).init(params)
    state = step_of(around(lambda tx: tx, scaled)).init(params)  # around all of it
    assert state.params["v"].shape == (2,)


def test_an_overwritten_leaf_behind_the_wrapper_keeps_its_value_in_a_skipped_step():
    params = {"_overwrite_with_gradient": {"scale": jnp.float32(3)}, "w": jnp.float32(1)}
    tx = skipped_whole(optax.chain(mpjax.with_loss_scale(optax.sgd(0.25), 8.0), optax.scale(0.5)))
    grads = jax.tree.map(lambda x: x * jnp.inf, params)
    updates, _ = tx.update(grads, tx.init(params), params)
    assert_bitwise_equal(updates["_overwrite_with_gradient"], params["_overwrite_with_gradient"])
    assert_bitwise_equal(updates["w"], jnp.float32(-0.0))


def test_a_loss_scale_of_ones_own_is_held_adjusted_and_given_back():
    tx = mpjax.with_loss_scale(optax.sgd(0.25), Halving())
    step = mpjax.make_train_step(square, tx, donate=False)
    state = step.init(PARAMS)
    state, metrics = step(state, jnp.ones(2))
    assert_bitwise_equal(state.params, {"w": jnp.array([0.75, -1.5])})
    state, metrics = step(state, jnp.array([1.0, jnp.inf]))
    assert_bitwise_equal(state.params, {"w": jnp.array([0.75, -1.5])})
    found = mpjax.current_loss_scale(state)
    assert (float(found.loss_scale), int(found.overflows)) == (32.0, 1)
    assert float(state.opt_state.loss_scale) == 32.0
    restored = pickle.loads(pickle.dumps(jax.tree.map(np.asarray, state)))
    _, metrics = step(restored, jnp.ones(2))
    assert float(metrics["loss_scale"]) == 32.0


def test_a_loss_scale_of_ones_own_that_changes_its_form_is_an_error():
    class Growing(Halving):
        def adjust(self, grads_finite):
            return mpjax.StaticLossScale(2)

    jax.tree_util.register_pytree_node(Growing, lambda s: ((), None), lambda *_: Growing())
    tx = mpjax.with_loss_scale(optax.sgd(0.25), Growing())
    with pytest.raises(
        ValueError, match=r"Growing.adjust: what it returns differs(.|\n)*same class"
    ):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS)


# -- precisions that contradict each other ---------------------------------------------------------


@pytest.mark.parametrize("inside", ["bf16-mixed", "bfloat16", "float32"])
def test_autocast_of_what_the_step_knows_is_taken_in_silence(inside):
    step = mpjax.make_train_step(mpjax.autocast(square, inside), optax.sgd(0.1), "bf16-mixed")
    with warnings.catch_warnings():
        warnings.simplefilter("error", mpjax.PolicyWarning)
        step.lower(step.init(PARAMS), jnp.ones(2))
        mpjax.autocast(square, "16-mixed")(PARAMS, jnp.ones(2))  # no step is around it any more


def test_a_default_policy_without_a_block_is_warned_of_and_changes_nothing():
    with pytest.warns(mpjax.PolicyWarning, match=r"c=bf16,o=f32 was made the default of no block"):
        mpjax.default_policy("bf16-mixed")
    assert mpjax.get_policy() == mpjax.get_policy("float32")


def test_a_step_without_a_policy_is_float32_but_for_a_block_around_it():
    def made():
        return mpjax.make_train_step(lambda w, x: w * x, optax.sgd(0.1))

    assert made().policy == mpjax.get_policy("32-true")
    assert "p=f32,c=f32,o=f32" in repr(made())
    with mpjax.default_policy("bf16-mixed"):
        assert made().policy == mpjax.get_policy("bf16-mixed")


def test_a_default_policy_in_a_block_or_as_a_decorator_is_no_slip():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with mpjax.default_policy("bf16-mixed"):
            pass
        mpjax.default_policy("bf16-mixed")(square)
        with pytest.raises(ValueError, match="'bf61'"):
            mpjax.default_policy("bf61")
    assert not [w for w in caught if issubclass(w.category, mpjax.PolicyWarning)]


@pytest.mark.parametrize("decorated", [mpjax.autocast, mpjax.autocast()])
def test_autocast_without_a_policy_says_that_it_changes_nothing(decorated):
    with pytest.warns(mpjax.PolicyWarning, match=r'autocast\(square\).*\n.*\(fun, "bf16-mixed"\)'):
        decorated(square)(PARAMS, jnp.ones(2))


def test_autocast_in_float32_on_purpose_is_no_slip():
    with warnings.catch_warnings():
        warnings.simplefilter("error", mpjax.PolicyWarning)
        mpjax.autocast(square, "float32")(PARAMS, jnp.ones(2))
        mpjax.autocast(square, dot_precision="tf32")(PARAMS, jnp.ones(2))
        for policy in ("bf16-mixed", "float32"):
            with mpjax.default_policy(policy):
                mpjax.autocast(square)(PARAMS, jnp.ones(2))


# -- a run that cannot start, or cannot go on ------------------------------------------------------


def test_traced_parameters_cannot_be_looked_at_and_are_taken():
    jax.jit(mpjax.with_loss_scale(optax.sgd(0.1)).init)({"w": jnp.array([1.0, jnp.nan])})


# -- a mean over parts is that of the whole --------------------------------------------------------


def masked_loss(params, batch):
    """A plain masked mean: 0 / 0 where all is masked."""
    errors = (batch["x"] @ params["w"]) ** 2
    count = batch["mask"].sum()
    return jnp.sum(errors * batch["mask"]) / count, count


MASK = jnp.array([1, 1, 1, 1, 0, 0, 0, 0, 1, 0, 0, 0, 1, 1, 0, 0], jnp.float32)
BATCH = {"x": jax.random.normal(jax.random.key(0), (16, 2)), "mask": MASK}


def update_of(**options):
    step = mpjax.make_train_step(masked_loss, optax.sgd(1.0), donate=False, **options)
    state, metrics = step(step.init(PARAMS), BATCH)
    return state.params["w"], metrics["loss"], bool(metrics["grads_finite"])


@pytest.mark.parametrize("scale", [None, mpjax.DynamicLossScale(2.0**10)])
def test_a_weighted_loss_is_the_whole_batchs_a_masked_micro_batch_included(scale):
    whole, loss, _ = update_of(has_aux=True, loss_scale=scale)
    for accumulate in (1, 2, 4, 8):
        params, got, finite = update_of(weighted=True, accumulate=accumulate, loss_scale=scale)
        assert finite
        np.testing.assert_allclose(params, whole, atol=2**-20)
        np.testing.assert_allclose(got, loss, atol=2**-20)
    mean_of_means, _, finite = update_of(has_aux=True, accumulate=4)
    assert not finite  # what weights are for
    assert_bitwise_equal(mean_of_means, PARAMS["w"])


def test_a_weighted_loss_is_the_whole_batchs_over_shards(devices):
    whole, loss, _ = update_of(has_aux=True)
    mesh = Mesh(np.array(devices[:4]), ("data",))
    for accumulate, check_vma in ((1, True), (2, True), (2, False)):
        step = mpjax.make_train_step(
            masked_loss, optax.sgd(1.0), weighted=True, axis_name="data", accumulate=accumulate
        )
        run = over_shards(step._step, mesh, P(), P("data"), check_vma=check_vma)
        state, metrics = run(step.init(PARAMS), BATCH)
        np.testing.assert_allclose(state.params["w"], whole, atol=2**-20)
        np.testing.assert_allclose(metrics["loss"], loss, atol=2**-20)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_batch_without_any_weight_is_skipped_and_its_statistics_are_not_kept(accumulate):
    def loss_fn(params, seen, batch):
        loss, count = masked_loss(params, batch)
        mean = jnp.sum(batch["mask"] * batch["x"][:, 0]) / count
        return ((loss, count), (seen + mean, {"count": count}))

    step = mpjax.make_train_step(
        loss_fn, optax.sgd(1.0), weighted=True, has_aux=True, accumulate=accumulate, donate=False
    )
    start = step.init(PARAMS, jnp.float32(0))
    state, metrics = step(start, {**BATCH, "mask": jnp.zeros(16)})
    assert not bool(metrics["grads_finite"])
    assert_bitwise_equal((state.params, state.extra_state), (start.params, start.extra_state))
    state, metrics = step(start, BATCH)
    assert bool(metrics["grads_finite"])
    assert np.isfinite(state.extra_state)
    assert metrics["aux"]["count"].shape == (() if accumulate == 1 else (4,))


def test_no_gradient_goes_into_a_weight():
    def loss_fn(w, x):
        return w * x, w * x

    step = mpjax.make_train_step(loss_fn, optax.sgd(1.0), weighted=True)
    state, _ = step(step.init(jnp.float32(3)), jnp.float32(0.5))
    assert float(state.params) == 2.5


# -- a loss that trains nothing --------------------------------------------------------------------


def of_others(params, x):
    return jnp.mean(jnp.tanh(x @ PARAMS["w"]))  # not `params`


def of_hits(params, x):
    return jnp.mean(jnp.argmax(x * params["w"], axis=-1) == 1) * 1.0


@pytest.mark.parametrize("policy", [None, "16-mixed"])
@pytest.mark.parametrize("loss_fn", [of_others, of_hits, lambda params, x: jnp.sum(x)])
def test_a_loss_that_does_not_depend_on_the_parameters_is_warned_of_once(loss_fn, policy):
    step = mpjax.make_train_step(loss_fn, optax.sgd(1.0), policy, accumulate=2)
    state = step.init(PARAMS)
    with pytest.warns(mpjax.PolicyWarning, match="does not depend on the parameters") as caught:
        state, _ = step(state, BATCH["x"])
    assert len(caught) == 1
    step(state, BATCH["x"])  # without a word: it is compiled already


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_loss_that_does_not_depend_on_the_parameters_is_warned_of_over_shards(devices, check_vma):
    mesh = Mesh(np.array(devices[:4]), ("data",))
    step = mpjax.make_train_step(of_others, optax.sgd(1.0), axis_name="data")
    run = over_shards(step._step, mesh, P(), P("data"), check_vma=check_vma)
    with pytest.warns(mpjax.PolicyWarning, match="nothing is trained"):
        state, _ = run(step.init(PARAMS), BATCH["x"])
    assert_bitwise_equal(state.params, PARAMS)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_loss_and_its_weight_in_the_other_order_are_refused(accumulate):
    def swapped(params, batch):
        loss, count = masked_loss(params, batch)
        return count, loss

    step = mpjax.make_train_step(swapped, optax.sgd(1.0), weighted=True, accumulate=accumulate)
    with pytest.raises(ValueError, match=r"Return \(loss, weight\)"):
        step(step.init(PARAMS), BATCH)


def test_a_loss_that_some_parameters_do_not_reach_is_taken_in_silence():
    step = mpjax.make_train_step(lambda p, x: jnp.mean(x @ p["w"]), optax.sgd(1.0))
    state, _ = step(step.init({**PARAMS, "other": jnp.ones(3)}), BATCH["x"])
    assert not np.array_equal(state.params["w"], PARAMS["w"])
