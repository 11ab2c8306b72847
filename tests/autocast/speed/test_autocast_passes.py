"""Softmax in several passes over its rows: where a GPU computes each of them from low logits."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _directions import barriers, check_as_exact_without, kept
from _hinted import hints
from _planned import Planned
from _samples import normal
from jax import lax

from mpjax import autocast

SHAPES = {"q": (2, 64, 2, 3, 16), "k": (2, 64, 2, 16), "v": (2, 64, 2, 16)}
SPECS = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in SHAPES.values()]
ARGS = [normal(i, *shape) for i, shape in enumerate(SHAPES.values())]
MASK = np.tril(np.ones((64, 64), bool))
LOGITS = (2, 64, 2, 3, 64)


def capped(logits, cap=5.0):
    return jnp.tanh(logits / cap) * cap


def attend(q, k, v, weigh=lambda logits: jax.nn.softmax(capped(logits)), order="bqhgk"):
    """Grouped queries: the product that einsum makes has the keys in front of the queries."""
    logits = jnp.einsum(f"bqhgd,bkhd->{order}", q, k)
    return jnp.einsum(f"{order},bkhd->bqhgd", weigh(logits), v)


def masked(logits):
    mask = jnp.asarray(MASK)[:, None, None]
    return jax.nn.softmax(jnp.where(mask, capped(logits), -1e9))


def in_joined_heads(logits):
    joined = logits.reshape(2, 64, 6, 64)
    return jax.nn.softmax(capped(joined)).reshape(logits.shape)


def rectified(logits):
    """Weights of a function that XLA computes twice: nothing is stored between two passes."""
    weights = jax.nn.relu(logits)
    return weights / (1 + jnp.sum(weights, -1, keepdims=True))


def loss(q, k, v, of=lambda logits: -jax.nn.log_softmax(capped(logits))):
    """A loss of rows: it leaves statistics, and no rows."""
    logits = q[:, :, 0, 0] @ k[0, :, 0].T
    return jnp.sum(of(logits)[..., :1]) + 0 * jnp.sum(v)


def passed(fun):
    """Returns the shapes of what groups pass over several times."""
    marks = [group.marks for group in Planned(fun, *SPECS).groups]
    return [mark.passed.aval.shape for mark in marks if mark.passed is not None]


@pytest.mark.parametrize(
    ("weigh", "shape"),
    [
        (lambda logits: jax.nn.softmax(capped(logits)), LOGITS),
        (jax.nn.softmax, LOGITS),
        (masked, LOGITS),
        (lambda logits: jnp.exp(jax.nn.log_softmax(capped(logits))), LOGITS),
        (in_joined_heads, (2, 64, 6, 64)),
    ],
)
def test_a_softmax_whose_rows_a_transpose_makes_is_one_in_passes(weigh, shape):
    assert passed(functools.partial(attend, weigh=weigh)) == [shape]


def by_label(logits):
    logits = capped(logits)
    picked = jnp.take_along_axis(logits, jnp.zeros((2, 64, 1), int), -1)
    return jax.nn.logsumexp(logits, -1, keepdims=True) - picked


@pytest.mark.parametrize(
    "of", [lambda logits: -jax.nn.log_softmax(capped(logits)), by_label, jax.nn.log_softmax]
)
def test_a_loss_of_curved_logits_is_one_in_passes(of):
    is_curved = of is not jax.nn.log_softmax  # of others, XLA stores nothing between its passes
    assert passed(functools.partial(loss, of=of)) == [(2, 64, 64)] * is_curved


@pytest.mark.parametrize(
    ("weigh", "order"),
    [
        (rectified, "bqhgk"),
        (lambda logits: jnp.exp(jax.nn.log_softmax(logits)), "bqhgk"),  # but for a shift, as above
        (lambda logits: jnp.tanh(logits) / 8, "bqhgk"),  # one pass
        (lambda x: jax.nn.softmax(x) + lax.stop_gradient(x) @ jnp.ones((64, 64)), "bqhgk"),
    ],
)
def test_others_are_not(weigh, order):
    assert passed(functools.partial(attend, weigh=weigh, order=order)) == []


def test_rows_that_one_kernel_holds_are_not():
    def fun(q, k, v):
        logits = jnp.einsum("bqhd,bkhd->bhqk", q[:, :, :, 0], k)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(capped(logits)), v)

    assert passed(fun) == []
    with hints.without("rows_apart"):
        assert passed(fun) == []


def held(fun, platform):
    """Returns how often barriers hold the logits in the gradient's program."""
    return barriers(fun, platform, SPECS).count("2x64x2x3x64xbf16")


@pytest.mark.parametrize("platform", ["cuda", "rocm", "cpu", "tpu"])
def test_a_gpu_alone_holds_the_logits_low_in_each_pass(platform):
    count = held(attend, platform)  # two passes forward, apart from those of the gradient
    assert count > 4 if platform in ("cuda", "rocm") else count == 0


def stored_in(fun):
    jax.clear_caches()
    program = jax.make_jaxpr(autocast(fun, "bf16-mixed"))(*SPECS)
    return re.findall(r":bf16\[([\d,]*)\] = stored ", str(program))


def test_the_weights_are_stored_low_for_the_products_of_both_passes():
    assert stored_in(attend) == ["2,64,2,3,64"]
    with hints.without("passes_apart"):
        assert stored_in(attend) == []


def test_in_a_loop_a_gpu_holds_nothing():
    def fun(q, k, v):
        return lax.scan(lambda q, _: (attend(q, k, v), None), q, None, 2)[0]

    assert held(fun, "cuda") == 0


def test_nothing_more_is_kept_for_the_backward_pass():
    def size():
        of = ((np.dtype(dtype).itemsize, shape) for dtype, shape in kept(attend, SPECS))
        return sum(itemsize * math.prod(shape) for itemsize, shape in of)

    now = size()
    with hints.without("passes_apart"):
        assert now <= size() + 2 * 4 * (2 * 64 * 2 * 3)  # both statistics of each row


@pytest.mark.no_leak_check("it collects garbage after each trace: half of the time")
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("platform", "weigh"), [("cuda", masked), ("cuda", in_joined_heads), ("cpu", masked)]
)
def test_values_and_derivatives_of_every_order_are_as_exact_as_without(platform, weigh):
    check_as_exact_without("passes_apart", functools.partial(attend, weigh=weigh), ARGS, platform)
