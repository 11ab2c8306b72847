"""Long programs: no function of autocast calls itself once for each operation of a chain."""

import functools
import sys

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from mpjax import autocast

pytestmark = pytest.mark.no_leak_check("it traces hundreds of operations: the check takes seconds")
W, B, X = jnp.ones((64, 64)), jnp.ones(64), jnp.ones((64, 64))
LABELS = jnp.zeros((64, 1), int)
TURNS, FRAMES = 400, 500  # JAX itself nests less than 300 calls


def repeated(step, y):
    for _ in range(TURNS):
        y = step(y)
    return y


def gates(y):
    return (jnp.tanh(y[:, :32]) * jax.nn.sigmoid(y[:, 32:])) @ W[:32]


def label(logits):
    return jnp.take_along_axis(jax.nn.log_softmax(logits), LABELS, -1)


def attend(x, w, change):
    return jax.nn.softmax(change(x @ w @ (x @ w).T)) @ (x @ w)


def masked(logits):
    ahead = jnp.tril(jnp.ones((64, 64), bool))
    return jnp.where(repeated(lambda m: m & ahead, ahead), logits, -1e9)


CHAINS = {
    "affine, cut into gates": lambda w, b, x: gates(repeated(lambda y: 1.01 * y + b, x @ w)),
    "affine, a label": lambda w, b, x: label(repeated(lambda y: 1.01 * y + 1, x @ w)),
    "curves, a norm": lambda w, b, x: (
        lambda y: y / jnp.linalg.norm(y, axis=-1, keepdims=True) @ w
    )(repeated(jnp.tanh, x @ w)),
    "softmaxes": lambda w, b, x: gates(repeated(jax.nn.softmax, x @ w)),
    "centred": lambda w, b, x: repeated(lambda y: y - 0.01 * y.sum(0), x @ w) @ w,
    "a mask": lambda w, b, x: attend(x, w, masked),
    "logits": lambda w, b, x: attend(x, w, lambda y: repeated(lambda z: 1.01 * z + 1, y)),
    "moves": lambda w, b, x: repeated(jnp.transpose, x @ w) @ w,
    "indices": lambda w, b, x: (x @ w)[repeated(lambda i: (i + 1) % 64, jnp.arange(64))] @ w,
    "a loop": lambda w, b, x: lax.scan(
        lambda c, _: (repeated(lambda y: 1.01 * jnp.tanh(y), c @ w), None), x, length=2
    )[0],
}


def depth():
    frame, count = sys._getframe(), 0
    while frame is not None:
        frame, count = frame.f_back, count + 1
    return count


@pytest.mark.sampled(2)
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("name", CHAINS)
def test_a_long_chain_nests_no_more_calls_than_a_short_one(name, inside):
    def loss(w):
        return jnp.sum(CHAINS[name](w, B, X))

    low = functools.partial(autocast, policy="bf16-mixed")
    fun = low(jax.grad(loss)) if inside else jax.grad(low(loss))
    jax.make_jaxpr(jax.grad(loss))(W)  # what JAX traces once
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(depth() + FRAMES)
    try:
        jax.make_jaxpr(fun)(W)
    finally:
        sys.setrecursionlimit(before)
