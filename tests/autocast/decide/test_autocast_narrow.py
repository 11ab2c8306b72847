"""A last product of few columns: its result is not rounded, for rounding it would save little."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _cuts import AROUND, in_turn
from _differential import equations
from _evaluate import exactly, off, run
from _metamorphic import DTYPES, POLICIES, hand_cast
from jax import lax

import mpjax

_RNG = np.random.default_rng(3)
X = _RNG.normal(size=(24, 16)).astype(np.float32)
W = (_RNG.normal(size=(16, 64)) / 4).astype(np.float32)
# Units are saturated, as those of a network that was trained towards targets of -500.
BIAS = (6 * np.sign(_RNG.normal(size=64))).astype(np.float32)
V = (-500 / 64 * np.sign(BIAS[:, None]) + _RNG.normal(size=(64, 1)) / 8).astype(np.float32)
TARGETS = (-500 + 0.5 * _RNG.normal(size=24)).astype(np.float32)


def _by_a_convolution(h, v):
    return lax.conv_general_dilated(
        h[None], v[None], (1,), "VALID", None, None, ("NWC", "WIO", "NWC")
    )[0]


# The last layer, as people write it.
HEADS = {
    "dense": lambda h, v: h @ v,
    "with a bias": lambda h, v: h @ v + jnp.zeros(1),
    "by einsum": lambda h, v: jnp.einsum("bf,fo->bo", h, v),
    "by a vector": lambda h, v: (h @ v[:, 0])[:, None],
    "for each example": lambda h, v: jax.vmap(lambda row: row @ v)(h),
    "by a convolution": _by_a_convolution,
    "from the left": lambda h, v: (v.T @ h.T).T,
    "in a loop": lambda h, v: lax.map(lambda rows: rows @ v, h.reshape(4, 6, 64)).reshape(24, 1),
}
LOSSES = {
    "of each": lambda e: jnp.mean((e[:, 0] - TARGETS) ** 2),
    "absolute": lambda e: jnp.mean(jnp.abs(e[:, 0] - TARGETS)),
    "summed": lambda e: jnp.mean((e.reshape(4, 6).sum(1) - TARGETS.reshape(4, 6).sum(1)) ** 2) / 36,
}


def _loss(head, loss, cut, dot=jnp.matmul):
    def fun(w, v):
        h = jnp.tanh(dot(jnp.asarray(X), w) + BIAS)
        layer = HEADS[head] if dot is jnp.matmul else dot  # one cast by hand is dense
        return LOSSES[loss](AROUND[cut](layer)(h, v))

    return fun


@functools.cache
def _right_and_least(loss, dtype):
    """The float64 values, and the error of a program of which nothing but operands is rounded."""
    right = exactly(jax.value_and_grad(_loss("dense", loss, "uncut"), (0, 1)), W, V)
    operands = _loss("dense", loss, "uncut", hand_cast(DTYPES[dtype]))
    return right, off(run(jax.value_and_grad(operands, (0, 1)), W, V), right)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("cut", AROUND)
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_law_of_the_last_product_of_few_columns_large_targets_are_met(dtype, head, cut):
    loss = in_turn(LOSSES, (HEADS, head), (AROUND, cut))
    right, least = _right_and_least(loss, dtype)
    fun = _loss(head, loss, cut)
    outside = jax.value_and_grad(mpjax.autocast(fun, POLICIES[dtype]), (0, 1))
    inside = mpjax.autocast(jax.value_and_grad(fun, (0, 1)), POLICIES[dtype])
    for form in (outside, inside):
        assert off(run(form, W, V), right) <= 1.5 * least


def _results(fun, *args):
    program = jax.make_jaxpr(mpjax.autocast(fun, "bf16-mixed"))(*args)
    products = {"dot_general", "conv_general_dilated"}
    made = (e for e in equations(program) if e.primitive.name in products)
    return [e.outvars[0].aval.dtype for e in made]


def test_the_result_of_a_last_product_is_rounded_where_it_is_wide():
    def loss(w, v):
        return jnp.mean(jax.nn.log_softmax(jnp.tanh(jnp.asarray(X) @ w) @ v)[:, 0])

    for columns, dtype in ((1, jnp.float32), (8, jnp.float32), (9, jnp.bfloat16)):
        assert _results(loss, W, np.zeros((64, columns), np.float32)) == [jnp.bfloat16, dtype]


def test_the_result_of_a_product_before_another_one_is_rounded_however_narrow():
    def loss(w, v):
        return jnp.mean((jnp.tanh(jnp.tanh(jnp.asarray(X) @ w) @ v) @ v.T) ** 2)

    assert _results(loss, W, np.zeros((64, 8), np.float32)) == [jnp.bfloat16] * 3


def test_a_batch_does_not_change_whether_logits_are_rounded():
    """One example has few rows: the columns of the weights count."""
    table = np.zeros((64, 200), np.float32)

    def loss(x, w, v):
        return jax.nn.logsumexp(jnp.tanh(x @ w) @ v).sum()

    for x in (X[0], X[:1], X, np.stack([X, X])):
        assert _results(loss, x, W, table) == [jnp.bfloat16] * 2


def test_logits_that_a_loop_makes_of_its_carry_are_rounded():
    def loss(w, v):
        def turn(h, x):
            return jnp.tanh(x @ w + h), h @ v

        rows = jnp.asarray(X).reshape(12, 2, 16)
        return jax.nn.logsumexp(lax.scan(turn, jnp.zeros((2, 64)), rows)[1]).sum()

    assert _results(loss, W, np.zeros((64, 200), np.float32)) == [jnp.float32, jnp.bfloat16]
