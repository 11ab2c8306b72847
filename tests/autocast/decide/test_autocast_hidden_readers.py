"""Readers that rounding would ruin, written in ways that do not look like them: `_hidden_heads`.

Autocast is within twice the errors of a hand cast that keeps float32 between its products. Random
cuts of these heads are among those of `test_autocast_cuts.py`.
"""

import random

import _cuts
import _metamorphic as metamorphic
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _hidden_heads import HIDDEN, ONCE

import mpjax

pytestmark = [
    pytest.mark.no_leak_check("it traces everything anew: twice the time, same programs"),
    pytest.mark.standard_promotion("heads are run in float64 too, with float32 literals"),
]

NAMES = [head.name for head in HIDDEN]


@pytest.mark.parametrize("dtype", metamorphic.POLICIES)
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("name", [*NAMES, *(head.name for head in ONCE)])
def test_law_of_readers_however_they_are_written(name, inside, dtype):
    limit = metamorphic.bound(name, dtype, ("by hand",))
    closed = metamorphic.traced(name, dtype, inside)
    errors = metamorphic.errors_of(name, dtype, jax.extend.core.jaxpr_as_fun(closed), inside)
    assert errors[0] <= limit[0]
    assert errors[1] <= limit[1]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["jit", "checkpoint", "cond", "sort", "psum"])
@pytest.mark.parametrize("name", NAMES)
def test_law_of_cutting_readers_however_they_are_written(name, kind):
    """Each value of the program behind a boundary, or moved and put back."""
    dtype = "f16" if (len(name) + len(kind)) % 2 else "bf16"
    limit = metamorphic.bound(name, dtype, ("uncut", "by hand"))
    closed = metamorphic.traced(name, dtype, False)
    every = range(len(closed.jaxpr.eqns))
    move = _cuts.OF_VALUES.get(kind)
    if move is None:
        cut = _cuts.cut(closed, every[1:], dict.fromkeys(every, _cuts.BOUNDARIES[kind]))
    else:
        cut = _cuts.moved(closed, dict.fromkeys(every, move))
    errors = metamorphic.errors_of(name, dtype, cut)
    assert errors[0] <= limit[0]
    assert errors[1] <= limit[1]


@pytest.mark.parametrize("policy", metamorphic.POLICIES.values())
@pytest.mark.parametrize(
    "cut", [lambda fun: fun, jax.jit, jax.checkpoint], ids=["", "jit", "remat"]
)
def test_law_of_readers_a_row_that_sees_nothing_is_finite(cut, policy):
    """A mask from outside, of the least float32, which is -inf in 16 bits."""
    rng = np.random.default_rng(0)
    h = rng.normal(size=(2, 24, 16)).astype(np.float32)
    w = (0.1 * rng.normal(size=(16, 16))).astype(np.float32)
    mask = np.zeros((2, 1, 24), np.float32)
    mask[1] = np.finfo(np.float32).min

    def attention(h, w, mask):
        weights = jax.nn.softmax(cut(lambda h, w, mask: h @ w @ h.mT + mask)(h, w, mask))
        return weights @ h

    got = mpjax.autocast(attention, policy)(jnp.asarray(h), w, mask)
    np.testing.assert_allclose(got, attention(jnp.asarray(h), w, mask), atol=0.1)


def test_law_of_cutting_a_sign_that_is_not_known_is_told_through_branches():
    """Cut 19 of this seed puts the weighted rows and what made them into branches: .23 for .005."""
    name, rng = "a_stencil_of_weights", random.Random(19)
    limit = metamorphic.bound(name, "bf16", ("uncut", "by hand"))
    errors = metamorphic.cut_errors(name, "bf16", "cond", metamorphic.OUTSIDE, rng)
    assert errors[0] <= limit[0]
    assert errors[1] <= limit[1]
