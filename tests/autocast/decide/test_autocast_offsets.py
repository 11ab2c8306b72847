"""What is added to all alike, such as a bias of 100, is not rounded before it is cancelled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _cuts import BOUNDARIES
from _cuts import MOVES as AND_BACK
from _evaluate import exactly, off, run
from _metamorphic import DTYPES, POLICIES, hand_cast
from jax import lax

import mpjax

_RNG = np.random.default_rng(11)


def _normal(*shape, at=0.0):
    return (at + _RNG.normal(size=shape)).astype(np.float32)


X, W, V = _normal(12, 5, 16), _normal(16, 6) / 4, _normal(6, 3)
TARGET = _normal(12, 5, 6, at=100)
BIAS, EACH = _normal(6, at=100), _normal(12, 16, at=30) / 4
WEIGHTS = _RNG.uniform(size=(12, 5, 1)).astype(np.float32)
SENDERS, RECEIVERS = np.array([0, 3, 5, 7, 2]), np.array([1, 2, 4, 9, 8])


def _one_by_one(fun, z):
    return jnp.stack([fun(row) for row in z.reshape(-1, 6)]).reshape(z.shape)


# How an offset comes to what a product made.
ADDED = {
    "a bias": lambda dot, z, b: z + b,
    "a bias first": lambda dot, z, b: b + z,
    "a bias with axes": lambda dot, z, b: z + b.reshape(1, 1, 6),
    "a scaled bias": lambda dot, z, b: 0.5 * z - 3 * b,
    "statistics of the data": lambda dot, z, b: z * jnp.sqrt(b) / 9 + b,
    "a number": lambda dot, z, b: z + b[0],
    "a bias in a call": lambda dot, z, b: jax.jit(jnp.add)(z, b),
    "a bias in a scan": lambda dot, z, b: lax.scan(lambda c, row: (c, row + b), 0, z)[1],
    "a bias in a map": lambda dot, z, b: lax.map(lambda r: lax.map(lambda u: u + b, r), z),
    "a bias of one at a time": lambda dot, z, b: _one_by_one(lambda u: u + b, z),
    "a layer for each example": lambda dot, z, b: z + dot(jnp.asarray(EACH), W + b / 9)[:, None],
}


def _mean(y, axes):
    return y.mean(axes, keepdims=True)


def _normed(y, axes):
    centred = y - _mean(y, axes)
    return centred * lax.rsqrt(_mean(centred**2, axes) + 1e-5)


def _weighted_mean(y):
    weights = jnp.asarray(WEIGHTS)
    return (weights * y).sum(1, keepdims=True) / weights.sum(1, keepdims=True)


def _normed_with_weights(y):
    centred = y - _weighted_mean(y)
    return centred * lax.rsqrt(_weighted_mean(centred**2) + 1e-5)


def _normed_with_products(y):
    def mean(u):
        return (jnp.einsum("nk,nkc->nc", WEIGHTS[..., 0], u) / WEIGHTS.sum(1))[:, None]

    centred = y - mean(y)
    return centred * lax.rsqrt(mean(centred**2) + 1e-5)


def _centred(u):
    return u - _mean(u, 1)


def _normed_at_once(y, axes):
    spread = jnp.maximum(_mean(y * y, axes) - _mean(y, axes) ** 2, 0.0)
    return (y - _mean(y, axes)) * lax.rsqrt(spread + 1e-2)


# What takes it off again. A layer for each example is the same at all places of an example.
CANCELLED = {
    "a batch norm": lambda y: _normed(y, (0, 1)),
    "a norm of each example": lambda y: _normed(y, 1),
    "a norm with one pass": lambda y: _normed_at_once(y, 1),
    "a mean": lambda y: y - _mean(y, 1),
    "a mean of a reshaped": lambda y: (lambda u: u - _mean(u, 1))(y.reshape(12, 5, 1, 6)),
    "a maximum": lambda y: y - y.max(1, keepdims=True),
    "a pool": lambda y: y - lax.reduce_window(y, -np.inf, lax.max, (1, 3, 1), (1, 1, 1), "SAME"),
    "neighbours": lambda y: y[:, 1:] - y[:, :-1],
    "the first": lambda y: y - y[:, :1],
    "rows of a graph": lambda y: y[:, SENDERS % 5] - y[:, RECEIVERS % 5],
    "halves of a sort": lambda y: (lambda u: u[:, :2] - u[:, 3:])(jnp.sort(y, axis=1)),
    "parts": lambda y: jnp.subtract(*jnp.split(y[:, :4], 2, axis=1)),
    "a product of both": lambda y: y * y - _mean(y * y, 1),
    "a layer norm": lambda y: _normed(y, 2),
    "a layer norm with one pass": lambda y: _normed_at_once(y, 2),
    "a layer norm before a transposition": lambda y: _normed(y.transpose(0, 2, 1), 1),
    "a softmax": lambda y: jax.nn.softmax(y),
    "a mean of a row": lambda y: y - _mean(y, 2),
    "a mean with weights": lambda y: y - _weighted_mean(y),
    "a norm with weights": _normed_with_weights,
    "a norm with products of weights": _normed_with_products,
    "a mean by its places": lambda y: y.at[:, np.arange(5)].add(-_mean(y, 1)),
    "a mean put beside": lambda y: y.at[:, np.arange(5)].subtract(_mean(y, 1)),
    "a target": lambda y: y - jnp.asarray(TARGET),
    "a number by its places": lambda y: y.at[:, np.arange(5)].add(-100.0),
    "a polynomial": lambda y: jnp.polyval(jnp.array([1.0, -200.0, 10000.0], y.dtype), y) / 4,
    "a SiLU": lambda y: _centred(jax.nn.silu(y)),
    "an exact GELU": lambda y: _centred(jax.nn.gelu(y, approximate=False)),
    "a reciprocal root": lambda y: 2e3 * _centred(lax.rsqrt(y)),
    "a logarithm of gamma": lambda y: _centred(jax.scipy.special.gammaln(y)) / 5,
    "a digamma": lambda y: 100 * _centred(jax.scipy.special.digamma(y)),
    "a trigamma": lambda y: 1e4 * _centred(jax.scipy.special.polygamma(1, y)),
    "a Bessel function": lambda y: 5e3 * _centred(jax.scipy.special.i0e(y)),
    "a cubic root": lambda y: 60 * _centred(jnp.cbrt(y)),
    "an inverse of a hyperbolic sine": lambda y: 100 * _centred(jnp.arcsinh(y)),
    "an angle": lambda y: 200 * _centred(jnp.arctan2(y, y[:, :1] + 1)),
    "a number that is computed": lambda y: (jnp.cbrt(y) - jnp.cbrt(jnp.array(100, y.dtype))) * 60,
    "a sharp function": lambda y: 4 * jax.scipy.special.gammainc(jnp.array(100, y.dtype), y),
}  # fmt: skip
OF_TARGETS = {"a target", "a number by its places", "a polynomial", "a sharp function"}
OF_TARGETS.add("a number that is computed")
AROUND_THE_TARGET = {"a bias", "a bias first", "a bias with axes", "a number", "a bias in a call"}
AROUND_THE_TARGET |= {"a bias in a map", "a bias of one at a time"}
BETWEEN = {
    "nothing": None,
    "jit": BOUNDARIES["jit"],
    "a scan that stacks": BOUNDARIES["scan that stacks"],
    "a checkpoint": BOUNDARIES["checkpoint"],
    **AND_BACK,
}


def _added(add, between, dot, w, b):
    def made(x, w, b):
        return [ADDED[add](dot, dot(x, w), b)]

    boundary = BETWEEN[between]
    if boundary is None or between in AND_BACK:
        (y,) = made(jnp.asarray(X), w, b)
        return y if boundary is None else boundary(y)
    (y,) = boundary(made)(jnp.asarray(X), w, b)
    return y


def _function(add, cancel, between, dot):
    def fun(w, v, b):
        y = _added(add, between, dot, w, b)
        return dot(jnp.tanh(CANCELLED[cancel](y).reshape(-1, 6)), v)

    return fun


def _errors(fun, right, *args):
    return off(run(fun, *args), right)


def _with_gradients(fun):
    def loss(w, v, b):
        out = fun(w, v, b)
        return jnp.vdot(out, jnp.cos(jnp.arange(out.size, dtype=out.dtype).reshape(out.shape)))

    return lambda w, v, b: (fun(w, v, b), jax.grad(loss, (0, 1))(w, v, b))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", POLICIES)
@pytest.mark.parametrize("cancel", CANCELLED)
def test_an_offset_is_not_rounded_before_it_is_cancelled(cancel, dtype):
    ways, places = list(ADDED), list(BETWEEN)
    first = list(CANCELLED).index(cancel)
    for i in range((first + list(POLICIES).index(dtype)) % 3, len(ways), 3):
        add, between = ways[i], places[(i + 3 * first) % len(places)]
        if add == "a layer for each example" and cancel == "a batch norm":
            continue  # it differs by example
        if cancel in OF_TARGETS and add not in AROUND_THE_TARGET:
            continue  # a tanh of the difference is saturated

        def flat(dot, add=add, between=between):
            return _with_gradients(_function(add, cancel, between, dot))

        args = W, V, BIAS
        right = exactly(flat(jnp.matmul), *args)
        by_hand = _errors(flat(hand_cast(DTYPES[dtype])), right, *args)
        fun = _function(add, cancel, between, jnp.matmul)
        low = _with_gradients(mpjax.autocast(fun, POLICIES[dtype]))
        got = _errors(low, right, *args)
        low = _with_gradients(mpjax.autocast(fun, POLICIES[dtype], rules="widest"))
        widest = _errors(low, right, *args)
        limit = 2 * max(by_hand, widest) + float(jnp.finfo(DTYPES[dtype]).eps)
        assert got <= limit, (cancel, add, between, got, by_hand)


def _gates(y):
    a, b, c = jnp.split(y, 3, axis=2)
    return jax.nn.sigmoid(a) * jnp.tanh(b) + c


def _turned(y):
    a, b = jnp.split(y, 2, axis=2)
    angles = jnp.arange(5.0)[:, None] * jnp.arange(3.0)
    return jnp.concatenate([a * jnp.cos(angles) - b * jnp.sin(angles), b], axis=2)


# What a bias for each channel is not cancelled by.
NOT_CANCELLED = {
    "a group norm": lambda y: _normed(y.reshape(12, 5, 2, 3), (1, 3)),
    "gates": _gates,
    "a rotation": _turned,
    "an activation": jax.nn.gelu,
}


@pytest.mark.parametrize("name", NOT_CANCELLED)
def test_a_bias_that_nothing_cancels_may_be_rounded_with_its_sum(name):
    def fun(w, v, b):
        y = jax.lax.optimization_barrier(jnp.asarray(X) @ w + b)
        return jnp.tanh(NOT_CANCELLED[name](y)).reshape(-1, 3) @ v[:3]

    rows = mpjax.explain(fun, "bf16-mixed")(W, V, BIAS).rows
    assert not [row for row in rows if "may be almost the same" in row.reason]


# Products of a loss over what has the offset, of 60 examples. Their weights are `m`, (60, 60).
OVER = {
    "weights that are given": lambda y, m: y - m @ y,
    "a softmax": lambda y, m: y - jax.nn.softmax(5 * m) @ y,
    "a mean": lambda y, m: y - jnp.ones((60, 60), y.dtype) @ y / 60,
    "a blur": lambda y, m: (y.T - jax.vmap(lambda c: _blurred(c, m[0, :3]))(y.T))[:, 1:-1],
    "a blur of a column": lambda y, m: y[1:-1, 0] - _blurred(y[:, 0], m[0, :3])[1:-1],
    "two blurs": lambda y, m: (_blurred(y[:, 0], m[0, :3]) - _blurred(y[:, 0], m[1, :5]))[2:-2],
    "a quotient": lambda y, m: y - m[0] @ y / m[0].sum(),
    "quotients of rows": lambda y, m: y - m @ y / m.sum(1, keepdims=True),
    "two means": lambda y, m: m[0] @ y / m[0].sum() - m[1] @ y / m[1].sum(),
    "a mean beside one": lambda y, m: m[0] @ y - y.mean(0),
    "means of classes": lambda y, m: y - _classes(y) @ (_classes(y).T @ y / 12),
    "a projection": lambda y, m: y - _powers(y) @ (jnp.linalg.pinv(_powers(y)) @ y),
    "a hat matrix": lambda y, m: y - (_powers(y) @ jnp.linalg.pinv(_powers(y))) @ y,
    "a product of a product": lambda y, m: y - m @ (m.T @ y / m.T.sum(1, keepdims=True)),
    "slopes": lambda y, m: _times(y) @ y / (_times(y) @ _times(y)),
    "slopes of centred times": lambda y, m: (_times(y) + 2 - (_times(y) + 2).mean()) @ y,
    "signs": lambda y, m: jnp.einsum(
        "snd,s->nd", jnp.stack([y, y[::-1]]), 60 * (m[0, :2] - m[0, 1::-1])
    ),
}


def _blurred(row, kernel):
    return jnp.convolve(row, kernel / kernel.sum(), mode="same")


def _classes(y):
    return jnp.asarray(np.eye(5)[np.arange(60) % 5], y.dtype)


def _times(y):
    return jnp.asarray(np.linspace(-1, 1, 60), y.dtype)


def _powers(y):
    return jnp.stack([_times(y) ** i for i in range(3)], axis=1)


OVER_WEIGHTS = np.abs(_normal(60, 60))
OVER_WEIGHTS /= OVER_WEIGHTS.sum(1, keepdims=True)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", POLICIES)
@pytest.mark.parametrize("over", OVER)
def test_a_product_of_a_loss_over_what_has_an_offset_reads_it_unrounded(over, dtype):
    ways, places = [way for way in ADDED if way != "a layer for each example"], list(BETWEEN)
    first = list(OVER).index(over)
    for i in range((first + list(POLICIES).index(dtype)) % 3, len(ways), 3):
        add, between = ways[i], places[(i + 3 * first) % len(places)]

        def loss(dot, add=add, between=between):
            def fun(w, b, m):
                y = _added(add, between, dot, w, b).reshape(60, 6)
                return jnp.mean(OVER[over](y, m) ** 2)

            return jax.value_and_grad(fun)

        args = W, BIAS, OVER_WEIGHTS
        right = exactly(loss(jnp.matmul), *args)
        by_hand = _errors(loss(hand_cast(DTYPES[dtype])), right, *args)
        low = mpjax.autocast(loss(jnp.matmul), POLICIES[dtype])
        got = _errors(low, right, *args)
        assert got <= 2 * by_hand + float(jnp.finfo(DTYPES[dtype]).eps), (over, add, between)
