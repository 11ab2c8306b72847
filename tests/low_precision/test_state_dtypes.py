"""Moments at the edges: no elements, beyond float16's range, and of float64 parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mpjax import optim

pytestmark = pytest.mark.standard_promotion("optax promotes counts and float64 implicitly")

STORES = {
    "bf16": lambda tx: optim.with_state_dtypes(tx, mu_dtype="bf16", nu_dtype="bf16"),
    "f16": lambda tx: optim.with_state_dtypes(tx, mu_dtype="f16", nu_dtype="bf16"),
    "int8": lambda tx: optim.with_quantized_state(tx, rules={"*": "int8"}),
    "float8": lambda tx: optim.with_quantized_state(tx, rules={"*": "float8"}),
}
stores = pytest.mark.parametrize("store", STORES.values(), ids=STORES)


@stores
@pytest.mark.parametrize("shape", [(0,), (5, 0), (0, 5)])
def test_an_array_without_elements_has_moments_without_elements(store, shape):
    tx, params = store(optax.adam(0.1)), {"none": jnp.ones(shape), "some": jnp.ones((2, 8))}
    updates, state = jax.jit(tx.update)(params, tx.init(params), params)
    assert updates["none"].shape == shape
    assert jnp.isfinite(updates["some"]).all()
    assert jax.tree.structure(state) == jax.tree.structure(tx.init(params))


@stores
@pytest.mark.parametrize("jit", [False, True])
def test_one_large_gradient_does_not_make_a_moment_inf(store, jit):
    tx, params = store(optax.sgd(1.0, momentum=0.9)), {"w": jnp.ones((2, 8))}
    update = jax.jit(tx.update) if jit else tx.update
    state = tx.init(params)
    for size in (1e6, -1e9, 1.0):
        updates, state = update({"w": jnp.full((2, 8), size)}, state, params)
        assert jnp.isfinite(updates["w"]).all()
    for bad in (jnp.inf, jnp.nan):  # what is not finite stays so, and is seen
        _, after = update({"w": jnp.full((2, 8), bad)}, state, params)
        updates, _ = update({"w": jnp.ones((2, 8))}, after, params)
        assert not jnp.isfinite(updates["w"]).any()


@stores
def test_moments_of_float64_parameters_are_stored_in_the_dtype_asked_for(store):
    with jax.enable_x64(True):
        params = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(4, 64)))}
        assert params["w"].dtype == jnp.float64
        adam = optax.adam(0.1)
        tx, plain = store(adam), adam.init(params)
        state = tx.init(params)
        for _ in range(3):
            updates, state = jax.jit(tx.update)(params, state, params)
            wanted, plain = adam.update(params, plain, params)
        assert jnp.dtype("float64") not in {x.dtype for x in jax.tree.leaves(state)}
        assert float(jnp.abs(updates["w"] - wanted["w"]).max()) < 0.05
