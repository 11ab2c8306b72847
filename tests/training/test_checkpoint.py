"""Law 16: what orbax, Flax's msgpack and pickle restore goes on as if nothing had been."""

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from _optimizers import CHECKPOINTS
from flax.training import train_state

import mpjax
from mpjax.testing import assert_bitwise_equal

PARAMS = {"layers": [{"w": jnp.arange(6.0).reshape(2, 3) / 8, "b": jnp.array([0.5, -0.0, 1.0])}]}
LOSS_SCALE = mpjax.DynamicLossScale(
    2.0**9, growth_interval=3, min_loss_scale=2, max_loss_scale=2.0**12, backoff_factor=0.25
)
OPTAX = pytest.mark.standard_promotion("optax and orbax mix dtypes")
ORBAX = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


def loss_fn(params, extra, batch):
    layer = params["layers"][0]
    out = batch @ layer["w"] + layer["b"]
    return jnp.mean(out.astype(jnp.float32) ** 2), {"seen": extra["seen"] + 1}


def batch_of(index):
    batch = jnp.asarray(np.random.default_rng(index).normal(size=(4, 2)), jnp.float32)
    return batch.at[0, 0].set(jnp.inf) if index == 2 else batch


def make_step():
    tx = optax.adamw(optax.linear_schedule(0.1, 0.0, 20))
    return mpjax.make_train_step(loss_fn, tx, "16-mixed", loss_scale=LOSS_SCALE)


def start(step):
    return step.init(PARAMS, {"seen": jnp.int32(0)})


def run(step, state, indices):
    for index in indices:
        state, _ = step(state, batch_of(index))
    return state


@OPTAX
@ORBAX
@pytest.mark.no_leak_check("orbax keeps state in threads of its own")
@pytest.mark.parametrize("way", CHECKPOINTS)
def test_law_16_a_run_resumed_in_the_middle_ends_bit_for_bit_the_same(way, tmp_path):
    step = make_step()
    whole = run(step, start(step), range(8))
    middle = run(step, start(step), range(5))
    found = mpjax.current_loss_scale(middle)
    assert (float(found.loss_scale), int(found.counter)) == (2.0**7, 2)  # off its default
    template = start(step)
    restored = way(middle, template, tmp_path)
    assert_bitwise_equal(restored, middle)
    assert not any(getattr(x, "weak_type", False) for x in jax.tree.leaves(restored))
    fresh = make_step()
    resumed = run(fresh, restored, range(5, 8))
    assert_bitwise_equal(resumed, whole)
    assert_bitwise_equal(mpjax.current_loss_scale(resumed), mpjax.current_loss_scale(whole))


@OPTAX
@ORBAX
@pytest.mark.no_leak_check("orbax keeps state in threads of its own")
def test_what_is_restored_without_a_template_can_be_read(tmp_path):
    tx = mpjax.with_loss_scale(optax.adam(0.1), LOSS_SCALE, max_consecutive_skips=1)
    _, state = tx.update(jax.tree.map(lambda p: p * jnp.nan, PARAMS), tx.init(PARAMS), PARAMS)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        untyped = checkpointer.restore(tmp_path / "state")
    for found in (untyped, flax.serialization.to_state_dict(state)):
        assert float(mpjax.current_loss_scale(found).loss_scale) == 2.0**7
        with pytest.raises(mpjax.NonFiniteError, match=r"First bad leaf: 'layers/0/b', f32\[3\]"):
            mpjax.raise_if_diverged(found, PARAMS)


def test_a_restored_static_scale_stays_static_in_a_dynamic_wrapper():
    # The state says which kind it holds, so that resuming does not change how a run is scaled.
    static = mpjax.with_loss_scale(optax.sgd(0.1), mpjax.StaticLossScale(8)).init(PARAMS)
    dynamic = mpjax.with_loss_scale(optax.sgd(0.1), mpjax.DynamicLossScale(16))
    grads = jax.tree.map(jnp.ones_like, PARAMS)
    _, state = jax.jit(dynamic.update)(grads, static, PARAMS)
    assert isinstance(mpjax.current_loss_scale(state), mpjax.StaticLossScale)


def test_a_restored_state_of_an_older_shape_is_an_error():
    tx = mpjax.with_loss_scale(optax.sgd(0.1), LOSS_SCALE)
    old = tx.init({"w": jnp.ones(2)})
    with pytest.raises(ValueError, match=r"the state was made for \(1,\) gradients; got 2"):
        tx.update(PARAMS, old, PARAMS)
    with pytest.raises(ValueError, match=r"no LossScaleState; got a dict\.\n  .*restore a checkp"):
        tx.update(PARAMS, dict(old._asdict()), PARAMS)
    lacking = old._replace(adjustment={"counter": jnp.int32(0)}, leaf_finite=jnp.ones(2, bool))
    text = r"lacks 'growth_factor'.*\n  Restore"
    for read in (
        lambda: tx.update(PARAMS, lacking, PARAMS),
        lambda: mpjax.current_loss_scale(lacking),
    ):
        with pytest.raises(ValueError, match=text):
            read()


# -- checkpoints of another policy -----------------------------------------------------------------


def step_under(policy, **options):
    return mpjax.make_train_step(loss_fn, optax.adamw(0.1), policy, **options)


