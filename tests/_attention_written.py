"""Attention as people write it, and what looks like it but is not: functions of (weights, x)."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

import mpjax
from benchmarks.networks._attention import attend, attend_grouped, causal

BATCH, TIME, HEADS, SIZE = 2, 16, 4, 8
WIDTH = HEADS * SIZE
KEY = jax.random.key(0)
WEIGHTS = jax.random.normal(KEY, (5, WIDTH, WIDTH)) * 0.25
X = jax.random.normal(jax.random.fold_in(KEY, 1), (BATCH, TIME, WIDTH))
FIRST = jnp.arange(TIME) < jnp.array([10, 16])[:, None]  # which tokens are there
LAST = ~FIRST | (jnp.arange(TIME) == TIME - 1)  # padded in front: early rows have no keys
LEAST = float(jnp.finfo(jnp.float32).min)

FOUND, NOT_FOUND = {}, {}


def found(fun):
    FOUND[fun.__name__] = fun
    return fun


def not_found(fun):
    NOT_FOUND[fun.__name__] = fun
    return fun


def _heads(weights, x):
    return [(x @ weights[i]).reshape(*x.shape[:-1], HEADS, SIZE) for i in range(3)]


def _out(weights, y):
    return y.reshape(BATCH, TIME, WIDTH) @ weights[3] @ weights[4]


def _fewer(weights, x):
    query, key, value = _heads(weights, x)
    return query, key[:, :, :2], value[:, :, :2]


@found
def of_all(weights, x):
    return _out(weights, attend(*_heads(weights, x), jnp.ones((), bool), jnp.float32))


@found
def causal_by_tril(weights, x):
    return _out(weights, attend(*_heads(weights, x), causal(TIME), jnp.float32))


@found
def in_groups(weights, x):
    return _out(weights, attend_grouped(*_fewer(weights, x), causal(TIME), jnp.float32))


@found
def of_padded_keys(weights, x):
    return _out(weights, attend(*_heads(weights, x), FIRST[:, None, None, :], jnp.float32))


@found
def rows_without_keys(weights, x):
    mask = LAST[:, None, None, :] & causal(TIME)
    return _out(weights, attend(*_heads(weights, x), mask, jnp.float32))


@found
def by_jax_nn(weights, x):
    return _out(weights, jax.nn.dot_product_attention(*_fewer(weights, x), is_causal=True))


@found
def by_jax_nn_in_a_window(weights, x):
    attention = jax.nn.dot_product_attention
    y = attention(*_heads(weights, x), is_causal=True, local_window_size=(5, 0), scale=0.3)
    return _out(weights, y)


@found
def by_jax_nn_with_a_bias(weights, x):
    bias = (weights[4, :TIME, :TIME] * 4 + weights[3, :TIME, None, :TIME][:4]).reshape(
        1, HEADS, TIME, TIME
    )
    return _out(weights, jax.nn.dot_product_attention(*_heads(weights, x), bias))


@found
def by_linen(weights, x):
    padded = nn.make_attention_mask(FIRST, FIRST)
    mask = nn.combine_masks(nn.make_causal_mask(jnp.ones((BATCH, TIME))), padded)
    return _out(weights, nn.dot_product_attention(*_heads(weights, x), mask=mask))


@found
def by_nnx(weights, x):
    mask = nnx.make_causal_mask(jnp.ones((BATCH, TIME)))
    return _out(weights, nnx.dot_product_attention(*_heads(weights, x), mask=mask))


def _added(mask, least):
    """A mask as transformers' Flax models add it."""
    shape = (BATCH, 1, TIME, TIME)
    cases = jnp.full(shape, 0.0), jnp.full(shape, least)
    return jax.lax.select(jnp.broadcast_to(mask, shape), *cases)


@found
def with_an_added_mask(weights, x):
    bias = _added(LAST[:, None, None, :] & causal(TIME), LEAST)
    return _out(weights, nn.dot_product_attention(*_heads(weights, x), bias=bias))


@found
def with_a_billion_added(weights, x):
    bias = _added(LAST[:, None, None, :] & causal(TIME), -1e9)
    return _out(weights, nn.dot_product_attention(*_heads(weights, x), bias=bias))


@found
def with_ten_thousand_added(weights, x):
    bias = _added(LAST[:, None, None, :] & causal(TIME), -1e4)
    return _out(weights, nn.dot_product_attention(*_heads(weights, x), bias=bias))


@found
def heads_first_by_hand(weights, x):
    query, key, value = (y.swapaxes(1, 2) for y in _heads(weights, x))
    logits = query @ key.swapaxes(-1, -2) / jnp.sqrt(SIZE)
    logits = jnp.where(jnp.tril(jnp.ones((TIME, TIME))) == 0, -jnp.inf, logits)
    weights_of_keys = jnp.exp(logits - logits.max(-1, keepdims=True))
    weights_of_keys = weights_of_keys / weights_of_keys.sum(-1, keepdims=True)
    return _out(weights, (weights_of_keys @ value).swapaxes(1, 2))


