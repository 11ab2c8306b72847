"""Moments in 16 and 8 bits wherever a state is held: names, containers, shards, 64-bit types."""

import contextlib
import subprocess
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import mpjax
from mpjax import optim
from mpjax._low_precision import codes

pytestmark = pytest.mark.standard_promotion("optax mixes dtypes")
KINDS = ["int8", "float8"]
kinds = pytest.mark.parametrize("kind", KINDS)


def _numbers(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


class Layer(NamedTuple):
    weight: jax.Array


class Net(NamedTuple):
    """One whose parameters are called as an optimizer's moments are."""

    weight: jax.Array
    mu: Layer
    nu: Layer


@kinds
def test_law_of_moments_a_parameters_name_changes_nothing(kind):
    leaves = [_numbers(64, 128, seed=i) for i in range(3)]
    named = Net(leaves[0], Layer(leaves[1]), Layer(leaves[2]))
    state = optim.with_quantized_state(optax.adam(1e-2), kind).init(named).inner_state[0]
    for field, made in (("mu", codes.FirstMoment), ("nu", codes.SecondMoment)):
        moment = getattr(state, field)
        assert [type(x) for x in (moment.weight, moment.mu.weight, moment.nu.weight)] == [made] * 3
    sizes = optim.bytes_per_parameter(optax.adam(1e-2), named)
    assert dict(sizes.rows)["mu"] == dict(sizes.rows)["nu"] == 4


@kinds
@pytest.mark.parametrize("is_scaled", [False, True])
def test_law_of_moments_an_nnx_optimizer_takes_the_steps_of_plain_optax(kind, is_scaled):
    tx = optim.with_quantized_state(optax.adam(1e-2), kind)
    if is_scaled:
        tx = mpjax.with_loss_scale(tx, mpjax.NoOpLossScale())
    model = nnx.Linear(64, 128, rngs=nnx.Rngs(0))
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    optimizer, state = nnx.Optimizer(model, tx, wrt=nnx.Param), tx.init(params)
    step, update = nnx.jit(lambda m, o, g: o.update(m, g)), jax.jit(tx.update)
    for seed in range(4):
        trained = nnx.state(model, nnx.Param)
        grads = jax.tree.map(lambda p, seed=seed: _numbers(*p.shape, seed=seed), trained)
        step(model, optimizer, grads)
        grads = nnx.to_pure_dict(grads)
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_array_equal(model.kernel[...], params["kernel"])
    spread = [optim.moment_spread(s).rows for s in (nnx.as_pure(optimizer.opt_state), state)]
    assert [row[1:] for row in spread[0]] == [row[1:] for row in spread[1]] != []


def test_moments_inside_lookahead_are_found():
    params = optax.LookaheadParams.init_synced({"w": _numbers(64, 128)})
    for wrap in (optim.with_quantized_state, optim.with_state_dtypes):
        tx = wrap(optax.lookahead(optax.adam(1e-2), 5, 0.5))
        state = tx.init(params)
        _, after = tx.update({"w": _numbers(64, 128)}, state, params)
        assert jax.tree.structure(after) == jax.tree.structure(state)


@kinds
@pytest.mark.parametrize("shape", [(64, 128), (512, 128)])
def test_law_of_moments_a_shard_is_stored_as_the_whole_was(kind, shape, devices):
    mesh, split = Mesh(np.array(devices), ("all",)), PartitionSpec("all")
    tx = optim.with_quantized_state(optax.adam(1e-2), kind)
    params, grads = {"w": _numbers(*shape)}, {"w": _numbers(*shape, seed=1)}
    state = tx.init(params)
    places = jax.tree.map(lambda x: split if x.ndim == 2 else PartitionSpec(), state)
    step = jax.shard_map(
        tx.update, mesh=mesh, in_specs=(split, places, split), out_specs=(split, places)
    )
    updates, after = jax.jit(step)(grads, state, params)
    want, whole = tx.update(grads, state, params)
    assert jax.tree.structure(after) == jax.tree.structure(whole)
    np.testing.assert_allclose(updates["w"], want["w"], rtol=1e-6)


@kinds
@pytest.mark.parametrize("block_size", [256, None])
@pytest.mark.parametrize("spec", [PartitionSpec(None, "all"), PartitionSpec("all", None)])
def test_law_of_moments_a_mesh_with_explicit_axes_changes_no_step(kind, block_size, spec, devices):
    mesh = jax.make_mesh((8,), ("all",), axis_types=(AxisType.Explicit,), devices=devices)
    tx = optim.with_quantized_state(optax.adam(1e-2), kind, block_size=block_size)
    whole = {"w": _numbers(16, 512)}
    placed = jax.device_put(whole, NamedSharding(mesh, spec))
    steps = []
    for params in (whole, placed):
        with jax.set_mesh(mesh) if params is placed else contextlib.nullcontext():
            state = jax.jit(tx.init)(params)
            for _ in range(2):
                updates, state = jax.jit(tx.update)(params, state, params)
        steps.append(updates["w"])
    assert jax.typeof(steps[1]).sharding.spec == spec
    np.testing.assert_allclose(*map(np.asarray, steps), rtol=1e-6)


def test_moments_in_8_bits_are_made_under_64_bit_types():
    code = """
import jax.numpy as jnp, optax
from mpjax import optim
for kind in ("int8", "float8"):
    tx, params = optim.with_quantized_state(optax.adam(1e-3), kind), {"w": jnp.ones((16, 512), "f")}
    updates, state = tx.update(params, tx.init(params), params)
    assert state.inner_state[0].mu["w"].scales.dtype == jnp.float32, state
"""
    env = {"JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()[-2000:]


# -- owners of a rounding --------------------------------------------------------------------------

OWNERS = {
    "copies": optim.with_master_weights,
    "24 bits": lambda tx: optim.with_master_weights(tx, bits=24),
    "kahan": optim.with_kahan,
}


@pytest.mark.parametrize("owner", OWNERS)
def test_parameters_that_became_float32_are_refused(owner):
    tx = OWNERS[owner](optax.sgd(2.0**-12))
    params = {"w": jnp.ones(4, jnp.bfloat16)}
    updates, state = tx.update({"w": jnp.ones(4)}, tx.init(params), params)
    grown = jax.tree.map(jnp.add, params, updates)  # as `eqx.apply_updates`
    with pytest.raises(ValueError, match=r"'w' is f32\[4\].*16 bits[\s\S]*apply_updates"):
        tx.update({"w": jnp.ones(4)}, state, grown)


@pytest.mark.filterwarnings("ignore::mpjax.PolicyWarning")  # of float32: there is nothing to round
@pytest.mark.parametrize("owner", OWNERS)
def test_parameters_that_were_cast_after_init_are_refused_with_the_right_order(owner):
    tx = OWNERS[owner](optax.sgd(2.0**-12))
    state = tx.init({"w": jnp.ones(4)})
    cast = {"w": jnp.ones(4, jnp.bfloat16)}
    with pytest.raises(ValueError, match=r"'w' is bf16\[4\].*before.*float32") as caught:
        tx.update({"w": jnp.ones(4)}, state, cast)
    said = str(caught.value)
    assert "policy.cast_to_param(params), and tx.init(params) after it" in said
    assert "apply_updates" not in said
    state = optim.adopt_state(tx, state, cast)  # what it says to type
    tx.update({"w": jnp.ones(4)}, state, cast)


@pytest.mark.parametrize("owner", OWNERS)
def test_weights_that_are_stored_under_other_paths_are_not_passed_over(owner):
    params = {"w": jnp.ones(4, jnp.bfloat16), "v": jnp.ones(4, jnp.bfloat16)}
    state = optax.flatten(OWNERS[owner](optax.sgd(2.0**-12))).init(params)
    with pytest.raises(ValueError, match=r"under other paths[\s\S]*optax.flatten\(tx\)"):
        optim.full_params(params, state)


def test_24_bits_need_no_promotion():
    tx = optim.with_master_weights(optax.sgd(1.0), bits=24)
    params = {"w": jnp.ones(4, jnp.bfloat16)}
    with jax.numpy_dtype_promotion("strict"):
        updates, _ = tx.update({"w": jnp.ones(4)}, tx.init(params), params)
    assert float(updates["w"][0]) == -1
