"""Similarities: a loss's product of two values that products made, whose rows a softmax reads."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _cuts import AROUND

import mpjax

_RNG = np.random.default_rng(0)
X = _RNG.normal(size=(32, 16)).astype(np.float32)
Y = (X + 0.5 * _RNG.normal(size=(32, 16))).astype(np.float32)
W = (_RNG.normal(size=(16, 32)) / 4).astype(np.float32)


def _unit(z):
    return 10 * z / jnp.linalg.norm(z, axis=-1, keepdims=True)


def _of_pairs(scores):
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(scores)))


# Of similarities: a contrastive loss, in one direction and in two, and others that read their rows.
LOSSES = {
    "contrastive": _of_pairs,
    "in two directions": lambda s: _of_pairs(s) + _of_pairs(s.T),
    "by a logsumexp": lambda s: jnp.mean(jax.nn.logsumexp(s, -1) - jnp.diag(s)),
    "by a maximum": lambda s: jnp.mean(jnp.log(jnp.exp(s - s.max(-1, keepdims=True)).sum(-1))),
    "squares of a softmax": lambda s: 9 * jnp.mean((jax.nn.softmax(s) - jnp.eye(32)) ** 2),
}


def _loss(name, cut):
    def loss(w, x, y):
        a, b = _unit(x @ w + 3), _unit(y @ w + 3)  # all cosines are near 1
        return LOSSES[name](AROUND[cut](lambda a, b: a @ b.T)(a, b))

    return loss


@functools.cache
def _right(name):
    return jax.grad(_loss(name, "uncut"))(W, X, Y)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("cut", AROUND)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("policy", "most"), [("bf16-mixed", 0.045), ("16-mixed", 0.006)])
def test_law_of_similarities_a_softmax_reads_them_as_they_were_added_up(policy, most, name, cut):
    fun = _loss(name, cut)
    right = _right(name)
    outside = jax.grad(mpjax.autocast(fun, policy))
    inside = mpjax.autocast(jax.grad(fun), policy)
    for got in (jax.jit(outside)(W, X, Y), jax.jit(inside)(W, X, Y)):
        assert np.linalg.norm(got - right) < most * np.linalg.norm(right)


def test_the_logits_of_a_layer_and_scores_before_one_are_rounded():
    def logits(w, x):
        return _of_pairs(jnp.tanh(x @ w) @ jnp.concatenate([w, w]))

    def scores(w, x):
        h = x @ w
        return jnp.mean(jnp.tanh(h @ h.T) @ h @ w.T)

    for fun, products in ((logits, 2), (scores, 4)):
        eqns = jax.make_jaxpr(mpjax.autocast(fun, "bf16-mixed"))(W, X).eqns
        made = [e.outvars[0].aval.dtype for e in eqns if e.primitive.name == "dot_general"]
        assert made == [jnp.bfloat16] * products
