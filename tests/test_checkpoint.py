"""Law 16: what orbax, Flax's msgpack and pickle restore goes on as if nothing had been."""

import pickle
from pathlib import Path
from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from _helpers import assert_same_bits
from flax.training import train_state

import mpjax

PARAMS = {"layers": [{"w": jnp.arange(6.0).reshape(2, 3) / 8, "b": jnp.array([0.5, -0.0, 1.0])}]}
LOSS_SCALE = mpjax.DynamicLossScale(
    2.0**9, growth_interval=3, min_loss_scale=2, max_loss_scale=2.0**12, backoff_factor=0.25
)
OPTAX = pytest.mark.standard_promotion("optax and orbax mix dtypes")
ORBAX = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


def loss_fn(params: Any, extra: Any, batch: Any) -> Any:
    layer = params["layers"][0]
    out = batch @ layer["w"] + layer["b"]
    return jnp.mean(out.astype(jnp.float32) ** 2), {"seen": extra["seen"] + 1}


def batch_of(index: int) -> Any:
    batch = jnp.asarray(np.random.default_rng(index).normal(size=(4, 2)), jnp.float32)
    return batch.at[0, 0].set(jnp.inf) if index == 2 else batch


def make_step() -> Any:
    tx = optax.adamw(optax.linear_schedule(0.1, 0.0, 20))
    return mpjax.make_train_step(loss_fn, tx, "16-mixed", loss_scale=LOSS_SCALE)


def start(step: Any) -> Any:
    return step.init(PARAMS, {"seen": jnp.int32(0)})


def run(step: Any, state: Any, indices: Any) -> Any:
    for index in indices:
        state, _ = step(state, batch_of(index))
    return state


def with_orbax(state: Any, template: Any, folder: Path) -> Any:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", state)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "state", template)


def with_msgpack(state: Any, template: Any, folder: Path) -> Any:
    (folder / "state").write_bytes(flax.serialization.to_bytes(state))
    return flax.serialization.from_bytes(template, (folder / "state").read_bytes())


def with_pickle(state: Any, template: Any, folder: Path) -> Any:
    (folder / "state").write_bytes(pickle.dumps(state))
    return pickle.loads((folder / "state").read_bytes())


@OPTAX
@ORBAX
@pytest.mark.no_leak_check("orbax keeps state in threads of its own")
@pytest.mark.parametrize("way", [with_orbax, with_msgpack, with_pickle])
def test_law_16_a_run_resumed_in_the_middle_ends_bit_for_bit_the_same(way: Any, tmp_path: Path):
    step = make_step()
    whole = run(step, start(step), range(8))
    middle = run(step, start(step), range(5))
    found = mpjax.current_loss_scale(middle)
    assert (float(found.loss_scale), int(found.counter)) == (2.0**7, 2)  # off its default
    template = start(step)
    restored = way(middle, template, tmp_path)
    assert_same_bits(restored, middle)
    assert not any(getattr(x, "weak_type", False) for x in jax.tree.leaves(restored))
    fresh = make_step()
    resumed = run(fresh, restored, range(5, 8))
    assert_same_bits(resumed, whole)
    assert_same_bits(mpjax.current_loss_scale(resumed), mpjax.current_loss_scale(whole))


@OPTAX
def test_flax_train_state_round_trips_through_msgpack():
    state = train_state.TrainState.create(
        apply_fn=None, params=PARAMS, tx=mpjax.with_loss_scale(optax.adam(0.1), LOSS_SCALE)
    )
    moved = state.apply_gradients(grads=PARAMS)
    restored = flax.serialization.from_bytes(state, flax.serialization.to_bytes(moved))
    assert_same_bits(restored.opt_state, moved.opt_state)
    grads = jax.tree.map(jnp.ones_like, PARAMS)
    again, want = (x.apply_gradients(grads=grads) for x in (restored, moved))
    assert_same_bits((again.params, again.opt_state), (want.params, want.opt_state))


@OPTAX
@ORBAX
@pytest.mark.no_leak_check("orbax keeps state in threads of its own")
def test_what_is_restored_without_a_template_can_be_read(tmp_path: Path):
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