@found
def of_one_head(weights, x):
    query, key, value = (x @ weights[i] for i in range(3))
    scores = jax.nn.softmax(jnp.einsum("bqc,bkc->bqk", query, key) * 0.2, axis=-1)
    return _out(weights, jnp.einsum("bqk,bkc->bqc", scores, value))


@found
def of_one_example_mapped(weights, x):
    def one(x):
        query, key, value = _heads(weights, x)
        scores = jax.nn.softmax(jnp.einsum("qhd,khd->hqk", query, key) * 0.2, axis=-1)
        return jnp.einsum("hqk,khd->qhd", scores, value)

    return _out(weights, jax.vmap(one)(x))


@found
def in_a_scan(weights, x):
    def layer(x, _):
        y = nn.LayerNorm(use_scale=False, use_bias=False).apply({}, x)
        y = attend(*_heads(weights, y), causal(TIME), jnp.float32)
        return x + y.reshape(x.shape) @ weights[3], None

    return jax.lax.scan(layer, x, None, length=2)[0] @ weights[4]


@found
def in_a_checkpoint(weights, x):
    @jax.checkpoint
    def layer(x):
        y = attend(*_heads(weights, x), causal(TIME), jnp.float32)
        return x + y.reshape(x.shape) @ weights[3]

    return layer(x) @ weights[4]


def _scores(weights, x, axis=-1):
    query, key, value = _heads(weights, x)
    return jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", query, key), axis=axis), key, value


def _summed(weights, scores, value):
    return _out(weights, jnp.einsum("bhqk,bkhd->bqhd", scores, value))


@not_found
def weights_are_returned(weights, x):
    scores, _, value = _scores(weights, x)
    return _summed(weights, scores, value), scores


@not_found
def weights_are_dropped_out(weights, x):
    scores, _, value = _scores(weights, x)
    kept = jax.random.bernoulli(KEY, 0.9, scores.shape)
    return _summed(weights, jnp.where(kept, scores / 0.9, 0.0), value)


@not_found
def logits_are_capped(weights, x):
    y = attend_grouped(*_heads(weights, x), causal(TIME), jnp.float32, cap=20.0)
    return _out(weights, y)


@not_found
def weights_are_read_twice(weights, x):
    scores, key, value = _scores(weights, x)
    return _summed(weights, scores, value) + _summed(weights, scores, key)


@not_found
def logits_are_read_elsewhere(weights, x):
    query, key, value = _heads(weights, x)
    logits = jnp.einsum("bqhd,bkhd->bhqk", query, key)
    y = _summed(weights, jax.nn.softmax(logits, axis=-1), value)
    return y + 1e-3 * jnp.mean(logits**2)


@not_found
def the_softmax_is_a_region(weights, x):
    query, key, value = _heads(weights, x)
    logits = jnp.einsum("bqhd,bkhd->bhqk", query, key)
    with mpjax.full_precision():
        scores = jax.nn.softmax(logits, axis=-1)
    return _summed(weights, scores, value)


@not_found
def all_is_a_region(weights, x):
    with mpjax.full_precision():
        return of_all(weights, x)


@not_found
def the_softmax_is_of_columns(weights, x):
    scores, _, value = _scores(weights, x, axis=2)
    return _summed(weights, scores, value)


@not_found
def the_sum_is_of_another_axis(weights, x):
    query, key, value = _heads(weights, x)
    logits = jnp.einsum("bqhd,bkhd->bhqk", query, key)
    scores = jnp.exp(logits - logits.max(-1, keepdims=True))
    return _summed(weights, scores / scores.sum(-2, keepdims=True), value)


@not_found
def the_sum_stands_along_the_rows(weights, x):
    query, key, value = _heads(weights, x)
    logits = jnp.einsum("bqhd,bkhd->bhqk", query, key)
    scores = jnp.exp(logits - logits.max(-1, keepdims=True))
    return _summed(weights, scores / scores.sum(-1)[:, :, None, :], value)


@not_found
def a_loop_carries_them(weights, x):
    query, key, value = _heads(weights, x)
    logits = jnp.einsum("bqhd,bkhd->bhqk", query, key)

    def more(carry, _):
        return 0.5 * (carry + jax.nn.softmax(carry + logits, axis=-1)), None

    scores, _ = jax.lax.scan(more, jnp.zeros_like(logits), None, length=2)
    return _summed(weights, scores, value)


@not_found
def they_are_the_result(weights, x):
    return attend(*_heads(weights, x), causal(TIME), jnp.float32)
