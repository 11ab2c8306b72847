"""The decoder of the pod benchmark: its size, its values over shards, and that a check passes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import mpjax.pods
from benchmarks.networks.decoder import Decoder, causal_attention

SMALL = {"width": 64, "layers": 2, "heads": 4, "hidden": 128, "vocabulary": 512, "time": 16}

pytestmark = [
    pytest.mark.standard_promotion("optax divides an int32 count into a float"),
    pytest.mark.no_leak_check("the check keeps the jaxpr of what it traces"),
]


def test_it_has_872_million_parameters():
    sizes = [leaf.size for leaf in jax.tree.leaves(Decoder().shapes)]
    assert round(sum(sizes) / 1e6) == 871


def test_attention_is_softmax():
    q, k, v = (jax.random.normal(jax.random.key(i), (2, 8, 4, 16)) for i in range(3))
    expected = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    np.testing.assert_allclose(causal_attention(q, k, v), expected, rtol=1e-5, atol=1e-6)


@functools.cache
def run(count, policy):
    """Returns loss and updated parameters of one step of SGD on `count` devices."""
    decoder = Decoder(**SMALL, policy=policy)
    topology = mpjax.pods.get_topology(f"cpu:{count}")
    mesh = topology.make_mesh({"fsdp": count})
    tx = optax.sgd(0.5)
    params = jax.jit(decoder.init)(jax.random.key(0))
    state = {"params": params, "opt_state": tx.init(params)}
    shardings = jax.tree.map(lambda s: NamedSharding(mesh, s), decoder.state_specs(tx))
    state = jax.device_put(state, shardings)
    tokens = jax.random.randint(jax.random.key(1), (8, SMALL["time"] + 1), 0, SMALL["vocabulary"])
    tokens = jax.device_put(tokens, NamedSharding(mesh, P("fsdp")))
    state, metrics = decoder.train_step(tx, mesh)(state, tokens)
    return float(metrics["loss"]), jax.device_get(state["params"])


@pytest.mark.ci
def test_eight_devices_compute_what_one_does():
    loss, params = run(8, "32-true")
    expected, expected_params = run(1, "32-true")
    assert loss == pytest.approx(expected, rel=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6), params, expected_params
    )


@pytest.mark.slow
def test_bfloat16_is_near_float32():
    loss, _ = run(8, "bf16-mixed")
    assert loss == pytest.approx(run(8, "32-true")[0], rel=0.01)


def test_the_check_passes_on_virtual_devices():
    decoder = Decoder(**SMALL)
    topology = mpjax.pods.get_topology("cpu:8")
    mesh = topology.make_mesh({"fsdp": 8})
    tx = optax.adamw(1e-3)
    tokens = jax.ShapeDtypeStruct((16, SMALL["time"] + 1), jnp.int32)
    args = mpjax.pods.with_sharding(
        (decoder.state_shapes(tx), tokens), (decoder.state_specs(tx), P("fsdp")), mesh
    )
    report = mpjax.pods.check(decoder.train_step(tx, mesh), args, topology)
    assert report.ok, str(report)
    assert set(report.sent("weights")) == {"bf16"}
    assert {c.dtype for c in report.collectives if c.role == "gradients"} == {"f32"}
