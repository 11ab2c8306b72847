"""Variances of windows: the cotangents of products whose terms cancel, cancel as these do.

`mean(a * a) - mean(a) ** 2` of a filter, as in a structural similarity, is a difference of two
products over the same values. So is its gradient, `2 * a * back(c) - back(2 * mean * c)`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _cuts import AROUND, cuts_in_turn, in_turn
from _metamorphic import DTYPES, POLICIES
from _small import each_inside_and_outside
from jax import lax

_RNG = np.random.default_rng(4)
X = _RNG.normal(size=(24, 16)).astype(np.float32)
W = (_RNG.normal(size=(16, 32)) / 4).astype(np.float32)
_WITHIN = np.abs(np.arange(32)[:, None] - np.arange(26) - 3) <= 3
_MATRIX = (_WITHIN / 7).astype(np.float32)


def _filtered(z, kernel):
    return lax.conv_general_dilated(z[:, None], kernel, (1,), "VALID")[:, 0]


def _gaussian(z):
    weights = jnp.exp(-((jnp.arange(7.0) - 3) ** 2) / 64)
    return _filtered(z, (weights / weights.sum())[None, None])


# The mean of a window, by a kernel or a matrix that is known, made by the function, or an argument.
MEANS = {
    "a full kernel": lambda z, k: _filtered(z, jnp.full((1, 1, 7), 1 / 7)),
    "a kernel of ones": lambda z, k: _filtered(z, jnp.ones((1, 1, 7)) / 7),
    "a NumPy kernel": lambda z, k: _filtered(z, np.full((1, 1, 7), 1 / 7, np.float32)),
    "a Gaussian": lambda z, k: _gaussian(z),
    "jnp.convolve": lambda z, k: jax.vmap(lambda r: jnp.convolve(r, jnp.ones(7) / 7, "valid"))(z),
    "a NumPy matrix": lambda z, k: z @ _MATRIX,
    "a matrix that was made": lambda z, k: z @ jnp.where(jnp.asarray(_WITHIN), 1 / 7, 0.0),
    "an argument": lambda z, k: z @ k,
    "a sum of windows": lambda z, k: (
        lax.reduce_window(z, 0.0, lax.add, (1, 7), (1, 1), "VALID") / 7
    ),
}


def _loss(mean, cut, where):
    def fun(w, x, k):
        def average(z):
            return MEANS[mean](z, k)

        average = AROUND[cut](average) if where == "the mean" else average

        def variance(z):
            return average(z * z) - average(z) ** 2

        variance = AROUND[cut](variance) if where == "the variance" else variance
        return 1e6 * jnp.mean(variance(0.5 + 0.02 * jnp.tanh(x @ w)))

    return fun


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_law_of_one_formula_gradients_of_windows_cancel_as_their_variances_do(dtype, mean):
    of = in_turn(["the mean", "the variance"], (MEANS, mean), (DTYPES, dtype))
    cuts = cuts_in_turn((MEANS, mean), (DTYPES, dtype))
    funs = {cut: _loss(mean, cut, of) for cut in cuts}
    right = jax.grad(funs["uncut"])(W, X, _MATRIX)
    for where, got in each_inside_and_outside(jax.grad, funs, POLICIES[dtype], W, X, _MATRIX):
        off = np.linalg.norm(got - right) / np.linalg.norm(right)  # by hand .26 and .035
        assert off < 3 * jnp.finfo(DTYPES[dtype]).eps, where
