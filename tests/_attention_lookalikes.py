"""What looks like attention and is not, or is read elsewhere: functions of (weights, x)."""

import functools

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
from _attention_written import (
    BATCH,
    HEADS,
    KEY,
    LINEN,
    PAIRS,
    SIZE,
    TIME,
    WIDTH,
    heads,
    of_all,
    of_logits,
    out,
)

import mpjax
from benchmarks.networks._attention import attend, attend_grouped, causal

NOT_FOUND = {}


def not_found(fun):
    NOT_FOUND[fun.__name__] = fun
    return fun


def _of_weights(weights, x, change):
    """Returns attention whose weights are changed by a function behind the softmax."""
    query, key, value = heads(weights, x)
    logits = jnp.einsum("bqhd,bkhd->bhqk", query, key) * SIZE**-0.5
    return jnp.einsum("bhqk,bkhd->bqhd", change(jax.nn.softmax(logits, axis=-1)), value)


def _scores(weights, x, axis=-1):
    query, key, value = heads(weights, x)
    return jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", query, key), axis=axis), key, value


def _summed(weights, scores, value):
    return out(weights, jnp.einsum("bhqk,bkhd->bqhd", scores, value))


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
    y = attend_grouped(*heads(weights, x), causal(TIME), jnp.float32, cap=20.0)
    return out(weights, y)


@not_found
def weights_are_read_twice(weights, x):
    scores, key, value = _scores(weights, x)
    return _summed(weights, scores, value) + _summed(weights, scores, key)


@not_found
def logits_are_read_elsewhere(weights, x):
    query, key, value = heads(weights, x)
    logits = jnp.einsum("bqhd,bkhd->bhqk", query, key)
    y = _summed(weights, jax.nn.softmax(logits, axis=-1), value)
    return y + 1e-3 * jnp.mean(logits**2)


@not_found
def the_softmax_is_a_region(weights, x):
    query, key, value = heads(weights, x)
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
    query, key, value = heads(weights, x)
    logits = jnp.einsum("bqhd,bkhd->bhqk", query, key)
    scores = jnp.exp(logits - logits.max(-1, keepdims=True))
    return _summed(weights, scores / scores.sum(-2, keepdims=True), value)


@not_found
def the_sum_stands_along_the_rows(weights, x):
    query, key, value = heads(weights, x)
    logits = jnp.einsum("bqhd,bkhd->bhqk", query, key)
    scores = jnp.exp(logits - logits.max(-1, keepdims=True))
    return _summed(weights, scores / scores.sum(-1)[:, :, None, :], value)


@not_found
def a_loop_carries_them(weights, x):
    query, key, value = heads(weights, x)
    logits = jnp.einsum("bqhd,bkhd->bhqk", query, key)

    def more(carry, _):
        return 0.5 * (carry + jax.nn.softmax(carry + logits, axis=-1)), None

    scores, _ = jax.lax.scan(more, jnp.zeros_like(logits), None, length=2)
    return _summed(weights, scores, value)


@not_found
def they_are_the_result(weights, x):
    return attend(*heads(weights, x), causal(TIME), jnp.float32)


@not_found
def linens_module_drops_out(weights, x):
    module = nn.MultiHeadDotProductAttention(num_heads=HEADS, dropout_rate=0.1, deterministic=False)
    return module.apply(LINEN, x @ weights[0], rngs={"dropout": KEY}) @ weights[4]


@not_found
def linens_module_sows_the_weights(weights, x):
    module = nn.MultiHeadDotProductAttention(num_heads=HEADS)
    y, sown = module.apply(LINEN, x @ weights[0], sow_weights=True, mutable=["intermediates"])
    return y @ weights[4], sown


@not_found
def equinoxs_module_drops_out(weights, x):
    module = eqx.nn.MultiheadAttention(HEADS, WIDTH, dropout_p=0.2, key=KEY)
    return jax.vmap(lambda y: module(y, y, y, key=KEY))(x @ weights[0]) @ weights[4]


def _logits_are(name, change):
    @not_found
    def fun(weights, x):
        return out(weights, of_logits(weights, x, change))

    NOT_FOUND[f"logits_are_{name}"] = NOT_FOUND.pop("fun")


def _weights_are(name, change):
    @not_found
    def fun(weights, x):
        return out(weights, _of_weights(weights, x, change))

    NOT_FOUND[f"weights_are_{name}"] = NOT_FOUND.pop("fun")


_logits_are("clipped", lambda y: jnp.clip(y, -5.0, 5.0))
_logits_are("multiplied_by_a_mask", lambda y: y * causal(TIME) - 1e9 * ~causal(TIME))
_logits_are("subtracted", lambda y: 1.0 - y)
_logits_are("of_two_softmaxes", lambda y: jax.nn.softmax(y, axis=-1))
_logits_are("of_a_negative_scale", lambda y: y * -0.5)
_logits_are("of_a_scale_that_is_learned", lambda y: y * jnp.sum(y[0, 0, 0]) ** 0)
_logits_are("rounded_by_the_author", lambda y: y.astype(jnp.float16).astype(jnp.float32))
_logits_are("rounded_in_place", lambda y: jax.lax.reduce_precision(y, 8, 3))
_logits_are(
    "masked_by_two_numbers", lambda y: jnp.where(PAIRS, jnp.where(causal(TIME), y, -1e9), -1e8)
)
_weights_are("zero_in_rows_without_keys", lambda y: jnp.where(PAIRS, y, 0.0))
_weights_are("those_of_other_heads", lambda y: y[:, ::-1])
_weights_are("those_of_other_keys", lambda y: y[..., ::-1])
_weights_are("transposed", lambda y: y.swapaxes(-1, -2))
_weights_are("rounded_by_the_author", lambda y: y.astype(jnp.float16).astype(jnp.float32))


@not_found
def keys_are_chosen_by_softmaxs_where(weights, x):
    scores = functools.partial(jax.nn.softmax, axis=-1)
    query, key, value = heads(weights, x)
    logits = jnp.einsum("bqhd,bkhd->bhqk", query, key)
    mask = jnp.broadcast_to(causal(TIME), logits.shape)
    return _summed(weights, scores(logits, where=mask), value)


@not_found
def a_row_may_read_nothing(weights, x):
    query, key, value = heads(weights, x)
    logits = jnp.einsum("bqhd,bkhd->bhqk", query, key)
    scores = jnp.exp(logits - logits.max(-1, keepdims=True))
    return _summed(weights, scores / (1.0 + scores.sum(-1, keepdims=True)), value)


@not_found
def all_pairs_are_one_row(weights, x):
    query, key, value = heads(weights, x)
    logits = jnp.einsum("bqhd,bkhd->bhqk", query, key)
    scores = jax.nn.softmax(logits.reshape(BATCH, HEADS, -1), axis=-1).reshape(logits.shape)
    return _summed(weights, scores, value)


@not_found
def weights_sum_over_queries(weights, x):
    scores, _, value = _scores(weights, x)
    return out(weights, jnp.einsum("bhqk,bqhd->bkhd", scores, value))


@not_found
def numbers_are_complex(weights, x):
    query, key, value = heads(weights, x)
    logits = jnp.abs(jnp.einsum("bqhd,bkhd->bhqk", query * (1 + 1j), key))
    return _summed(weights, jax.nn.softmax(logits, axis=-1), value)
