"""Expected values: chances times numbers, such as places, prices or a support of returns.

Wherever the numbers come from, and on whichever side of the product they stand, a loss that reads
an expected value is as right as one of a network that is cast by hand.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _small import together
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


def _cases(names, name):
    """The forms and cuts of one of some names, under one policy and the other in turn."""
    first = list(names).index(name)
    return [(*pair, list(LOW)[(first + i) % 2]) for i, pair in enumerate(PAIRS)]


def _loss(w, x, support, form, target, low=None):
    z = x @ w if low is None else (x.astype(low) @ w.astype(low)).astype(x.dtype)
    return jnp.mean(
        (form(jax.nn.softmax(z), support().astype(w.dtype)) - target.astype(w.dtype)) ** 2
    )


def _gradients(losses, *args):
    """The gradients of losses by name, compiled as one program."""
    taken = together({name: jax.grad(loss) for name, loss in losses.items()}, *args)
    return {name: np.asarray(x, np.float64) for name, x in taken.items()}


def _check(cases, loss_of, right, *args):
    """Holds the errors of cases, `(form, cut, policy)`, to those of `(form, policy)` by hand."""
    losses = {}
    for form, cut, policy in cases:
        losses[form, cut, policy] = mpjax.autocast(loss_of(form, cut), policy)
        losses[form, policy] = loss_of(form, low=LOW[policy])
    taken = _gradients(losses, *args)

    def error(key):
        want = right[key[0]]
        return np.linalg.norm(taken[key] - want) / np.linalg.norm(want)

    for form, cut, policy in cases:
        hand = error((form, policy))
        assert error((form, cut, policy)) <= 2 * max(hand, 2**-7), (form, cut, policy, hand)


def _target(name):
    values, _ = SUPPORTS[name]
    logits = X.astype(np.float64) @ W
    chances = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    spread = np.ptp(values) / 2000  # what is left of the error of a trained model
    return chances @ values + spread * np.random.default_rng(1).normal(size=len(X))


def _of_support(name, form, cut="uncut", low=None):
    _, support = SUPPORTS[name]
    target = _target(name)
    return lambda w, x: _loss(w, x, support, CUTS[cut](FORMS[form]), target, low)


def _right(name):
    values, _ = SUPPORTS[name]
    with jax.enable_x64(True):
        as_it_is = lambda fun: lambda p, c: fun(p, jnp.asarray(values, jnp.float64) + 0 * c)  # noqa: E731
        losses = {
            form: functools.partial(
                _loss, support=SUPPORTS[name][1], form=as_it_is(fun), target=_target(name)
            )
            for form, fun in FORMS.items()
        }
        return _gradients(losses, *map(jnp.float64, (W, X)))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SUPPORTS)
def test_law_of_supports_the_errors_are_those_of_a_network_cast_by_hand(name):
    loss_of = functools.partial(_of_support, name)
    _check(_cases(SUPPORTS, name), loss_of, _right(name), W, X)


WEIGHTS = {
    "a softmax": jax.nn.softmax,
    "one by hand": lambda z: jnp.exp(z) / jnp.exp(z).sum(-1, keepdims=True),
    "of a log softmax": lambda z: jnp.exp(jax.nn.log_softmax(z)),
    "one-hot rows": lambda z: jax.nn.one_hot(np.arange(len(X)) * 7 % COUNT, COUNT, dtype=z.dtype),
}


def _weighted(name, form, cut="uncut", low=None):
    def loss(w, x, prices, target):
        z = x @ w if low is None else (x.astype(low) @ w.astype(low)).astype(x.dtype)
        chosen = CUTS[cut](FORMS[form])(WEIGHTS[name](z), prices)
        return jnp.mean((chosen + 0.1 * z[:, 0] - target) ** 2)

    return loss


def _right_weighted(name):
    """Returns a target, and the gradients of the losses in float64."""
    noise = 0.05 * np.random.default_rng(1).normal(size=len(X))
    with jax.enable_x64(True):
        w, x, prices = (jnp.asarray(a, jnp.float64) for a in (W, X, _PRICES))
        exact = WEIGHTS[name](x @ w) @ prices + 0.1 * (x @ w)[:, 0]
        target = np.asarray(exact + noise, np.float32)
        losses = {form: _weighted(name, form) for form in FORMS}
        return target, _gradients(losses, w, x, prices, target.astype(np.float64))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", WEIGHTS)
def test_law_of_supports_numbers_that_are_given_are_as_right(name):
    target, right = _right_weighted(name)
    loss_of = functools.partial(_weighted, name)
    _check(_cases(WEIGHTS, name), loss_of, right, W, X, _PRICES, target)
