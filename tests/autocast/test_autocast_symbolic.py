"""Programs that are exported with lengths left open: they export, explain and run as plain ones."""

import jax
import jax.numpy as jnp
import pytest
from _samples import normal
from _small import BF16, distance, loss
from jax import export, lax

from mpjax import autocast, explain

BATCH, LENGTH = export.symbolic_shape("b, t")
OPEN = jax.ShapeDtypeStruct((BATCH, LENGTH, 16), jnp.float32)
X = normal(0, 3, 7, 16)
W = normal(1, 16, 16, scale=0.3)


def causal(x, w):
    q = x @ w
    scores = jnp.einsum("bqd,bkd->bqk", q, x @ w) / 4
    place = jnp.arange(x.shape[1])
    bias = -jnp.abs(place[:, None] - place).astype(jnp.float32) / 8
    mask = jnp.tril(jnp.ones((x.shape[1],) * 2, bool))
    return jax.nn.softmax(jnp.where(mask, scores + bias, -1e9)) @ q


def cross_entropy(x, w):
    labels = lax.broadcasted_iota(jnp.int32, x.shape[:2], 1) % 16
    picked = jnp.take_along_axis(jax.nn.log_softmax(x @ w), labels[..., None], -1)
    return -jnp.mean(picked)


def recurrent(x, w):
    start = jnp.zeros((x.shape[0], 16))
    return lax.scan(lambda c, e: (jnp.tanh(c @ w + e), c), start, x.transpose(1, 0, 2))


OPEN_PROGRAMS = {
    "positions before a product": lambda x, w: (x @ w + jnp.arange(x.shape[1])[:, None] / 8) @ w,
    "causal": causal,
    "cross entropy": cross_entropy,
    "recurrent": recurrent,
    "one-hot positions": lambda x, w: jax.nn.one_hot(jnp.arange(x.shape[1]), 16) @ w + x @ w,
    "a mean": lambda x, w: jnp.mean(x @ w, 1) @ w * (1 / x.shape[1]),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", OPEN_PROGRAMS)
def test_a_program_of_open_lengths(name):
    fun = OPEN_PROGRAMS[name]
    fast = autocast(fun, "bf16-mixed")

    def exported(f):
        both = lambda *args: (f(*args), jax.grad(loss(f), (0, 1))(*args))  # noqa: E731
        return export.export(jax.jit(both))(OPEN, jax.ShapeDtypeStruct(W.shape, W.dtype))

    got, want = exported(fast), exported(fun)
    assert "bf16" in got.mlir_module()
    assert got.out_avals == want.out_avals
    assert distance(got.call(X, W), want.call(X, W)) < 16 * BF16
    table = explain(fun, "bf16-mixed")(OPEN, W)
    assert "bf16" in str(table)
    assert products(table) == products(explain(fun, "bf16-mixed")(X, W))


def products(table):
    return [(r.count, r.dtype) for r in table.rows if r.operation == "dot_general"]


def test_bytes_of_an_open_length_are_a_formula():
    text = str(explain(lambda x, w: x @ w @ w, "bf16-mixed")(OPEN, W))
    assert "2 f32 to bf16 (32*b*t + 512 B)" in text.replace("32*t*b", "32*b*t")


def test_a_linear_iteration_of_an_open_length_is_one_of_many_turns():
    def values(rewards, p):
        return lax.scan(lambda v, r: (r + 0.9 * p @ v, r), rewards[0], rewards)[0]

    length = export.symbolic_shape("t")[0]
    rewards = jax.ShapeDtypeStruct((length, 16), jnp.float32)
    table = explain(values, "bf16-mixed")(rewards, W)
    assert {r.dtype for r in table.rows if r.operation == "dot_general"} == {"f32"}
    assert products(table) == products(explain(values, "bf16-mixed")(normal(2, 20, 16), W))
