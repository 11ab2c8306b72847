"""Gathers by a permutation: their cotangents are no sums, and low; those of other indices are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _differential import equations
from _samples import normal
from _small import BF16, distance, together
from jax import lax

from mpjax import autocast

COUNT = 512
X = normal(0, COUNT, 16)
W = normal(1, 16, 16, scale=1 / 4)
EXPERTS = jnp.asarray(np.arange(COUNT, dtype=np.int32) * 7 % 5)


def sorted_pair(x):
    return x[lax.sort((EXPERTS, jnp.arange(COUNT)), num_keys=1)[1]]


def routed(x):
    """Each token goes to two experts, and back."""
    order = jnp.argsort(jnp.concatenate([EXPERTS, 4 - EXPERTS]))
    return jnp.repeat(x, 2, axis=0)[order][jnp.argsort(order)][::2]


ONCE = {
    "argsort": lambda x: x[jnp.argsort(EXPERTS)],
    "descending": lambda x: x[jnp.argsort(-EXPERTS)],
    "inverse": lambda x: x[jnp.argsort(jnp.argsort(EXPERTS))],
    "take": lambda x: jnp.take(x, jnp.argsort(EXPERTS), axis=0),
    "columns": lambda x: x[:, jnp.argsort(EXPERTS[:16])],
    "a sorted pair": sorted_pair,
    "in a jit": lambda x: jax.jit(lambda x: x[jnp.argsort(EXPERTS)])(x),
    "in a checkpoint": jax.checkpoint(lambda x: x[jnp.argsort(EXPERTS)]),
    "in a branch": lambda x: lax.cond(x[0, 0] > 0, lambda x: x[jnp.argsort(EXPERTS)], jnp.abs, x),
    "routed": routed,
    "typed": lambda x: x.at[jnp.flip(jnp.arange(COUNT))].get(unique_indices=True),
}
OFTEN = {
    "keys": lambda x: x[EXPERTS],
    "sorted keys": lambda x: x[jnp.sort(EXPERTS)],
    "halved": lambda x: x[jnp.argsort(EXPERTS) // 2],
    "shifted": lambda x: x[jnp.argsort(EXPERTS) + 1],
    "bytes": lambda x: x[jnp.argsort(EXPERTS).astype(jnp.uint8)],
    "past the end": lambda x: x[: COUNT // 2].at[jnp.argsort(EXPERTS)].get(mode="clip"),
}


def gradient(fun, form=lambda f: f):
    return jax.grad(lambda x, w: jnp.sum(jnp.sin(form(lambda x, w: fun(x @ w) @ w)(x, w))), (0, 1))


def low(fun):
    return autocast(fun, "bf16-mixed")


@pytest.mark.parametrize("name", ONCE | OFTEN)
def test_the_cotangent_of_a_gather_is_low_where_it_is_no_sum(name):
    fun = (ONCE | OFTEN)[name]
    found = equations(jax.make_jaxpr(gradient(fun, low))(X, W))
    scatters = [eqn for eqn in found if eqn.primitive.name.startswith("scatter")]
    dtypes = {eqn.invars[2].aval.dtype.name for eqn in scatters}
    assert dtypes == {"bfloat16" if name in ONCE else "float32"}


def test_the_gradient_of_a_gather_is_that_of_the_program():
    def both(fun):
        return lambda *args: [gradient(fun, form)(*args) for form in (low, lambda f: f)]

    found = together({name: both(fun) for name, fun in (ONCE | OFTEN).items()}, X, W)
    for name, (got, want) in found.items():
        assert distance(got, want) < 16 * BF16, name
