"""A sum of values that are 0 or more cancels nothing: the norm of a gradient leaves layers low."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _samples import normal
from _small import products
from jax import lax

import mpjax
from mpjax._autocast.known import fact_flags, facts, walk

X, W, V = normal(0, 6, 4), normal(1, 4, 4), normal(2, 4, 4)


def _is_positive(fun, *args):
    jaxpr = jax.make_jaxpr(fun)(*args)
    known = walk.inside(jaxpr, walk.unrelated(jaxpr.jaxpr))
    return bool(facts.of_atom(jaxpr.jaxpr.outvars[0], known).flags & fact_flags.POSITIVE)


POSITIVE = {
    "a square": jnp.square,
    "times itself": lambda x: x * x,
    "an even power": lambda x: x**4,
    "a sum of squares": lambda x: jnp.sum(x**2),
    "a sum of a known number too": lambda x: 1e-6 + jnp.mean(x**2),
    "a sum of squares of zeros": lambda x: jnp.sum(x**2 + jnp.zeros_like(x) ** 2),
    "a row by itself": lambda x: (lambda row: row @ row)(x[0]),
    "a norm": jnp.linalg.norm,
    "a softmax": jax.nn.softmax,
    "a relu": lambda x: jnp.maximum(x, 0),
    "exponentials, moved": lambda x: jnp.concatenate([jnp.exp(x), abs(x)]).T.reshape(-1)[3:],
    "the smaller of two": lambda x: jnp.minimum(x**2, jax.nn.sigmoid(x)),
    "one of two": lambda x: jnp.where(x > 1, x**2, abs(x)),
    "in a call": lambda x: jax.jit(lambda y: y * y)(x),
    "in each branch": lambda x: lax.cond(x[0, 0] > 0, jnp.abs, jnp.square, x),
}
NOT_POSITIVE = {
    "an odd power": lambda x: x**3,
    "two different values": lambda x: x * x[::-1],
    "a square, negated": lambda x: -(x**2),
    "times a negative number": lambda x: -2 * x**2,
    "a difference": lambda x: x**2 - 1,
    "with a negative number": lambda x: x**2 + -1.0,
    "vdot with another": lambda x: jnp.vdot(x, x[::-1]),
    "a gram matrix": lambda x: x @ x.T,
    "the smaller of two": lambda x: jnp.minimum(x**2, x),
    "one of two": lambda x: jnp.where(x > 1, x**2, x),
    "in one branch": lambda x: lax.cond(x[0, 0] > 0, jnp.abs, jnp.sin, x),
    "beside an array of either sign": lambda x: x**2 + normal(3, 6, 4),
    "a logarithm": lambda x: jnp.log(x**2),
}


@pytest.mark.parametrize("name", POSITIVE)
def test_what_is_0_or_more_is_known(name):
    assert _is_positive(POSITIVE[name], X)


@pytest.mark.parametrize("name", NOT_POSITIVE)
def test_what_may_be_negative_is_not_taken_for_positive(name):
    assert not _is_positive(NOT_POSITIVE[name], X)


_OF_ONE = (jnp.sin, jnp.square, jnp.abs, jnp.negative, jnp.exp, jnp.tanh, lambda x: x**3, jnp.sqrt)
_OF_ONE += (lambda x: x.T, lambda x: x[::-1], lambda x: x.sum(0) + x, lambda x: x.max(1) * x)
_OF_ONE += (lambda x: 0.5 - x, lambda x: x - -0.5, lambda x: x * -1.5, jax.nn.sigmoid, jnp.sign)
_OF_TWO = (jnp.add, jnp.subtract, jnp.multiply, jnp.divide, jnp.maximum, jnp.minimum, jnp.matmul)
_OF_TWO += (lambda x, y: jnp.where(x > y, x, y), lambda x, y: jnp.roll(x, 1) + y)


def _written(seed):
    """A random function of a square matrix."""
    rng = random.Random(seed)

    def fun(x):
        values = [x]
        for _ in range(6):
            if rng.random() < 0.5:
                values.append(rng.choice(_OF_ONE)(rng.choice(values)))
            else:
                values.append(rng.choice(_OF_TWO)(*rng.choices(values, k=2)))
        return values[-1]

    return fun


@pytest.mark.standard_promotion("random functions meet integers and Python's numbers")
def test_law_of_signs_what_is_taken_for_positive_is_never_negative():
    flagged = 0
    for seed in range(300):
        if _is_positive(_written(seed), W):
            flagged += 1
            assert not np.any(np.asarray(_written(seed)(W)) < 0), seed
    assert flagged > 40


def _loss(params, x):
    for w, b in params:
        x = jax.nn.gelu(x @ w + b)
    return jnp.mean(x**2)


PARAMS = [(W, X[0]), (V, X[1]), (W, X[2])]
READERS = {
    "optax.tree.norm": optax.tree.norm,
    "clipped": lambda g: optax.clip_by_global_norm(1.0).update(g, optax.EmptyState())[0],
    "each by the norm of all": lambda g: jax.tree.map(lambda leaf: leaf / optax.tree.norm(g), g),
    "a sum of norms": lambda g: sum(map(jnp.linalg.norm, jax.tree.leaves(g))),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_norm_of_the_gradient_leaves_the_backward_pass_low(reader):
    def step(params, x):
        grads = jax.grad(_loss)(params, x)
        return grads, READERS[reader](grads)

    dtypes = products(mpjax.autocast(step, "bf16-mixed"), PARAMS, X)
    assert dtypes.count("bfloat16") == 8, dtypes


def _film(joined):
    def loss(w, features, points):
        if joined:
            shift, scale = jnp.split(features @ w, 2, -1)
        else:
            shift, scale = features @ w[:, :16], features @ w[:, 16:]
        pooled = jnp.sum((points @ w[:, :16]) * (points @ w[:, 16:]), 1)
        return jnp.sum(jnp.tanh(features[:, :16] + shift + scale * pooled) @ w[:16])

    return loss


@pytest.mark.parametrize("joined", [False, True])
def test_a_shift_and_a_scale_of_a_sum_cancel_nothing(joined):
    args = jnp.ones((32, 32)), jnp.ones((8, 32)), jnp.ones((8, 3, 32))
    rows = mpjax.explain(_film(joined), "bf16-mixed")(*args).rows
    assert {row.dtype for row in rows if row.operation == "dot_general"} == {"bf16"}
