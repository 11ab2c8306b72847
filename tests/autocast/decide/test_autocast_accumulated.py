"""Sums that are added up batch by batch, by whatever loop: what is made of them is as if of one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _small import check_all, distance, each_inside_and_outside
from jax import lax

_RNG = np.random.default_rng(0)
X = _RNG.normal(size=(72, 16)).astype(np.float32)
W = (_RNG.normal(size=(16, 6)) / 4).astype(np.float32)
BATCHES = 9  # more than the terms that are remembered of one sum


def _at_once(sums, x, w):
    return sums(x, w)


def _in_python(sums, x, w):
    each = [sums(rows, w) for rows in jnp.split(x, BATCHES)]
    return jax.tree.map(lambda *parts: sum(parts), *each)


def _stacked(sums, x, w):
    each = [sums(rows, w) for rows in jnp.split(x, BATCHES)]
    return jax.tree.map(lambda *parts: jnp.stack(parts).sum(0), *each)


def _batches(x):
    return x.reshape(BATCHES, -1, x.shape[-1])


def _mapped(sums, x, w):
    return jax.tree.map(lambda a: a.sum(0), lax.map(lambda rows: sums(rows, w), _batches(x)))


def _by_vmap(sums, x, w):
    each = jax.vmap(lambda rows: sums(rows, w))(_batches(x))
    return jax.tree.map(lambda a: a.sum(0), each)


def _start(sums, x, w):
    made = jax.eval_shape(sums, x[: len(x) // BATCHES], w)
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), made)


def _in_a_scan(sums, x, w):
    def turn(carry, rows):
        return jax.tree.map(jnp.add, carry, sums(rows, w)), None

    return lax.scan(turn, _start(sums, x, w), _batches(x))[0]


def _from_the_first_on(sums, x, w):
    def turn(carry, rows):
        return jax.tree.map(jnp.add, carry, sums(rows, w)), None

    first, *_ = batches = _batches(x)
    return lax.scan(turn, sums(first, w), batches[1:])[0]


def _in_a_fori_loop(sums, x, w):
    def turn(i, carry):
        return jax.tree.map(jnp.add, carry, sums(_batches(x)[i], w))

    return lax.fori_loop(0, BATCHES, turn, _start(sums, x, w))


def _in_a_while_loop(sums, x, w):
    count = len(x) // BATCHES

    def turn(carry):
        i, total = carry
        rows = lax.dynamic_slice_in_dim(x, i * count, count)
        return i + 1, jax.tree.map(jnp.add, total, sums(rows, w))

    return lax.while_loop(lambda c: c[0] < BATCHES, turn, (0, _start(sums, x, w)))[1]


WAYS = {
    "at once": _at_once,
    "in Python": _in_python,
    "stacked": _stacked,
    "map": _mapped,
    "vmap": _by_vmap,
    "scan": _in_a_scan,
    "scan from the first on": _from_the_first_on,
    "fori_loop": _in_a_fori_loop,
    "while_loop": _in_a_while_loop,
}


def _covariance(add_up, x, w):
    def sums(x, w):
        h = jnp.tanh(x @ w) + 30
        return h.T @ h, h.sum(0)

    products, total = add_up(sums, x, w)
    return products / len(x) - jnp.outer(total, total) / len(x) ** 2


def _covariance_of_inputs(add_up, x, w):
    def sums(x, w):
        a, b = x[:, :8] + 30, x[:, 8:] + 30
        return a.T @ b, a.sum(0), b.sum(0)

    products, first, second = add_up(sums, x, w)
    return products / len(x) - jnp.outer(first / len(x), second / len(x))


def _correlation(add_up, x, w):
    def sums(x, w):
        a, b = (x @ w + 20)[:, 0], (x @ w + 20)[:, 1]
        return a @ b, a.sum(), b.sum(), a @ a, b @ b

    ab, a, b, aa, bb = add_up(sums, x, w)
    n = len(x)
    return (n * ab - a * b) / jnp.sqrt((n * aa - a * a) * (n * bb - b * b))


def _distances(add_up, x, w):
    """Of two sets of points, whose coordinates come in batches."""

    def sums(rows, w):
        a, b = rows[:, :8] + 9, rows[:, 8:] + 9
        return a.T @ b, (a * a).sum(0), (b * b).sum(0)

    products, first, second = add_up(sums, x, w)
    return first[:, None] + second - 2 * products


LOSSES = {
    "a covariance": _covariance,
    "a covariance of inputs": _covariance_of_inputs,
    "a correlation": _correlation,
    "squared distances": _distances,
}


def _each_way(loss):
    return {name: lambda x, w, way=way: loss(way, x, w) for name, way in WAYS.items()}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("policy", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("loss", LOSSES)
def test_law_of_batches_what_cancels_at_once_cancels_after_a_loop(loss, policy):
    check_all(_each_way(LOSSES[loss]), policy, X, W, rtol=0.02, atol=0.02)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("loss", LOSSES)
def test_law_of_batches_gradients_of_what_cancels_cancel_after_a_loop(loss):
    def each(way):
        return lambda x, w: jnp.sum(jnp.sin(LOSSES[loss](way, x, w)) * 0.1)

    ways = {name: each(way) for name, way in WAYS.items() if name != "while_loop"}
    right = jax.grad(each(_at_once))(X, W)
    for case, got in each_inside_and_outside(jax.grad, ways, "bf16-mixed", X, W):
        assert distance(got, right) < 0.02, case


def test_law_of_batches_a_mean_by_small_weights_is_one_after_a_loop():
    def mean(add_up, x, w):
        def sums(x, w):
            weights = jax.nn.sigmoid(x[:, :4] - 18.5)  # of 1e-8
            return weights.T @ x, weights.sum(0)

        products, total = add_up(sums, x, w)
        return products / total[:, None]

    check_all(_each_way(mean), "16-mixed", X, W, rtol=0.01, atol=0.01)
