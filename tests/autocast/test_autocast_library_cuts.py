"""Cuts of Flax, Equinox and Haiku at most double the error: a law, as users meet it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _small import distance

import mpjax

pytestmark = pytest.mark.no_leak_check("it traces everything anew: twice the time, same programs")

_RNG = np.random.default_rng(0)
X = _RNG.normal(size=(64, 12)).astype(np.float32)
Y = (_RNG.random((64, 1)) < 0.5).astype(np.float32)


def cross_entropy(p):
    """What makes a rounded probability infinite: it stands behind the model's boundary."""
    q = jnp.clip(p, 1e-7, 1 - 1e-7)
    return -jnp.mean(Y * jnp.log(q) + (1 - Y) * jnp.log1p(-q))


def _of_leaves(tree, probabilities):
    leaves, structure = jax.tree.flatten(tree)
    return lambda ls: cross_entropy(probabilities(jax.tree.unflatten(structure, ls))), leaves


def linen(boundary):
    nn = pytest.importorskip("flax.linen")

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.sigmoid(8 * nn.Dense(1)(nn.tanh(nn.Dense(32)(x))))

    wrap = {
        "none": lambda model: model,
        "jit": nn.jit,
        "remat": nn.remat,
        "remat that saves products": lambda model: nn.remat(
            model, policy=jax.checkpoint_policies.dots_saveable
        ),
    }[boundary]
    model = wrap(Model)()
    return _of_leaves(model.init(jax.random.key(0), X), lambda params: model.apply(params, X))


def nnx(boundary):
    of_flax = pytest.importorskip("flax.nnx")

    class Model(of_flax.Module):
        def __init__(self, rngs):
            self.up = of_flax.Linear(12, 32, rngs=rngs)
            self.down = of_flax.Linear(32, 1, rngs=rngs)

        def __call__(self, x):
            return jax.nn.sigmoid(8 * self.down(jnp.tanh(self.up(x))))

    wrap = {
        "none": lambda fun: fun,
        "jit": of_flax.jit,
        "remat": of_flax.remat,
        "vmap": lambda fun: of_flax.vmap(fun, in_axes=(None, 0)),
    }[boundary]
    graph, state = of_flax.split(Model(of_flax.Rngs(0)))
    run = wrap(lambda model, x: model(x))
    return _of_leaves(state, lambda state: run(of_flax.merge(graph, state), X))


def equinox(boundary):
    eqx = pytest.importorskip("equinox")
    wrap = {
        "none": lambda fun: fun,
        "filter_jit": eqx.filter_jit,
        "filter_checkpoint": eqx.filter_checkpoint,
    }[boundary]
    model = eqx.nn.MLP(12, 1, 32, 1, activation=jnp.tanh, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_array)
    run = wrap(lambda model, x: jax.nn.sigmoid(8 * jax.vmap(model)(x)))
    return _of_leaves(params, lambda params: run(eqx.combine(params, static), X))


def haiku(boundary):
    hk = pytest.importorskip("haiku")
    wrap = {"none": lambda fun: fun, "remat": hk.remat}[boundary]

    def model(x):
        def inner(x):
            return jax.nn.sigmoid(8 * hk.Linear(1)(jnp.tanh(hk.Linear(32)(x))))

        return wrap(inner)(x)

    made = hk.without_apply_rng(hk.transform(model))
    return _of_leaves(made.init(jax.random.key(0), X), lambda params: made.apply(params, X))


BOUNDARIES = [
    (linen, ("none", "jit", "remat", "remat that saves products")),
    (nnx, ("none", "jit", "remat", "vmap")),
    (equinox, ("none", "filter_jit", "filter_checkpoint")),
    (haiku, ("none", "remat")),
]
EPS = {"bf16-mixed": 2.0**-7, "16-mixed": 2.0**-10}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("library", "boundaries"), BOUNDARIES)
def test_law_of_cutting_a_probability_behind_a_library_s_boundary(library, boundaries):
    cases = {boundary: library(boundary) for boundary in boundaries}

    @jax.jit
    def run(given):
        return {
            (name, policy): jax.value_and_grad(fun)(given[name])
            for name, (loss, _) in cases.items()
            for policy, fun in [("", loss), *((p, mpjax.autocast(loss, p)) for p in EPS)]
        }

    found = run({name: leaves for name, (_, leaves) in cases.items()})
    for (name, policy), (got, low) in found.items():
        value, grads = found[name, ""]
        eps = EPS.get(policy, 0.0)
        assert abs(got - value) <= eps * abs(value), (name, policy)
        assert distance(low, grads) <= 2 * eps, (name, policy)
