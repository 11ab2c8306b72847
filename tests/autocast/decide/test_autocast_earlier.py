"""A program makes a value that an earlier call returned: the two are equal."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _cuts import AROUND
from _small import together
from jax import lax

from mpjax import autocast

_RNG = np.random.default_rng(0)
X = _RNG.normal(size=(64, 32)).astype(np.float32)
W = tuple((_RNG.normal(size=s) / s[0] ** 0.5).astype(np.float32) for s in ((32, 48), (48, 16)))
TOKENS = _RNG.integers(0, 16, size=64)


def _features(w, x):
    return 4 * (jnp.tanh(x @ w[0]) @ w[1])


def _states(w, x):
    def turn(h, row):
        return jnp.tanh(row @ w[0] + h), h

    return lax.scan(turn, jnp.zeros(48), x)[1] @ w[1]


MADE = {
    "features": _features,
    "a log probability": lambda w, x: jnp.take_along_axis(
        jax.nn.log_softmax(_features(w, x)), TOKENS[:, None], -1
    )[:, 0],
    "normalised features": lambda w, x: jax.nn.standardize(_features(w, x)),
    "states": _states,
    "an energy": lambda w, x: jnp.sum(_features(w, x) ** 2, -1),
}
DIFFERENCES = {
    "new - old": lambda new, old: new - old,
    "old - new": lambda new, old: old - new,
    "-old + new": lambda new, old: -old + new,
    "of sums": lambda new, old: new.sum(0) - old.sum(0),
}


READERS = {
    "exp": lambda d: jnp.exp(d) - 1,
    "tanh": jnp.tanh,
    "clip": lambda d: jnp.clip(d, -0.2, 0.2),
    "sum": jnp.sum,
    "abs": lambda d: abs(d).mean(),
    "square": lambda d: jnp.square(d).mean(),
    "relu": jax.nn.relu,
    "a limited ratio": lambda d: jnp.minimum(jnp.exp(d), jnp.clip(jnp.exp(d), 0.8, 1.2)) - 1,
}
POLICIES = ["bf16-mixed", "16-mixed"]


# A sum of a sum of squares is as a norm: what is squared may be stored in 16 bits.
PAIRS = [pair for pair in itertools.product(MADE, DIFFERENCES) if pair != ("an energy", "of sums")]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("made", "difference"), PAIRS)
def test_law_of_calls_a_value_made_again_is_what_the_earlier_call_returned(
    made, difference, policy
):
    """Each reader meets each value, by a difference and a cut that are its turn's."""
    old = jax.jit(autocast(MADE[made], policy))(W, X)
    take_off, first = DIFFERENCES[difference], PAIRS.index((made, difference))

    def compared(reader, cut):
        def fun(w, x, old):
            new = AROUND[cut](lambda x: MADE[made](w, x))(x)
            return READERS[reader](take_off(new, old))

        return autocast(fun, policy)

    cuts = [list(AROUND)[(first + i) % len(AROUND)] for i in range(len(READERS))]
    each = {pair: compared(*pair) for pair in zip(READERS, cuts, strict=True)}
    for case, got in together({str(pair): fun for pair, fun in each.items()}, W, X, old).items():
        np.testing.assert_allclose(got, 0, atol=2e-4, err_msg=case)
