"""Arrays that a program closes over: what is read off their numbers, and what is not."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from benchmarks.networks import NETWORKS
from mpjax._autocast.known import arrays
from mpjax._autocast.known.fact_flags import AMOUNTS, ASSEMBLED, EITHER, NEGATED, STENCIL
from mpjax._autocast.known.ranges import OUTSIDE

_RNG = np.random.default_rng(0)


def _counts(table):
    counts = collections.Counter()
    for row in table.rows:
        counts[row.operation, row.dtype] += row.count
    return counts


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NETWORKS)
def test_law_of_closures_a_network_that_closes_over_its_parameters_is_as_one_that_takes_them(name):
    network = NETWORKS[name]("tiny")
    params, batch = network.params, network.batch

    def trained(leaf):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.zeros(leaf.shape, leaf.dtype)
        values = (leaf.ndim < 2) + 0.05 * _RNG.normal(size=leaf.shape)
        return jnp.asarray(values, leaf.dtype)

    taken = _counts(mpjax.explain(network.loss, "bf16-mixed")(params, batch))
    held = jax.tree.map(trained, params)
    assert _counts(mpjax.explain(lambda b: network.loss(held, b), "bf16-mixed")(batch)) == taken


def _normal(*shape):
    return _RNG.normal(size=shape).astype(np.float32)


ARRAYS = {
    "weights": (_normal(8, 4), 0),
    "a trained bias": (_normal(8), 0),
    "an initial bias": (np.zeros(8), 0),
    "an initial scale": (np.ones(8), 0),
    "an initial bias below 0": (np.full(8, -4.6), 0),
    "minus one": (np.full(3, -1.0), NEGATED),
    "places": (np.arange(8.0), AMOUNTS | ASSEMBLED),
    "centred places": (np.arange(8.0) - 3.5, AMOUNTS | STENCIL | EITHER),
    "returns": (np.linspace(-10, 30, 51, dtype=np.float32), AMOUNTS | EITHER),
    "prices": (np.abs(_normal(8)) * 30 + 2, AMOUNTS),
    "a rotation": (
        np.array([[np.cos(1), -np.sin(1), 0], [np.sin(1), np.cos(1), 0], [0, 0, 1]]),
        AMOUNTS | ASSEMBLED | EITHER,
    ),
    "a camera": (np.array([[1000, 0, 960], [0, 1000, 540.5], [0, 0, 1]]), AMOUNTS | ASSEMBLED),
    "a Laplacian": (np.array([1.0, -2.0, 1.0]), AMOUNTS | STENCIL | EITHER),
    "one of a graph": (3 * np.eye(3) - np.ones((3, 3)), AMOUNTS | STENCIL | EITHER),
    "colours": (
        np.array([[0.299, 0.587, 0.114], [-0.169, -0.331, 0.5], [0.5, -0.419, -0.081]]),
        STENCIL | EITHER,
    ),
    "a turn in space": (np.linalg.qr(_normal(3, 3))[0], ASSEMBLED),
    "slopes of neighbours": (
        np.eye(3, 4, 1) - np.eye(3, 4),
        AMOUNTS | ASSEMBLED | STENCIL | EITHER,
    ),
    "a turn by 90 degrees": (np.array([[0.0, 1.0], [-1.0, 0.0]]), AMOUNTS | ASSEMBLED | EITHER),
    "signs": (np.diag([1.0, -1.0]), AMOUNTS | ASSEMBLED | EITHER),
    "a slope of three": (np.array([-1.5, 2.0, -0.5]), STENCIL | EITHER),
    "a derivative of a bell": (
        np.outer(np.exp(-(np.arange(-15, 16) ** 2) / 50.0), np.arange(-15, 16)),
        AMOUNTS | ASSEMBLED | STENCIL | EITHER,
    ),
    "one that is infinite": (np.array([1, np.inf]), 0),
    "many places": (np.arange(1e5), {np.asarray: AMOUNTS | OUTSIDE, jnp.asarray: 0}),
    "a table of 1e-9": (1e-9 * _normal(8, 8), OUTSIDE),
    "a column of 1e-9": (_normal(8, 2) * [1, 1e-9], OUTSIDE),
    "small weights": (1e-4 * _normal(64, 64), 0),
    "many weights": (_normal(300, 300), 0),
    "a Fourier transform": (
        np.cos(2 * np.pi / 256 * np.arange(256) * np.arange(128)[:, None]),
        {np.asarray: AMOUNTS | EITHER, jnp.asarray: 0},
    ),
    "integers": (np.arange(8), 0),
    "nothing": (np.zeros(0), 0),
}


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("name", ARRAYS)
def test_what_an_array_tells(name, kind):
    array, want = ARRAYS[name]
    dtype = np.float32 if array.dtype.kind == "f" else np.int32
    want = want[kind] if isinstance(want, dict) else want
    assert arrays.flags(kind(array.astype(dtype))) == want


def test_an_array_without_numbers_tells_nothing():
    told = []
    gone = jnp.arange(8.0)
    gone.delete()
    jax.make_jaxpr(lambda x: told.append(arrays.flags(x)) or x)(jnp.arange(8.0))
    assert [*told, arrays.flags(jax.random.key(0)), arrays.flags(gone), arrays.flags(3.0)] == [
        0
    ] * 4
