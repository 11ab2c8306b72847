"""Pickles made before private modules moved load, and a run goes on from them."""

import lzma
import pickle

import jax
import jax.numpy as jnp
import make_old_pickles as made
import numpy as np
import optax
import pytest

import mpjax

pytestmark = [
    pytest.mark.standard_promotion("optax mixes dtypes"),
    pytest.mark.filterwarnings("ignore::mpjax.PolicyWarning"),
]


@pytest.fixture(scope="module")
def old():
    return pickle.loads(lzma.decompress(made.FILE.read_bytes()))


def test_policies_maps_and_recipes_are_equal_to_those_of_today(old):
    assert {name: old[name] for name in made.values()} == made.values()


def test_states_have_the_structure_of_those_of_today(old):
    for name, state in made.states().items():
        assert jax.tree.structure(old[name]) == jax.tree.structure(state), name
        for was, now in zip(jax.tree.leaves(old[name]), jax.tree.leaves(state), strict=True):
            assert (was.shape, was.dtype) == (now.shape, now.dtype), name


def test_a_run_goes_on_from_an_old_state(old):
    step = mpjax.make_train_step(made.loss, optax.adam(1e-3), "16-mixed")
    state, metrics = step(jax.tree.map(jnp.asarray, old["step 16-mixed"]), made.BATCH)
    assert int(state.step) == 2
    assert jnp.isfinite(metrics["loss"])


def test_an_old_loss_scale_and_weights_in_8_bits_work(old):
    assert float(old["dynamic"].scale(np.float32(1.0))) == 2.0**9
    weights = mpjax.dequantize(old["8 bits"])["dense"]["w"]
    np.testing.assert_allclose(weights, made.PARAMS["dense"]["w"], atol=1e-2)
