"""Similarities: a loss's product of two values that products made, whose rows a softmax reads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _cuts import AROUND, cuts_in_turn, in_turn
from _metamorphic import DTYPES, POLICIES
from _small import check_all, each_inside_and_outside
from jax import lax

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


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("policy", "most"), [("bf16-mixed", 0.045), ("16-mixed", 0.006)])
def test_law_of_similarities_a_softmax_reads_them_as_they_were_added_up(policy, most, name):
    funs = {cut: _loss(name, cut) for cut in cuts_in_turn((LOSSES, name))}
    right = jax.grad(funs["uncut"])(W, X, Y)
    for where, got in each_inside_and_outside(jax.grad, funs, policy, W, X, Y):
        assert np.linalg.norm(got - right) < most * np.linalg.norm(right), where


# Ways to pick the one with most hits: a softmax so sharp that the largest count takes all.
PICKED = {
    "softmax": lambda c: jax.nn.softmax(1e3 * c),
    "softmax, divided": lambda c: jax.nn.softmax(c / 1e-3),
    "softmax over columns": lambda c: jax.nn.softmax(500.0 * c.T, axis=0).T,
    "of masked": lambda c: jax.nn.softmax(jnp.where(c > 1, 1e3 * c, -1e9)),
    "with a bias": lambda c: jax.nn.softmax(1e3 * c + 0.5),
    "log_softmax": lambda c: jnp.exp(jax.nn.log_softmax(1e3 * c)),
    "written out": lambda c: jnp.exp(100 * c - jnp.max(100 * c, -1, keepdims=True)),
    "a nearest neighbour": lambda c: jax.nn.softmax(-1e3 * (400 - c)),
}
OF_NUMBERS = {**PICKED, "a softmax of counts": jax.nn.softmax}
"""The same of one-hot rows that the function makes of integers: it knows that they are exact."""
ROWS = _RNG.integers(0, 4, size=(1, 400))
SEEN = np.where(_RNG.random((24, 400)) < 0.1, (ROWS + 1) % 4, ROWS)
"""Rows that agree in 300 to 340 of 400 places: bfloat16 holds even numbers there."""


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("picked", "of_numbers"), [(p, False) for p in PICKED] + [(p, True) for p in OF_NUMBERS]
)
def test_law_of_similarities_a_sharp_softmax_reads_counts_as_they_were_added_up(picked, of_numbers):
    def fun(cut):
        def weighted(a, b, values):
            if of_numbers:
                a, b = (jax.nn.one_hot(x, 4) for x in (a, b))
            counts = AROUND[cut](lambda a, b: jnp.einsum("irc,jrc->ij", a, b))(a, b)
            return OF_NUMBERS[picked](counts) @ values

        return weighted

    a, b = SEEN[:12], SEEN[12:]
    args = (a, b) if of_numbers else [np.eye(4, dtype=np.float32)[x] for x in (a, b)]
    values = np.sign(_RNG.normal(size=(12, 8))).astype(np.float32)  # exact in 16 bits
    funs = {cut: fun(cut) for cut in AROUND}
    check_all(funs, "bf16-mixed", *args, values, rtol=1e-7, atol=2**-7)


# The same by a temperature that is learnt: nothing says how large it is.
TEMPERATURES = {
    "multiplied": (lambda c, t: c * t, 1e3),
    "divided": (lambda c, t: c / t, 1e-3),
    "an exponential": (lambda c, t: c * jnp.exp(jnp.minimum(t, 7.0)), 7.0),
    "a softplus": (lambda c, t: c * jax.nn.softplus(t), 1e3),
    "one for each row": (lambda c, t: c * (t * jnp.ones(12))[:, None], 1e3),
    "with a mask": (lambda c, t: jnp.where(c > 1, c * t, -1e9), 1e3),
}


@pytest.mark.parametrize("scaled", TEMPERATURES)
def test_law_of_similarities_a_softmax_with_a_learnt_temperature_may_be_sharp(scaled):
    scale, temperature = TEMPERATURES[scaled]

    def fun(cut):
        def weighted(a, b, values, t):
            counts = AROUND[cut](lambda a, b: jnp.einsum("irc,jrc->ij", a, b))(a, b)
            return AROUND[cut](lambda c, t: jax.nn.softmax(scale(c, t)))(counts, t) @ values

        return weighted

    args = [np.eye(4, dtype=np.float32)[x] for x in (SEEN[:12], SEEN[12:])]
    values = np.sign(_RNG.normal(size=(12, 8))).astype(np.float32)  # exact in 16 bits
    funs = {cut: fun(cut) for cut in AROUND}
    check_all(funs, "bf16-mixed", *args, values, jnp.float32(temperature), rtol=1e-7, atol=2**-7)


def _cosines(a, b):
    return (a * b).sum(-1)


# Unit vectors, as people write them, and what a loss reads of two that are nearly the same.
UNITS = {
    "by rsqrt": lambda z: z * lax.rsqrt((z * z).sum(-1, keepdims=True) + 1e-8),
    "by sqrt": lambda z: z / jnp.sqrt((z * z).sum(-1, keepdims=True) + 1e-8),
    "by a norm": lambda z: z / jnp.maximum(jnp.linalg.norm(z, axis=-1, keepdims=True), 1e-12),
}
OF_TWO_VIEWS = {
    "distances": lambda a, b, w: jnp.mean(1 - _cosines(a, b)),
    "a distance": lambda a, b, w: 1 - jnp.mean(_cosines(a, b)),
    "cosines": lambda a, b, w: -jnp.mean(_cosines(a, b)),
    "by einsum": lambda a, b, w: 1 - jnp.mean(jnp.einsum("nd,nd->n", a, b)),
    "beside a layer": lambda a, b, w: jnp.mean(1 - _cosines(a, b) + 1e-3 * jnp.tanh(a @ w.T)[:, 0]),
    "angles beside a layer": lambda a, b, w: jnp.mean(
        jnp.arccos(jnp.clip(_cosines(a, b), -1, 1)) + 1e-2 * jnp.tanh(a @ w.T)[:, 0]
    ),
}
NEAR = (X + 0.02 * _RNG.normal(size=X.shape)).astype(np.float32)


def _of_views(unit, loss, cut, low=jnp.float32):
    def fun(w, x, y):
        def view(x):
            z = jnp.matmul(x.astype(low), w.astype(low), preferred_element_type=jnp.float32)
            return UNITS[unit](z)

        view = AROUND[cut](view)
        return 1024 * OF_TWO_VIEWS[loss](view(x), view(y), w)  # as a loss scale, for float16

    return fun


def _right_and_least_of_views(loss, low):
    """The gradient of a loss, and the error where nothing but operands is rounded."""
    right, least = (jax.grad(_of_views("by rsqrt", loss, "uncut", d)) for d in (jnp.float32, low))
    right, least = right(W, X, NEAR), least(W, X, NEAR)
    return right, np.linalg.norm(least - right)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("loss", OF_TWO_VIEWS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_law_of_cotangents_each_is_as_its_value_also_behind_a_norm(dtype, loss):
    """Distances are read unrounded, so that of a norm's result neither it nor its cotangent is.

    Its derivative takes off what is along the result: here, nearly all of the cotangent.
    """
    cuts = cuts_in_turn((OF_TWO_VIEWS, loss), (DTYPES, dtype))
    units = {cut: in_turn(UNITS, (OF_TWO_VIEWS, loss), (AROUND, cut)) for cut in cuts}
    funs = {cut: _of_views(unit, loss, cut) for cut, unit in units.items()}
    right, least = _right_and_least_of_views(loss, DTYPES[dtype])
    for where, got in each_inside_and_outside(jax.grad, funs, POLICIES[dtype], W, X, NEAR):
        assert np.linalg.norm(got - right) < 1.5 * least, where


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
