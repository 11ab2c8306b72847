"""Invariants of a matrix that a product made, and geometry: small beside the terms they are of.

The second invariant of `g`, `(trace(g)² - trace(g²)) / 2`, is small where `g` is nearly of rank 1.
A user who casts by hand casts the operands of the product, and leaves what reads its result in
float32. The errors of autocast are compared with those of that cast, and both with float64.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mpjax

pytestmark = pytest.mark.standard_promotion("losses are run in float64 too, with float32 literals")

LOW = {"bf16-mixed": jnp.bfloat16, "16-mixed": jnp.float16}
CUTS = {
    "uncut": lambda fun: fun,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "cond": lambda fun: lambda g: lax.cond(g.ravel()[0] < 1e9, fun, fun, g),
    "scan": lambda fun: lambda g: lax.scan(lambda _, g: (0, fun(g)), 0, g[None])[1][0],
}


def _walk():
    """Atoms of a chain that is almost a line, far from the origin."""
    rng = np.random.default_rng(0)
    steps = np.array([1.4, 0.1, 0.0]) + 0.05 * rng.normal(size=(12, 3))
    return (np.cumsum(steps, 0) + 20).astype(np.float32)


def _gram(x, low=None):
    x = x - x.mean(0)
    cast = x if low is None else x.astype(low).astype(x.dtype)
    return jnp.einsum("ia,ib->ab", cast, cast)


INVARIANTS = {
    "trace(g)² - sum(g²)": lambda g, cut: cut(jnp.trace)(g) ** 2 - cut(lambda g: jnp.sum(g * g))(g),
    "sum(g²) - trace(g)²": lambda g, cut: jnp.sum(cut(jnp.square)(g)) - cut(jnp.trace)(g) ** 2,
    "trace(g)² - trace(g g)": lambda g, cut: (
        cut(jnp.trace)(g) ** 2 - cut(lambda g: jnp.trace(g @ g))(g)
    ),
    "trace(g) - norm(g)": lambda g, cut: cut(jnp.trace)(g) - cut(jnp.linalg.norm)(g),
    "1 - a purity": lambda g, cut: 1 - cut(lambda g: jnp.sum(g * g))(g) / cut(jnp.trace)(g) ** 2,
    "a participation ratio - 1": lambda g, cut: cut(jnp.trace)(g) ** 2 / cut(jnp.sum)(g**2) - 1,
    "a determinant": lambda g, cut: cut(lambda g: g[0, 0] * g[1, 1] - g[0, 1] ** 2)(g),
}


def _both(fun, x):
    return [np.asarray(a, np.float64) for a in jax.jit(jax.value_and_grad(fun))(x)]


def _errors(got, right):
    return [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(got, right, strict=True)]


@functools.cache
def _uncut(name, low=None):
    """In float64, of a product of what was cast to `low`."""
    loss = lambda x: INVARIANTS[name](_gram(x, low), CUTS["uncut"])  # noqa: E731
    with jax.enable_x64(True):
        return _both(loss, _walk().astype(np.float64))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", LOW)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", INVARIANTS)
def test_law_of_invariants_the_errors_are_those_of_a_product_cast_by_hand(name, cut, policy):
    loss = lambda x: INVARIANTS[name](_gram(x), CUTS[cut])  # noqa: E731
    autocast = _both(mpjax.autocast(loss, policy), _walk())
    got, hand = (_errors(a, _uncut(name)) for a in (autocast, _uncut(name, LOW[policy])))
    assert all(a <= 2 * max(b, 2**-7) for a, b in zip(got, hand, strict=True)), (got, hand)


def test_a_norm_of_a_network_that_is_written_so_stays_low():
    """`mean(h²) - mean(h)²`, between two products, as Flax writes batch and layer norms."""

    def network(x, w, v):
        h = x @ w
        mean = h.mean(-1, keepdims=True)
        variance = (h * h).mean(-1, keepdims=True) - mean**2
        return jnp.sum(((h - mean) * lax.rsqrt(variance + 1e-5)) @ v)

    x, w, v = jnp.ones((32, 16)), jnp.ones((16, 16)), jnp.ones((16, 16))
    rows = mpjax.explain(network, "bf16-mixed")(x, w, v).rows
    assert [r.dtype for r in rows if r.operation == "dot_general"] == ["bf16"]


# -- geometry --------------------------------------------------------------------------------------


def _cosine(a, b):
    return jnp.dot(a, b) / (jnp.linalg.norm(a) + 1e-7) / (jnp.linalg.norm(b) + 1e-7)


def _cosines(x):
    """Of the angles between the bonds of each atom, as simulations of molecules vectorize it."""
    bonds = x[:, None] - x[None] + 10.0 * jnp.eye(len(x), dtype=x.dtype)[..., None]
    return jax.vmap(jax.vmap(jax.vmap(_cosine, (0, None)), (None, 0)))(bonds, bonds)


def _turned(x):
    c, s = jnp.cos(jnp.sum(x[0]) * 0 + 0.3), jnp.sin(0.3)
    moved = x @ jnp.array([[c, -s, 0], [s, c, 0], [0, 0, 1]]).astype(x.dtype).T
    return jnp.sum(jnp.sqrt(jnp.sum((moved[:, None] - moved[None]) ** 2, -1) + 0.01))


def _strained(x):
    deformed = x[:9].reshape(3, 3, 3) / 4
    return jnp.sum((jnp.einsum("nki,nkj->nij", deformed, deformed) - jnp.eye(3)) ** 2)


def _volumes(x):
    a, b, c = x[:4], x[4:8], x[8:]
    return jnp.sum(jnp.einsum("ni,ni->n", a, jnp.cross(b, c)) ** 2)


ENERGIES = {
    "angles": lambda x: jnp.sum((jnp.arccos(0.999999 * _cosines(x)) - 1.9) ** 2),
    "logarithms of angles": lambda x: jnp.sum(jnp.log(1.001 - _cosines(x))),
    "cosines": lambda x: jnp.sum((_cosines(x) + 1 / 3) ** 2),
    "turned distances": _turned,
    "a strain": _strained,
    "volumes": _volumes,
    "a covariance": lambda x: jnp.sum(jnp.linalg.inv(jnp.cov(x.T) + jnp.eye(3))),
}


@pytest.mark.parametrize("policy", LOW)
@pytest.mark.parametrize("name", ENERGIES)
def test_law_of_geometry_forces_inside_and_outside_are_those_of_float32(name, policy):
    energy, x = ENERGIES[name], np.random.default_rng(0).uniform(0, 8, (12, 3)).astype(np.float32)
    right = jax.jit(jax.grad(energy))(x)
    for forces in (
        jax.grad(mpjax.autocast(energy, policy)),
        mpjax.autocast(jax.grad(energy), policy),
    ):
        got = jax.jit(forces)(x)
        assert np.linalg.norm(got - right) < 1e-4 * np.linalg.norm(right)
