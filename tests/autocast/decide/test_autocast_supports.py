"""Expected values: chances times numbers, such as places, prices or a support of returns.

Wherever the numbers come from, and on whichever side of the product they stand, a loss that reads
an expected value is as right as one of a network that is cast by hand.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mpjax

pytestmark = pytest.mark.standard_promotion("losses are run in float64 too, with float32 arrays")
_RNG = np.random.default_rng(0)
COUNT = 64
X = _RNG.normal(size=(32, 16)).astype(np.float32)
W = (0.1 * _RNG.normal(size=(16, COUNT))).astype(np.float32)
LOW = {"bf16-mixed": jnp.bfloat16, "16-mixed": jnp.float16}
_PLACES = np.arange(COUNT, dtype=np.float32)
_RETURNS = np.linspace(-10, 30, COUNT, dtype=np.float32)
_PRICES = (1e4 + 30 * _RNG.normal(size=COUNT)).astype(np.float32)
_ON_A_DEVICE = [jnp.asarray(c) for c in (_PLACES, _RETURNS, _PRICES)]

SUPPORTS = {  # in float64, and as a program has them
    "places, by NumPy": (_PLACES, lambda: _PLACES),
    "places, on a device": (_PLACES, lambda: _ON_A_DEVICE[0]),
    "places, in the function": (_PLACES, lambda: jnp.arange(float(COUNT))),
    "places, of integers": (_PLACES, lambda: jnp.arange(COUNT)),
    "centred places": (_PLACES - 31.5, lambda: jnp.arange(COUNT) - (COUNT - 1) / 2),
    "returns, by NumPy": (_RETURNS, lambda: _RETURNS),
    "returns, on a device": (_RETURNS, lambda: _ON_A_DEVICE[1]),
    "returns, in the function": (_RETURNS, lambda: jnp.linspace(-10, 30, COUNT)),
    "returns, scaled": (2 * _RETURNS + 1, lambda: 2 * _ON_A_DEVICE[1] + 1),
    "prices, on a device": (_PRICES, lambda: _ON_A_DEVICE[2]),
}
FORMS = {
    "on the right": lambda p, c: p @ c,
    "on the left": lambda p, c: c @ p.T,
    "one by one": lambda p, c: jax.vmap(lambda q: jnp.dot(c, q))(p),
    "a column beside others": lambda p, c: (p @ jnp.stack([c, c / 2, 0 * c], -1))[:, 0],
    "by sum": lambda p, c: jnp.sum(p * c, -1),
}
CUTS = {
    "uncut": lambda fun: fun,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": lambda fun: lambda p, c: lax.scan(lambda _, p: (0, fun(p, c)), 0, p[None])[1][0],
    "cond": lambda fun: lambda p, c: lax.cond(p.sum() < 1e9, fun, fun, p, c),
}

PAIRS = [(form, "uncut") for form in FORMS] + list(zip(FORMS, list(CUTS)[1:], strict=False))


def _loss(w, x, support, form, target, low=None):
    z = x @ w if low is None else (x.astype(low) @ w.astype(low)).astype(x.dtype)
    return jnp.mean(
        (form(jax.nn.softmax(z), support().astype(w.dtype)) - target.astype(w.dtype)) ** 2
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", LOW)
@pytest.mark.parametrize(("form", "cut"), PAIRS)
@pytest.mark.parametrize("name", SUPPORTS)
def test_law_of_supports_the_errors_are_those_of_a_network_cast_by_hand(name, form, cut, policy):
    values, support = SUPPORTS[name]
    logits = X.astype(np.float64) @ W
    chances = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    spread = np.ptp(values) / 2000  # what is left of the error of a trained model
    target = chances @ values + spread * np.random.default_rng(1).normal(size=len(X))

    def gradient(fun, w, x):
        return np.asarray(jax.jit(jax.grad(fun))(w, x), np.float64)

    def loss(w, x, low=None, cut=CUTS[cut]):
        return _loss(w, x, support, cut(FORMS[form]), target, low)

    def by_hand(w, x):
        return loss(w, x, LOW[policy], CUTS["uncut"])

    with jax.enable_x64(True):
        as_it_is = lambda p, c: FORMS[form](p, jnp.asarray(values, jnp.float64) + 0 * c)  # noqa: E731
        right = gradient(
            lambda w, x: _loss(w, x, support, as_it_is, target), *map(jnp.float64, (W, X))
        )
    hand, got = (
        np.linalg.norm(gradient(fun, W, X) - right) / np.linalg.norm(right)
        for fun in (by_hand, mpjax.autocast(loss, policy))
    )
    assert got <= 2 * max(hand, 2**-7), (got, hand)


WEIGHTS = {
    "a softmax": jax.nn.softmax,
    "one by hand": lambda z: jnp.exp(z) / jnp.exp(z).sum(-1, keepdims=True),
    "of a log softmax": lambda z: jnp.exp(jax.nn.log_softmax(z)),
    "one-hot rows": lambda z: jax.nn.one_hot(np.arange(len(X)) * 7 % COUNT, COUNT, dtype=z.dtype),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", LOW)
@pytest.mark.parametrize(("form", "cut"), PAIRS)
@pytest.mark.parametrize("name", WEIGHTS)
def test_law_of_supports_numbers_that_are_given_are_as_right(name, form, cut, policy):
    weigh = WEIGHTS[name]

    def loss(w, x, prices, target, low=None, cut=CUTS[cut]):
        z = x @ w if low is None else (x.astype(low) @ w.astype(low)).astype(x.dtype)
        return jnp.mean((cut(FORMS[form])(weigh(z), prices) + 0.1 * z[:, 0] - target) ** 2)

    def errors(fun, right):
        got = jax.jit(jax.grad(fun))(W, X, _PRICES, target)
        return np.linalg.norm(got - right) / np.linalg.norm(right)

    with jax.enable_x64(True):
        w, x, prices = (jnp.asarray(a, jnp.float64) for a in (W, X, _PRICES))
        exact = weigh(x @ w) @ prices + 0.1 * (x @ w)[:, 0]
        target = np.asarray(exact + 0.05 * np.random.default_rng(1).normal(size=len(X)), np.float32)
        right = np.asarray(jax.jit(jax.grad(loss))(w, x, prices, target.astype(np.float64)))
    hand = errors(lambda *args: loss(*args, LOW[policy], CUTS["uncut"]), right)
    assert errors(mpjax.autocast(loss, policy), right) <= 2 * max(hand, 2**-7)
