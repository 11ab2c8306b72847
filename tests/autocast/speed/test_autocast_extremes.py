"""Maxima and minima in groups that the backward pass computes again: `known/extremes`.

These tests compile as `conftest.py` asks for, without optimisation: then a value that is computed
again differs from the first in its last bit, as it may on a GPU or a TPU.
"""

import jax
import jax.numpy as jnp
import pytest
from _cuts import AROUND, in_turn
from _samples import normal
from _small import distance
from jax import lax

import mpjax

W = {
    "up": normal(0, 10, 48, scale=0.3),
    "state": normal(1, 48, 32, scale=0.15),
    "hidden": normal(2, 36, 48, scale=0.17),
    "next": normal(3, 48, 32, scale=0.15),
    "bias": normal(4, 48, scale=0.1),
    "offset": normal(5, 32, scale=0.1),
    "other": normal(6, 32, scale=0.1),
}
X = normal(7, 8, 10)


def _from_0_to_1(h):
    least, most = h.min(-1, keepdims=True), h.max(-1, keepdims=True)
    return (h - least) / (most - least)


def _by_hand(z, top=lambda z: z.max(-1, keepdims=True)):
    e = jnp.exp(z - top(z))
    return e / e.sum(-1, keepdims=True)


NORMS = {
    "from 0 to 1": _from_0_to_1,
    "by the largest": lambda h: h / h.max(-1, keepdims=True),
    "by the largest magnitude": lambda h: h / abs(h).max(-1, keepdims=True),
    "a softmax": jax.nn.softmax,
    "a softmax by hand": _by_hand,
    "the largest alone": lambda h: jnp.where(h == h.max(-1, keepdims=True), h * h, 0.1 * h),
    "the largest, stopped": lambda h: jnp.where(h < lax.stop_gradient(h.max(-1))[:, None], h, h**2),
    "of pools": lambda h: h + h.reshape(8, 8, 4).max(-1).repeat(4, 1),
}


def _loss(norm, cut=lambda fun: fun):
    """One turn of a model of states that are kept between 0 and 1, as in MuZero."""

    def loss(w, x):
        h = cut(_from_0_to_1)(jax.nn.relu(x @ w["up"] + w["bias"]) @ w["state"] + w["offset"])
        joined = jnp.concatenate([h, h[:, :4]], -1)
        change = jax.nn.relu(joined @ w["hidden"] + w["bias"]) @ w["next"] + w["other"]
        return jnp.mean(cut(norm)(h + change) ** 2)

    return loss


@pytest.mark.sampled(3)
@pytest.mark.parametrize("cut", ["uncut", "jit", "checkpoint"])
@pytest.mark.parametrize("norm", NORMS)
def test_law_of_extremes_a_gradient_finds_the_element_that_was_the_largest(norm, cut):
    policy = in_turn(["bf16-mixed", "16-mixed"], (NORMS, norm))
    fun = _loss(NORMS[norm], AROUND[cut])
    got = jax.jit(jax.grad(mpjax.autocast(fun, policy)))(W, X)
    assert distance(got, jax.grad(_loss(NORMS[norm]))(W, X)) < (0.1 if "b" in policy else 0.01)


H = normal(8, 64, 128)
V = normal(9, 128, 128, scale=0.1)
TOPS = {  # what rows are divided by, and whether their maxima are saved
    "stopped": (lambda z: lax.stop_gradient(z.max(-1, keepdims=True)), True),
    "of what is stopped": (lambda z: lax.stop_gradient(z).max(-1, keepdims=True), True),
    "stopped behind a function": (lambda z: lax.stop_gradient(jnp.tanh(z.max(-1)))[:, None], True),
    "not stopped": (lambda z: z.max(-1, keepdims=True), False),
    "behind a function": (lambda z: jnp.tanh(z.max(-1, keepdims=True)), False),
    "compared": (lambda z: jnp.where(z < lax.stop_gradient(z.max(-1))[:, None], 1, z), False),
}


@pytest.mark.parametrize("cut", [lambda fun: fun, jax.jit], ids=["uncut", "jit"])
@pytest.mark.parametrize("top", TOPS)
def test_a_maximum_is_saved_where_nothing_is_compared_with_it(top, cut):
    of, is_saved = TOPS[top]
    divide = cut(lambda z, y: (z + y) / of(z + y))
    fun = mpjax.autocast(lambda v: divide(H @ v, H @ v.T) @ v, "bf16-mixed")
    saved = [x for x in jax.tree.leaves(jax.vjp(fun, V)[1]) if x.size == len(H)]
    largest = jnp.max(H @ (V + V.T), -1)
    assert any(distance(x, largest) < 0.02 for x in saved) == is_saved
