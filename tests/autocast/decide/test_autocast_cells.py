"""Losses of shares: a product counts examples into few cells, and their cotangents are float32.

A cell's cotangent is that of all its examples. Rounded, they share its error, and what the loss
takes off by its marginals would be left.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax

pytestmark = pytest.mark.standard_promotion("losses are run in float64 too, with float32 arrays")
CLASSES, EXAMPLES = 6, 2048
LOW = {"bf16-mixed": jnp.bfloat16, "16-mixed": jnp.float16}
_RNG = np.random.default_rng(0)
X = _RNG.normal(size=(EXAMPLES, 8)).astype(np.float32)
W = (0.6 * _RNG.normal(size=(8, CLASSES))).astype(np.float32)
LABELS = _RNG.integers(0, CLASSES, EXAMPLES)
ONE_HOT = np.eye(CLASSES, dtype=np.float32)[LABELS]
SOFT = np.asarray(jax.nn.softmax(_RNG.normal(size=(EXAMPLES, CLASSES))), np.float32)


def mutual_information(cells, q, labels):
    rows, columns = cells.sum(1, keepdims=True), cells.sum(0)
    return -jnp.sum(cells * (jnp.log(cells) - jnp.log(rows) - jnp.log(columns)))


def weighted_kappa(cells, q, labels):
    weights = (jnp.arange(CLASSES)[:, None] - jnp.arange(CLASSES)) ** 2
    return jnp.sum(weights * cells) / jnp.sum(weights * jnp.outer(q.mean(0), labels.mean(0)))


def soft_overlap(cells, q, labels):
    both = jnp.diagonal(cells)
    return 1 - jnp.mean(both / (cells.sum(0) + cells.sum(1) - both))


def spread_of_means(cells, q, labels):
    return jnp.sum((cells / labels.mean(0) - q.mean(0)[:, None]) ** 2)


OF_CELLS = (mutual_information, weighted_kappa, soft_overlap, spread_of_means)
COUNTED = {
    "a product": lambda q, labels: q.T @ labels / EXAMPLES,
    "turned": lambda q, labels: (labels.T @ q / EXAMPLES).T,
    "einsum": lambda q, labels: jnp.einsum("nk,nc->kc", q, labels) / EXAMPLES,
    "a checkpoint": jax.checkpoint(lambda q, labels: q.T @ labels / EXAMPLES),
    "a jit": jax.jit(lambda q, labels: q.T @ labels / EXAMPLES),
}


def _loss(of, counted, dtype=None):
    def loss(w, x, labels):
        if dtype is not None:
            w, x = (a.astype(dtype).astype(a.dtype) for a in (w, x))
        q = jax.nn.softmax(x @ w)
        return 1024.0 * of(COUNTED[counted](q, labels), q, labels)  # as a loss scale does

    return loss


def _gradient(fun, labels, wide=False):
    with jax.enable_x64(wide):
        args = (jnp.asarray(a, jnp.float64 if wide else jnp.float32) for a in (W, X, labels))
        return np.asarray(fun(*args), np.float64)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", LOW)
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("labels", ["one-hot", "soft"])
@pytest.mark.parametrize("counted", COUNTED)
@pytest.mark.parametrize("of", OF_CELLS)
def test_law_of_cells_a_loss_of_shares_has_the_gradient_of_a_hand_cast(
    of, counted, labels, inside, policy
):
    table = {"one-hot": ONE_HOT, "soft": SOFT}[labels]
    loss = _loss(of, counted)
    right = _gradient(jax.grad(loss), table, wide=True)
    low = functools.partial(mpjax.autocast, policy=policy)
    fun = low(jax.grad(loss)) if inside else jax.grad(low(loss))
    by_hand = jax.grad(_loss(of, counted, LOW[policy]))
    off, hand = (
        np.linalg.norm(_gradient(f, table) - right) / np.linalg.norm(right) for f in (fun, by_hand)
    )
    assert off <= 2 * max(hand, float(jnp.finfo(LOW[policy]).eps))


def test_a_layer_that_a_whole_batch_reads_is_low():
    def network(w, x):
        return jnp.sum(jnp.tanh(jax.nn.softmax(x @ w) @ w.T) @ w)

    rows = mpjax.explain(network, "bf16-mixed")(W, X).rows
    assert {row.dtype for row in rows if row.operation == "dot_general"} == {"bf16"}
