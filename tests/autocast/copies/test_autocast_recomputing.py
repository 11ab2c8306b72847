"""Functions with rules of their author's, whose backward pass computes again what the forward did.

Where the gradient is taken outside of autocast, the function and each of its rules are planned
apart. Where it is taken inside, they are parts of one program.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _samples import normal
from _small import distance
from jax import lax
from jax.scipy.special import logsumexp

import mpjax

LAYERS, WIDTH = 8, 32


# -- reversible networks: the backward pass undoes each layer --------------------------------------


def branch(w, x):
    return jax.nn.gelu(x @ w["up"]) @ w["down"]


def layer(p, pair):
    a, b = pair
    a = a + branch(p["a"], b)
    return a, b + branch(p["b"], a)


def undo(p, pair):
    a, b = pair
    b = b - branch(p["b"], a)
    return a - branch(p["a"], b), b


def backward(p, state):
    """Undoes one layer, and differentiates it where it was."""
    pair, cotangent = state
    pair = undo(p, pair)
    _, pull = jax.vjp(layer, p, pair)
    grad, cotangent = pull(cotangent)
    return (pair, cotangent), grad


def scanned(step, state, layers, *, reverse=False):
    return lax.scan(lambda state, p: step(p, state), state, layers, reverse=reverse)


def unrolled(step, state, layers, *, reverse=False):
    order, made = range(LAYERS), {}
    for i in reversed(order) if reverse else order:
        one = {k: {n: w[i] for n, w in each.items()} for k, each in layers.items()}
        state, made[i] = step(one, state)
    return state, jax.tree.map(lambda *each: jnp.stack(each), *map(made.get, order))


def network(walk, layers, pair):
    return walk(lambda p, pair: (layer(p, pair), None), pair, layers)[0]


def reversible(walk):
    rule = jax.custom_vjp(lambda layers, pair: network(walk, layers, pair))

    def forward(layers, pair):
        pair = network(walk, layers, pair)
        return pair, (layers, pair)

    def back(saved, cotangent):
        layers, pair = saved
        (_, cotangent), grads = walk(backward, (pair, cotangent), layers, reverse=True)
        return grads, cotangent

    rule.defvjp(forward, back)
    return rule


def of_networks(walk):
    sides = enumerate(("a", "b"))
    weights = {
        side: {n: normal(i, LAYERS, WIDTH, WIDTH, scale=WIDTH**-0.5) for n in ("up", "down")}
        for i, side in sides
    }
    pair, target = tuple(normal(2, 2, 16, WIDTH)), normal(3, 16, WIDTH)

    def loss_of(run):
        return lambda layers: jnp.mean((run(layers, pair)[0] - target) ** 2)

    return loss_of(lambda *args: network(walk, *args)), loss_of(reversible(walk)), weights


# -- a cross-entropy that saves the normaliser, and computes the logits again ----------------------


def cross_entropy(h, w, labels):
    logits = h @ w
    picked = jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]
    return jnp.mean(logsumexp(logits, -1) - picked)


def normalised(h, w, labels):
    return cross_entropy(h, w, labels), logsumexp(h @ w, -1)


def with_wrong_shares(h, w, labels, normaliser, cotangent):
    shares = jnp.exp(h @ w - normaliser[:, None])
    wrong = (shares - jax.nn.one_hot(labels, w.shape[1])) * (cotangent / len(labels))
    return wrong @ w.T, h.T @ wrong


BLOCK = 8


def normalised_by_blocks(h, w, labels):
    """Goes through the vocabulary in blocks, as fused cross-entropies do."""

    def block(i, carry):
        most, total, picked = carry
        logits = h @ lax.dynamic_slice_in_dim(w, i * BLOCK, BLOCK, 1)
        new = jnp.maximum(most, logits.max(-1))
        total = total * jnp.exp(most - new) + jnp.exp(logits - new[:, None]).sum(-1)
        is_label = labels[:, None] == i * BLOCK + jnp.arange(BLOCK)
        return new, total, picked + jnp.where(is_label, logits, 0.0).sum(-1)

    zeros = jnp.zeros(len(h))
    start = jnp.full(len(h), -jnp.inf), zeros, zeros
    most, total, picked = lax.fori_loop(0, w.shape[1] // BLOCK, block, start)
    normaliser = most + jnp.log(total)
    return jnp.mean(normaliser - picked), normaliser


def with_wrong_shares_by_blocks(h, w, labels, normaliser, cotangent):
    def block(i, carry):
        of_h, of_w = carry
        part = lax.dynamic_slice_in_dim(w, i * BLOCK, BLOCK, 1)
        is_label = labels[:, None] == i * BLOCK + jnp.arange(BLOCK)
        shares = jnp.exp(h @ part - normaliser[:, None])
        wrong = (shares - jnp.where(is_label, 1.0, 0.0)) * (cotangent / len(labels))
        of_w = lax.dynamic_update_slice_in_dim(of_w, h.T @ wrong, i * BLOCK, 1)
        return of_h + wrong @ part.T, of_w

    return lax.fori_loop(0, w.shape[1] // BLOCK, block, (jnp.zeros_like(h), jnp.zeros_like(w)))


def of_cross_entropies(forward, backward):
    rule = jax.custom_vjp(cross_entropy)

    def saving(h, w, labels):
        loss, normaliser = forward(h, w, labels)
        return loss, (h, w, labels, normaliser)

    rule.defvjp(saving, lambda saved, cotangent: (*backward(*saved, cotangent), None))
    params = {"a": normal(0, 12, 24, scale=0.4), "w": normal(1, 24, 32, scale=4.0)}
    x, labels = normal(2, 24, 12, scale=2.0), np.random.default_rng(0).integers(32, size=24)

    def loss_of(compared):
        return lambda p: compared(jax.nn.gelu(x @ p["a"]), p["w"], labels)

    return loss_of(cross_entropy), loss_of(rule), params


PROGRAMS = {
    "a reversible network": lambda: of_networks(unrolled),
    "a reversible network in a loop": lambda: of_networks(scanned),
    "a cross-entropy": lambda: of_cross_entropies(normalised, with_wrong_shares),
    "a cross-entropy in blocks": lambda: of_cross_entropies(
        normalised_by_blocks, with_wrong_shares_by_blocks
    ),
}


def gradient(loss, params, policy=None, where="outside"):
    if policy is None:
        fun = jax.grad(loss)
    elif where == "outside":
        fun = jax.grad(mpjax.autocast(loss, policy))
    else:
        fun = mpjax.autocast(jax.grad(loss), policy)
    return jax.jit(fun)(params)


def error(grads, exact):
    return max(jax.tree.leaves(jax.tree.map(distance, grads, exact)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("where", ["outside", "inside"])
@pytest.mark.parametrize("policy", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_law_of_rules_a_function_has_the_gradient_that_it_has_without_them(name, policy, where):
    plain, ruled, params = PROGRAMS[name]()
    exact = gradient(plain, params)
    bound = 1.5 * error(gradient(plain, params, policy, where), exact)
    assert error(gradient(ruled, params, policy, where), exact) < bound


# -- an adaptive solver whose backward pass takes each step again ----------------------------------


def field(w, y):
    return jnp.tanh(y @ w["a"]) @ w["b"]


def heun(w, state):
    """Takes a step if its estimated error is small; the next one is longer, else half as long."""
    t, h, y = state
    h = jnp.minimum(h, 1.0 - t)
    first = field(w, y)
    second = field(w, y + h * first)
    is_good = jnp.abs(h / 2 * (second - first)).max() < 1e-3
    after = t + h, 1.2 * h, y + h / 2 * (first + second)
    return tuple(jnp.where(is_good, *each) for each in zip(after, (t, h / 2, y), strict=True))


def solved(w, y):
    start = jnp.float32(0.0), jnp.float32(0.1), y
    saved = jax.tree.map(lambda v: jnp.zeros((128, *v.shape)), start)

    def turn(carry):
        i, state, saved = carry
        saved = jax.tree.map(lambda all_, one: all_.at[i].set(one), saved, state)
        return i + 1, heun(w, state), saved

    return lax.while_loop(lambda c: (c[1][0] < 1) & (c[0] < 128), turn, (0, start, saved))


@jax.custom_vjp
def solve(w, y):
    return solved(w, y)[1][2]


def _solve_forward(w, y):
    turns, state, saved = solved(w, y)
    return state[2], (w, turns, saved)


def _solve_backward(of_forward, cotangent):
    w, turns, saved = of_forward

    def turn(j, carry):
        grads, cotangent = carry
        t, h, y = jax.tree.map(lambda v: v[turns - 1 - j], saved)
        _, pull = jax.vjp(lambda w, y: heun(w, (t, h, y))[2], w, y)
        grad, cotangent = pull(cotangent)
        return jax.tree.map(jnp.add, grads, grad), cotangent

    return lax.fori_loop(0, turns, turn, (jax.tree.map(jnp.zeros_like, w), cotangent))


solve.defvjp(_solve_forward, _solve_backward)


@pytest.mark.parametrize("where", ["outside", "inside"])
@pytest.mark.parametrize("policy", ["bf16-mixed", "16-mixed"])
def test_a_solver_whose_backward_pass_repeats_its_steps_accepts_the_same_ones(policy, where):
    params = {"a": normal(0, 4, 32), "b": normal(1, 32, 4, scale=1 / 3)}
    start, target = normal(2, 2, 8, 4)

    def loss(w):
        return jnp.mean((solve(w, start) - target) ** 2)

    exact = gradient(loss, params)
    assert error(gradient(loss, params, policy, where), exact) < 0.002
