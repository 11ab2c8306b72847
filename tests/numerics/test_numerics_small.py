"""Updates that change nothing are counted as rounding loses them; metrics become plain numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mpjax
from mpjax.numerics import lost_updates, to_scalars


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_lost_updates_are_those_that_numpy_loses(dtype):
    rng = np.random.default_rng(0)
    p = rng.normal(size=500).astype(jnp.dtype(dtype))
    u = (rng.normal(size=500) * 10.0 ** rng.uniform(-9, 0, 500)).astype(np.float32)
    u[::7] = 0
    moved = (p.astype(np.float32) + u).astype(p.dtype)
    want = ((u != 0) & (moved == p)).sum() / (u != 0).sum()
    found = jax.jit(lost_updates)({"w": p, "n": jnp.arange(3)}, {"w": u, "n": jnp.arange(3)})
    assert set(found) == {"w"}
    assert float(found["w"]) == pytest.approx(want, abs=1e-6)
    assert found["w"] > (0.2 if dtype != "float32" else 0)


def test_metrics_become_numbers():
    metrics = {
        "loss": jnp.bfloat16(1.5),
        "grads_finite": jnp.array(True),
        "note": "text",
        "none": None,
        "aux": {"by_layer": jnp.array([1.0, 3.0]), "empty": jnp.zeros(0), "n": 3},
    }
    assert to_scalars(metrics, "train/") == {
        "train/loss": 1.5,
        "train/grads_finite": 1.0,
        "train/aux/by_layer/mean": 2.0,
        "train/aux/by_layer/max": 3.0,
        "train/aux/n": 3.0,
    }


def test_a_step_tells_on_request_what_its_rounding_loses():
    def loss_fn(params, batch):
        return sum(jnp.sum(p) for p in jax.tree.leaves(params)) * batch

    params = {"norm": jnp.ones(3), "kernel": jnp.full(3, 0.01)}
    make = functools.partial(mpjax.make_train_step, loss_fn, optax.sgd(1e-3), donate=False)
    step = make("bf16-true", rounding="nearest", lost_updates=True)
    assert "lost_updates=True" in repr(step)
    _, metrics = step(step.init(params), jnp.float32(1))
    found = {k: v for k, v in to_scalars(metrics).items() if k.startswith("lost")}
    assert found == {"lost_updates/norm": 1.0, "lost_updates/kernel": 0.0}
    state = step.init(params)
    skipped, metrics = step(state, jnp.float32(np.nan))
    assert skipped.step == 0
    assert to_scalars(metrics)["lost_updates/norm"] == 0  # nothing was asked for
    plain = make("bf16-true", rounding="nearest")
    assert "lost_updates" not in jax.eval_shape(plain, state, jnp.float32(1))[1]


@pytest.mark.standard_promotion("Flax's LayerNorm takes statistics in float32")
def test_a_step_of_an_nnx_model_tells_it_too():
    model = nnx.LayerNorm(4, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    step = mpjax.nnx.make_train_step(
        *(model, optax.sgd(1e-3), "bf16-true", lambda model, x: jnp.sum(model(x)[:, 0])),
        rounding="nearest",
        lost_updates=True,
    )
    x = jnp.float32([[1, 2, 3, 5]])
    _, metrics = step(step.init(), x)
    assert metrics["lost_updates"]["scale"] == 1  # from 1 on
    assert metrics["lost_updates"]["bias"] == 0  # from 0 on
