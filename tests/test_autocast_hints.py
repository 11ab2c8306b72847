"""Hints are a table: each row has a function, can be left out, and comes back."""

import jax
import jax.numpy as jnp
import pytest

from mpjax._autocast import autocast, hints

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
