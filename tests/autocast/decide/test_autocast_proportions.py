"""Small values under float16: of what a logarithm, a root or a division reads, digits count."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _cuts import AROUND, cuts_in_turn
from _samples import normal
from _small import each_inside_and_outside, products

import mpjax

X = normal(0, 32, 16)
W = normal(1, 16, 24, scale=0.5)
V = normal(2, 24, 24)
WORDS = normal(3, 24, 200, scale=8.0)


def _small(x, w):
    """Chances of a few millionths of a millionth."""
    return jax.nn.sigmoid(2 * x @ w - 25)


def _of_chances(read, weigh=_small):
    """What reads a product of chances by positive weights."""

    def made(cut):
        def loss(x, w, v):
            chances = cut(weigh)(x, w)
            mixed = cut(lambda p, v: p @ v)(chances, abs(v))
            return jnp.mean(cut(read)(mixed))

        return loss

    return made


def _topic_model(cut):
    def loss(x, w, v):
        mixtures, topics = jax.nn.softmax(x @ w), cut(jax.nn.softmax)(v @ WORDS)
        return -jnp.mean(cut(jnp.log)(cut(jnp.matmul)(mixtures, topics)))

    return loss


def _hidden_states(cut):
    """The forward algorithm, its steps normalised at the end alone."""

    def loss(x, w, v):
        seen = cut(lambda x, w: jax.nn.sigmoid(x @ w - 3))(x[:4], w)
        moves = jax.nn.softmax(v)
        alpha = jnp.ones(24) / 24
        for row in seen:
            alpha = cut(lambda a, m: a @ m)(alpha, moves) * row
        return -jnp.log(alpha.sum())

    return loss


def _factors(cut):
    """A step of a non-negative matrix factorisation."""

    def loss(x, w, v):
        h, made = _small(x, w), abs(v)
        ratio = abs(x[:, :1]) * h / (cut(lambda h, m: h @ m)(h, made) + 1e-20)
        return jnp.mean(cut(lambda r, m: r @ m.T)(ratio, made))

    return loss


def _scanned(cut):
    def loss(x, w, v):
        def turn(chances, _):
            return cut(lambda c, v: c @ jax.nn.softmax(v))(chances, v), chances.sum(1)

        last, sums = jax.lax.scan(turn, _small(x, w), None, length=4)
        return jnp.mean(jnp.log(last)) + jnp.mean(jnp.log(sums))

    return loss


FORMS = {
    "a topic model": _topic_model,
    "states that a logarithm reads at the end": _hidden_states,
    "a factorisation": _factors,
    "chances that a scan mixes": _scanned,
    "a logarithm": _of_chances(jnp.log),
    "to the base of 10": _of_chances(jnp.log10),
    "of what is limited": _of_chances(lambda y: jnp.log(jnp.maximum(y, 1e-20))),
    "of a sum with a tiny number": _of_chances(lambda y: jnp.log(y + 1e-30)),
    "of a running sum": _of_chances(lambda y: jnp.log(jnp.cumsum(y, -1))),
    "of shares": _of_chances(lambda y: jnp.log(y / y.sum(-1, keepdims=True))),
    "of a square": _of_chances(lambda y: jnp.log(y**2 + 1e-36)),
    "of the chance of none": _of_chances(lambda y: jnp.log(-jnp.expm1(-y))),
    "of another product": _of_chances(lambda y: jnp.log(y @ abs(V))),
    "a root": _of_chances(jnp.sqrt),
    "a power": _of_chances(lambda y: y**0.1),
    "a quotient": _of_chances(lambda y: 1e-9 / y),
    "the inverse of a square": _of_chances(lambda y: 1e-20 * y**-2),
    "a reciprocal": _of_chances(lambda y: jnp.reciprocal(y) * 1e-9),
    "of a rational function": _of_chances(jnp.log, lambda x, w: 1 / (1 + (x @ w + 20) ** 4) ** 2),
    "of a softplus": _of_chances(jnp.log, lambda x, w: jax.nn.softplus(x @ w - 22)),
    "of the tail of a normal": _of_chances(jnp.log, lambda x, w: jax.lax.erfc(abs(x @ w) / 4 + 3)),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FORMS)
def test_law_of_proportions_float16_keeps_the_digits_of_small_values(name):
    taken = functools.partial(jax.value_and_grad, argnums=(0, 1, 2))
    right = taken(FORMS[name](AROUND["uncut"]))(X, W, V)
    funs = {cut: FORMS[name](AROUND[cut]) for cut in cuts_in_turn((FORMS, name))}
    for where, got in each_inside_and_outside(taken, funs, "16-mixed", X, W, V):
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(right), strict=True):
            assert np.linalg.norm(a - b) < 0.01 * np.linalg.norm(b), where


def test_a_quotient_by_a_small_value_that_a_boundary_stores_is_right():
    def loss(cut):
        return lambda x, w, v: jnp.mean(1e-9 / cut(jax.nn.sigmoid)(x @ w - 18) @ v)

    right = loss(AROUND["uncut"])(X, W, V)
    for cut in AROUND:
        got = mpjax.autocast(loss(AROUND[cut]), "16-mixed")(X, W, V)
        np.testing.assert_allclose(got, right, rtol=1e-2, err_msg=cut)


# Layers, and what they divide by: no element of these is small beside its row.
LAYERS = {
    "by the length": lambda h: h / jnp.linalg.norm(h, axis=-1, keepdims=True),
    "by the root of a mean square": lambda h: (
        h * jax.lax.rsqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-6)
    ),
    "by one over a root": lambda h: h * (1 / jnp.sqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-6)),
    "by a power": lambda h: h * (jnp.mean(h**2, -1, keepdims=True) + 1e-6) ** -0.5,
    "by a spread": lambda h: (h - h.mean()) / (h.std() + 1e-5),
    "by the largest": lambda h: h / (jnp.max(abs(h), -1, keepdims=True) + 1e-9),
    "by a step of integers": lambda h: jnp.round(h / (jnp.max(abs(h)) / 127)) * 0.01,
    "by a sum": lambda h: abs(h) / jnp.sum(abs(h), -1, keepdims=True),
    "by 1 and more": lambda h: h / (1 + abs(h)),
    "by a softplus": lambda h: h / (jax.nn.softplus(h[:, ::-1]) + 1e-3),
    "by a softmax": jax.nn.softmax,
    "by a layer norm": lambda h: jax.nn.standardize(h, epsilon=1e-6),
}


@pytest.mark.parametrize("taken", [lambda f: f, lambda f: jax.grad(f, (0, 1))], ids=["", "grad"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_that_a_norm_divides_are_low(name, taken):
    def loss(x, w):
        h = jax.nn.silu(x @ w)
        return jnp.mean((LAYERS[name](h @ V) @ V) ** 2)

    dtypes = products(mpjax.autocast(taken(loss), "16-mixed"), X, W)
    assert set(dtypes) == {"float16"}


def test_bfloat16_holds_small_values_and_explain_says_why_float16_does_not():
    topics = _topic_model(AROUND["uncut"])
    dtypes = {
        policy: [r for r in mpjax.explain(topics, policy)(X, W, V).rows if "dot" in r.operation]
        for policy in ("bf16-mixed", "16-mixed")
    }
    assert {r.dtype for r in dtypes["bf16-mixed"]} == {"bf16"}
    (kept,) = [r for r in dtypes["16-mixed"] if r.dtype == "f32"]
    assert "a logarithm, a root or a division reads it" in str(kept.reason)
