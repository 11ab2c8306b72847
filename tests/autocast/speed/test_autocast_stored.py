"""Where values are stored low: what a plan's steps leave, and what their backward pass keeps."""

import re

import jax
import jax.numpy as jnp
import pytest
from _hinted import hints
from _planned import Planned
from jax import lax

from mpjax import autocast

X = jax.ShapeDtypeStruct((64, 32), jnp.float32)
W = jax.ShapeDtypeStruct((32, 32), jnp.float32)
BIAS = jax.ShapeDtypeStruct((32,), jnp.float32)


def scaled_norm(x, w, b):  # an activation that a mean reads, and what the mean gates
    y = x @ w
    y = y - jnp.mean(y, 0)
    y = jax.nn.silu(y * lax.rsqrt(jnp.mean(y * y, 0)) * b)
    gates = jax.nn.sigmoid(jnp.mean(y, 0, keepdims=True) @ w)
    return (y * gates) @ w


def outputs_of(name, planned):
    """The groups that leave what an operation makes, each with whether a GPU holds it low."""
    made = {v for d in planned.decisions(name) for v in d.eqn.outvars}
    return [v in g.marks.stored for g in planned.groups for v, *_ in g.outputs if v in made]


def normalised(x):
    y = x - jnp.mean(x, -1, keepdims=True)
    return y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)


def stream(x, w, b):
    x = x @ w
    for _ in range(2):
        x = x + (jax.nn.gelu(normalised(x) @ w) @ w + b)
    return normalised(x) @ w


def test_a_gpu_holds_a_stream_low_that_a_norm_and_the_next_sum_read():
    made = outputs_of("add", Planned(stream, X, W, BIAS))
    assert made == [True]  # the last sum is read by a norm alone, which computes it again


def test_a_gpu_holds_an_activation_low_that_a_statistic_reads():
    planned = Planned(scaled_norm, X, W, BIAS)
    assert True in outputs_of("jit", planned)


def test_a_group_keeps_its_statistics_and_no_wide_copies_of_what_is_small():
    def loss(x, w, rows):
        def step(state, row):
            state = 0.9 * state + row[:, None] * jnp.exp(row)[:, None]
            return state, jnp.sum(state, -1)

        _, sums = lax.scan(step, jnp.zeros((32, 64)), rows @ w)
        return jnp.sum((sums @ w) ** 2)

    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 32), (32, 32), (16, 32))]
    grad = jax.make_jaxpr(jax.grad(autocast(loss, "bf16-mixed"), argnums=1))(*args)
    forward = next(e for e in grad.jaxpr.eqns if e.primitive.name == "scan")
    stacked = [v.aval for v in forward.outvars[1:]]  # behind the carry
    assert {a.dtype.name for a in stacked} == {"bfloat16"}


WRITTEN_OUT = {
    "gelu": jax.nn.gelu,
    "exact gelu": lambda y: 0.5 * y * (1 + lax.erf(y / 2**0.5)),
    "swish": lambda y: y / (1 + jnp.exp(-y)),
    "mish": lambda y: y * jnp.tanh(jnp.log1p(jnp.exp(y))),
    "a function": jax.nn.silu,
}


def activated_by(act, norm=None):
    """What made the values of a network whose cotangents a GPU stores low."""

    def centre(x, b):
        x = x - jnp.mean(x, 0)
        return x * (lax.rsqrt(jnp.mean(x * x, 0) + 1e-5) * b) + b

    def fun(x, w, b):
        return act((norm or centre)(x @ w, b)) @ w

    planned = Planned(fun, X, W, BIAS)
    marked = frozenset().union(*(group.marks.several for group in planned.groups))
    return [d.eqn.primitive.name for d in planned.plan.decisions if d.eqn.outvars[0] in marked]


@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_a_gpu_stores_the_cotangent_of_what_an_activation_reads_however_it_is_written(name):
    assert activated_by(WRITTEN_OUT[name]) == ["add"]  # the norm's shift, and nothing inside


def test_what_a_norm_or_a_softmax_computes_for_itself_is_not_taken_for_an_activation():
    assert activated_by(lambda y: 2 * y) == []
    assert activated_by(lambda y: y, lambda x, b: b * jax.nn.softmax(x, 0)) == []
    assert activated_by(lambda y: y, lambda x, b: jax.nn.log_softmax(x, 0) - b) == []


@pytest.mark.parametrize(("policy", "low"), [("bf16-mixed", "bf16"), ("16-mixed", "f16")])
def test_what_is_copied_last_is_stored_low_before_and_its_cotangent_added_up_low(policy, low):
    args = jnp.ones((8, 8)), jnp.linspace(-1.0, 1.0, 128).reshape(16, 8)

    def copied():
        def fun(w, x):
            return jnp.sum(jnp.tanh(jnp.repeat(x @ w + w[0], 2, axis=0) @ w) ** 2)

        text = str(jax.make_jaxpr(jax.grad(autocast(fun, policy), (0, 1)))(*args))
        return set(re.findall(r":(\w+)\[16,2,8\] = ", text))

    assert copied() == {low}
    with hints.without("copied_last"):
        assert copied() == {"f32"}
