"""Gates under float16: products of two values, past 65504 where neither of the two is."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _cuts import AROUND, cuts_in_turn
from _small import each_inside_and_outside
from jax import lax

import mpjax

_RNG = np.random.default_rng(0)
PIXELS = _RNG.uniform(0, 255, size=(32, 16)).astype(np.float32)
W = tuple((_RNG.normal(size=s) / 4).astype(np.float32) for s in ((16, 32), (16, 32), (32, 4)))
# Of a and b, which products made: of up to 400 each.
GATES = {
    "a * b": lambda a, b: a * b,
    "by a relu": lambda a, b: jax.nn.relu(a) * jax.nn.relu(b),
    "by a gelu": lambda a, b: a * jax.nn.gelu(b),
    "by a swish": lambda a, b: a * jax.nn.silu(b),
    "by a softplus": lambda a, b: a * jax.nn.softplus(b),
    "a modulation": lambda a, b: a * (1 + b) + a,
    "a relu of one": lambda a, b: jax.nn.relu(a * b),
    "a swish of one": lambda a, b: jax.nn.silu(a * b),
    "by another place": lambda a, b: a * jnp.roll(b, 1, 1),
    "halves of one": lambda a, b: jnp.repeat(a[:, :16] * a[:, 16:], 2, 1),
    "chosen": lambda a, b: jnp.where(a > 0, a * b, a),
    "by magnitudes": lambda a, b: abs(a) * b,
    "an outer product": lambda a, b: (a[:, :4, None] * b[:, None, :8]).reshape(32, 32),
    "by einsum": lambda a, b: jnp.einsum("bi,bi->bi", a, b),
    "a cross product": lambda a, b: jnp.pad(
        jnp.cross(a[:, :30].reshape(-1, 3), b[:, :30].reshape(-1, 3)).reshape(32, 30),
        ((0, 0), (0, 2)),
    ),
    "a quotient": lambda a, b: a / (1e-3 + jax.nn.relu(b)),
    "a magnitude of a power": lambda a, b: abs(a * a) + b,
    "a covariance": lambda a, b: a.T @ a / 8,
}
READERS = {
    "root mean square": lambda h: h * lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6),
    "layer norm": lambda h: (
        (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + 1e-5)
    ),
    "length": lambda h: h / jnp.linalg.norm(h, axis=-1, keepdims=True),
    "largest": lambda h: h / abs(h).max(-1, keepdims=True),
    "saturating ratio": lambda h: jnp.tanh(h / (1 + abs(h))),
}


def _loss(gate, read, cut):
    def loss(w, x):
        up, along, down = w
        h = AROUND[cut](GATES[gate])(x @ up, x @ along)
        return 1e3 * jnp.mean(jnp.tanh(READERS[read](h) @ down) ** 2)

    return loss


@functools.cache
def _right(gate, read):
    return jax.value_and_grad(_loss(gate, read, "uncut"))(W, PIXELS)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("gate", GATES)
def test_law_of_gates_a_product_of_two_values_stays_float32_under_float16(gate):
    """Each gate meets every second cut, and two readers."""
    i = list(GATES).index(gate)
    readers = {
        cut: list(READERS)[(i + j % 2) % len(READERS)]
        for j, cut in enumerate(cuts_in_turn((GATES, gate)))
    }
    funs = {cut: _loss(gate, read, cut) for cut, read in readers.items()}
    results = each_inside_and_outside(jax.value_and_grad, funs, "16-mixed", W, PIXELS)
    for (cut, place), (value, grads) in results:
        right, _ = _right(gate, readers[cut])
        assert abs(value - right) < 0.01 * right, (cut, place)
        assert all(np.isfinite(g).all() for g in grads), (cut, place)


# Numerators of means, which the sum of their own weights divides: past 65504, and the mean is not.
SUMS = {
    "keys first": lambda q, k, v: q @ (k.T @ v),
    "scores first": lambda q, k, v: (q @ k.T) @ v,
    "by einsum": lambda q, k, v: jnp.einsum("lm,nm,nd->ld", q, k, v),
}


def _linear_attention(sums, cut):
    def loss(w, x):
        query, key, value = w
        q, k = (jax.nn.relu(x @ m) + 1e-3 for m in (query, key))
        numerator = AROUND[cut](SUMS[sums])(q, k, x @ value)
        mean = numerator / AROUND[cut](lambda q, k: q @ k.sum(0))(q, k)[:, None]
        return jnp.mean((mean @ W[0]) ** 2)

    return loss


@pytest.mark.parametrize("sums", SUMS)
def test_law_of_means_a_sum_that_its_weights_divide_is_not_rounded_under_float16(sums):
    w, x = _RNG.normal(size=(3, 16, 16)) / 4, 12 * _RNG.normal(size=(24, 16))
    args = tuple(w.astype(np.float32)), x.astype(np.float32)
    right = _linear_attention(sums, "uncut")(*args)
    for cut in cuts_in_turn((SUMS, sums)):
        loss = mpjax.autocast(_linear_attention(sums, cut), "16-mixed")
        value, grads = jax.jit(jax.value_and_grad(loss))(*args)
        assert abs(value - right) < 0.01 * right, cut
        assert all(np.isfinite(g).all() for g in grads), cut


LOW = {
    "by a sigmoid": lambda a, b: a * jax.nn.sigmoid(b),
    "by a tanh": lambda a, b: a * jnp.tanh(b),
    "a swish": lambda a, b: jax.nn.silu(a),
    "a gelu by hand": lambda a, b: 0.5 * a * (1 + jnp.tanh(0.8 * a)),
}


@pytest.mark.parametrize("gate", LOW)
def test_what_a_bounded_value_gates_is_stored_in_float16(gate):
    def fun(w, x):
        h = lax.optimization_barrier(LOW[gate](x @ w[0], x @ w[1]))
        return READERS["layer norm"](h) @ w[2]

    eqns = jax.make_jaxpr(mpjax.autocast(fun, "16-mixed"))(W, PIXELS).eqns
    stored = {e.outvars[0].aval.dtype for e in eqns if "barrier" in e.primitive.name}
    assert stored == {np.dtype(np.float16)}


def test_a_gate_that_a_product_reads_is_low_and_explain_says_why_others_are_not():
    def swiglu(w, x):
        return (jax.nn.silu(x @ w[0]) * (x @ w[1])) @ w[2]

    (row,) = [r for r in mpjax.explain(swiglu, "16-mixed")(W, PIXELS).rows if r.operation == "mul"]
    assert row.dtype == "f16"
    fun = _loss("a * b", "layer norm", "checkpoint")
    rows = {p: mpjax.explain(fun, p)(W, PIXELS).rows for p in ("bf16-mixed", "16-mixed")}
    gates = {p: next(r for r in rows[p] if r.operation == "mul") for p in rows}
    assert gates["bf16-mixed"].dtype == "bf16"
    assert gates["16-mixed"].dtype == "f32"
    assert "a power, or a product of two values" in str(gates["16-mixed"].reason)
