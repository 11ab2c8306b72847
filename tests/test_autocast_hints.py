"""Hints are a table: each row has a function, can be left out, and comes back."""

import re

import jax
import jax.numpy as jnp
import pytest

from mpjax._autocast import autocast
from mpjax._autocast.speed import hints

KEY = jax.random.key(0)
ARGS = jax.random.normal(KEY, (8, 32)), jnp.ones(32), jax.random.normal(KEY, (4, 8))


def loss(w, b, x):
    return jnp.sum(jax.nn.relu(x @ w + b) @ w.T)


def text():
    jax.clear_caches()
    return str(jax.make_jaxpr(jax.grad(autocast(loss, "bf16-mixed")))(*ARGS))


def test_a_hint_is_left_out_where_it_is_asked_for_and_nowhere_else():
    before = text()
    with hints.without("read_exactly"):
        assert text() != before
    assert text() == before


def test_every_row_has_a_function_and_every_function_a_row():
    assert hints.FUNCTIONS.keys() == hints.HINTS.keys()


def test_an_unknown_hint_is_an_error():
    with pytest.raises(KeyError, match="no_such_hint"), hints.without("no_such_hint"):
        pass


def upsampled(w, x):
    return jnp.sum(jnp.tanh(jnp.repeat(x @ w + w[0], 2, axis=0) @ w) ** 2)


@pytest.mark.parametrize("policy", ["bf16-mixed", "16-mixed"])
def test_what_is_copied_last_is_stored_low_before_and_its_cotangent_added_up_low(policy):
    low = {"bf16-mixed": "bf16", "16-mixed": "f16"}[policy]
    args = jnp.ones((8, 8)), jnp.linspace(-1.0, 1.0, 128).reshape(16, 8)

    def copied():
        fun = autocast(lambda w, x: upsampled(w, x), policy)  # of which nothing is remembered
        text = str(jax.make_jaxpr(jax.grad(fun, (0, 1)))(*args))
        return set(re.findall(r":(\w+)\[16,2,8\] = ", text))

    assert copied() == {low}
    with hints.without("copied_last"):
        assert copied() == {"f32"}


def test_a_value_that_is_worked_on_after_it_is_copied_is_stored_after():
    def loss(w, x):
        y = x @ w
        return jnp.sum(jnp.tanh((jnp.repeat(y + w[0], 2, axis=0) * 1.5) @ w) ** 2)

    args = jnp.ones((8, 8)), jnp.ones((16, 8))
    with_hint = str(jax.make_jaxpr(autocast(loss, "bf16-mixed"))(*args))
    with hints.without("copied_last"):
        without = str(jax.make_jaxpr(autocast(lambda *a: loss(*a), "bf16-mixed"))(*args))
    assert with_hint == without
