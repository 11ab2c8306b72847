"""Softmax over rows: where a GPU computes it again from logits that it takes for others."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _directions import barriers, check_as_exact_without, kept
from _hinted import hints
from _planned import Planned
from _samples import normal
from jax import lax

SHAPES = {"q": (2, 64, 3, 16), "k": (2, 64, 3, 16), "v": (2, 64, 3, 16)}
SPECS = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in SHAPES.values()]
ARGS = [normal(i, *shape) for i, shape in enumerate(SHAPES.values())]
MASK = np.tril(np.ones((64, 64), bool))


def attend(q, k, v, weigh=jax.nn.softmax, order="bhqk"):
    logits = jnp.einsum(f"bqhd,bkhd->{order}", q, k)
    return jnp.einsum(f"{order},bkhd->bqhd", weigh(logits), v)


def masked(logits):
    return jax.nn.softmax(jnp.where(jnp.asarray(MASK), logits / 4, -1e9))


def dropped(logits):
    kept = jax.random.bernoulli(jax.random.key(0), 0.9, logits.shape)
    return jnp.where(kept, masked(logits) / 0.9, 0)


def scaled_and_exactly_read(logits):
    return jax.nn.softmax(logits / 4, where=jnp.asarray(MASK))


def by_root_mean_square(x):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def rows_of(fun):
    """Returns the shapes of what is kept apart."""
    marks = [group.marks for group in Planned(fun, *SPECS).groups]
    return [mark.rows.aval.shape for mark in marks if mark.rows is not None]


ROWS = (2, 3, 64, 64)


@pytest.mark.parametrize("weigh", [jax.nn.softmax, masked, dropped])
def test_the_logits_of_a_softmax_over_rows_are_kept_apart(weigh):
    assert rows_of(functools.partial(attend, weigh=weigh)) == [ROWS]


@pytest.mark.parametrize(
    ("weigh", "order"),
    [
        (jax.nn.softmax, "bqhk"),  # a row is not stored as one: no kernel holds it
        (lambda x: jax.nn.softmax(x.mT).mT, "bhqk"),
        (functools.partial(jax.nn.softmax, axis=-2), "bhqk"),
        (scaled_and_exactly_read, "bhqk"),  # XLA computes what is scaled again, and stores it not
        (by_root_mean_square, "bhqk"),  # one statistic, of which XLA makes no kernel
        (lambda x: jax.nn.softmax(x) + lax.stop_gradient(x) @ jnp.ones((64, 64)), "bhqk"),
    ],
)
def test_other_rows_are_not_kept_apart(weigh, order):
    assert rows_of(functools.partial(attend, weigh=weigh, order=order)) == []


def test_of_two_products_the_one_with_the_rows_is_kept_apart():
    def fun(q, k, v):
        of_keys = jnp.einsum("bkhd,hd->bhk", k, q[0, 0])
        return attend(q, k, v, lambda logits: jax.nn.softmax(of_keys[:, :, None] + logits))

    assert rows_of(fun) == [ROWS]


def test_rows_are_kept_apart_that_a_kernel_can_hold():
    def fun(x, w):
        return jnp.sum(jax.nn.softmax(x @ w) @ w.T)

    def rows(length):
        planned = Planned(
            fun, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in ((4, 2), (2, length)))
        )
        return [group.marks.rows is not None for group in planned.groups]

    assert any(rows(2**14))
    assert not any(rows(2**14 + 1))


def test_a_loss_of_rows_is_not_kept_apart():
    assert rows_of(lambda q, k, v: jax.nn.logsumexp(jnp.einsum("bqhd,bkhd->bhqk", q, k), -1)) == []


HELD = "2x3x64x64xbf16"


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
def test_a_gpu_holds_the_logits_and_no_mask(platform):
    fun = functools.partial(attend, weigh=dropped)
    assert barriers(fun, platform, SPECS) == [HELD]


def test_of_equal_groups_one_is_kept_apart_whose_logits_nothing_else_reads():
    def fun(q, k, v):
        outs = []
        for _ in range(2):
            q = attend(q, k, v, lambda logits: outs.append(logits) or jax.nn.softmax(logits))
        return jnp.sum(q) + jnp.sum(outs[0] @ jnp.ones((64, 64)))

    with hints.without("attended"):  # which would run the second as one kernel
        assert barriers(fun, "cuda", SPECS) == [HELD]


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_other_platforms_hold_nothing(platform):
    assert HELD not in barriers(attend, platform, SPECS)


def test_in_a_loop_a_gpu_holds_nothing():
    def fun(q, k, v):
        return lax.scan(lambda q, _: (attend(q, k, v), None), q, None, 2)[0]

    assert barriers(fun, "cuda", SPECS) == []


def two_layers(q, k, v):
    mask = jnp.any(v > 0, (1, 3))[:, :, None, None]

    def weigh(logits):
        return jax.nn.softmax(jnp.where(mask, logits, -1e9))

    return attend(attend(q, k, v, weigh), k, v, weigh)


def test_nothing_more_is_kept_for_the_backward_pass():
    with_rows = kept(two_layers, SPECS)
    with hints.without("rows_apart"):
        assert kept(two_layers, SPECS) == with_rows


@pytest.mark.no_leak_check("it collects garbage after each trace: half of the time")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_values_and_derivatives_of_every_order_are_as_exact_as_without(platform):
    check_as_exact_without("rows_apart", two_layers, ARGS, platform)