@OPTAX
@pytest.mark.parametrize("policy", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("kind", ["dict", "flax"])
def test_a_run_of_another_program_is_adopted_value_for_value(kind, policy):
    """Two steps of plain optax and float32; then mpjax goes on with all that they left."""
    tx = optax.adamw(0.1)
    theirs = train_state.TrainState.create(apply_fn=None, params=PARAMS, tx=tx)
    for i in range(2):
        theirs = theirs.apply_gradients(grads=jax.tree.map(lambda p, i=i: p + i, PARAMS))
    given = theirs
    if kind == "dict":
        names = ("step", "params", "opt_state")
        given = {name: getattr(theirs, name) for name in names}
    step = step_under(policy)
    adopted = step.adopt(given, start(step).extra_state)
    assert_bitwise_equal(adopted.params, theirs.params)
    assert_bitwise_equal(adopted.opt_state.inner_state, theirs.opt_state)
    assert int(adopted.step) == int(theirs.step) == 2
    assert jax.tree.structure(adopted) == jax.tree.structure(start(step))
    after, metrics = step(adopted, batch_of(3))
    assert (int(after.step), bool(metrics["grads_finite"])) == (3, True)
    assert np.isfinite(theirs.params["layers"][0]["w"]).all()  # the state given was not donated


@OPTAX
def test_adopting_keeps_a_loss_scale_of_the_same_kind_and_its_counters():
    one = step_under("16-mixed", loss_scale=LOSS_SCALE)
    two = step_under("16-mixed", loss_scale=mpjax.DynamicLossScale(4.0))
    state = run(one, start(one), [0, 2, 1])
    adopted = two.adopt(state)
    assert_bitwise_equal(adopted, state)
    assert int(adopted.opt_state.skipped_steps) == 1
    static = step_under("16-mixed", loss_scale=8.0)
    adopted = static.adopt(state)
    assert int(adopted.opt_state.skipped_steps) == 1
    assert isinstance(mpjax.current_loss_scale(adopted.opt_state), mpjax.StaticLossScale)
    assert float(adopted.opt_state.loss_scale) == 8.0


@OPTAX
def test_a_static_loss_scale_is_that_of_the_step_that_adopts():
    one, two = step_under("16-mixed", loss_scale=64.0), step_under("16-mixed", loss_scale=8.0)
    state = run(one, start(one), [0, 2, 1])
    with pytest.warns(mpjax.PolicyWarning, match=r"goes on with .*=64\).*given .*=8\).*\n.*adopt"):
        two(jax.tree.map(jnp.copy, state), batch_of(1))
    adopted = two.adopt(state)
    assert (float(adopted.opt_state.loss_scale), int(adopted.opt_state.skipped_steps)) == (8, 1)
    two(adopted, batch_of(1))  # and says nothing
    tx = mpjax.with_loss_scale(optax.sgd(0.1), 64.0)
    moved = mpjax.optim.adopt_state(
        mpjax.with_loss_scale(optax.sgd(0.1), 8.0), tx.init(PARAMS), PARAMS
    )
    assert float(moved.loss_scale) == 8


@OPTAX
def test_options_of_a_dynamic_loss_scale_go_on_and_a_step_with_others_says_so():
    one = step_under("16-mixed", loss_scale=LOSS_SCALE)
    two = step_under("16-mixed", loss_scale=mpjax.DynamicLossScale(4.0, growth_interval=7))
    state = run(one, start(one), [0])
    with pytest.warns(mpjax.PolicyWarning, match=r"optax\.tree\.set\(state, backoff_factor=jnp"):
        state, _ = two(state, batch_of(1))
    assert int(state.opt_state.adjustment["growth_interval"]) == 3


def test_a_state_of_another_optimizer_or_model_is_refused_by_name():
    tx = mpjax.with_loss_scale(optax.sgd(0.1, momentum=0.9), LOSS_SCALE)
    with pytest.raises(ValueError, match=r"adopt_state: the trees differ; .* is only in"):
        mpjax.optim.adopt_state(tx, optax.adam(0.1).init(PARAMS), PARAMS)
    other = {"layers": [{"w": jnp.ones((2, 4)), "b": jnp.ones(3)}]}
    with pytest.raises(ValueError, match=r"adopt_state: .*w' is f32\[2,4\]; .* f32\[2,3\]"):
        mpjax.optim.adopt_state(tx, tx.init(other), PARAMS)
    chained = optax.chain(optax.clip(1.0), tx)
    with pytest.raises(ValueError, match="stands inside the old state, at another place"):
        mpjax.optim.adopt_state(tx, chained.init(PARAMS), PARAMS)


@OPTAX
@ORBAX
@pytest.mark.no_leak_check("orbax keeps state in threads of its own")
@pytest.mark.parametrize("way", CHECKPOINTS)
@pytest.mark.parametrize(
    "scale",
    [mpjax.NoOpLossScale(), mpjax.StaticLossScale(8), LOSS_SCALE],
    ids=lambda scale: type(scale).__name__,
)
def test_a_loss_scale_beside_the_parameters_is_stored_with_all_its_fields(way, scale, tmp_path):
    def state(scale):
        return {"params": PARAMS, "scales": (scale, {"second": scale})}

    changed = jax.jit(lambda scale: scale.adjust(jnp.array(False)))(scale)
    restored = way(state(changed), state(scale), tmp_path)
    assert jax.tree.structure(restored) == jax.tree.structure(state(changed))
    assert_bitwise_equal(restored, state(changed))
    found = restored["scales"][0]
    assert type(found) is type(scale)
    assert float(found.loss_scale) == float(changed.loss_scale)
