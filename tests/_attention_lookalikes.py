"""What looks like attention and is not, or is read elsewhere: functions of (weights, x)."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
from _attention_written import (
    BATCH,
    FOUND,
    HEADS,
    KEY,
    LINEN,
    PAIRS,
    TIME,
    WIDTH,
    heads,
    out,
    read_by_products,
    with_changed_logits,
)

import mpjax
from benchmarks.networks._attention import attend, attend_grouped, causal


def _logits(query, key):
    return jnp.einsum("bqhd,bkhd->bhqk", query, key)


def _summed(scores, value):
    return jnp.einsum("bhqk,bkhd->bqhd", scores, value)


def _exponentials(query, key):
    logits = _logits(query, key)
    return jnp.exp(logits - logits.max(-1, keepdims=True))


# -- of query, key and value -----------------------------------------------------------------------


def _dropped_out(query, key, value):
    scores = jax.nn.softmax(_logits(query, key), axis=-1)
    kept = jax.random.bernoulli(KEY, 0.9, scores.shape)
    return _summed(jnp.where(kept, scores / 0.9, 0.0), value)


def _in_a_region(query, key, value):
    logits = _logits(query, key)
    with mpjax.full_precision():
        scores = jax.nn.softmax(logits, axis=-1)
    return _summed(scores, value)


def _divided_by_sums(axis, place):
    """Attention by hand, whose sums are of an axis, and stand at a place."""

    def fun(query, key, value):
        scores = _exponentials(query, key)
        return _summed(scores / place(scores.sum(axis)), value)

    return fun


def _carried_by_a_loop(query, key, value):
    logits = _logits(query, key)

    def more(carry, _):
        return 0.5 * (carry + jax.nn.softmax(carry + logits, axis=-1)), None

    return _summed(jax.lax.scan(more, jnp.zeros_like(logits), None, length=2)[0], value)


def _chosen_by_softmaxs_where(query, key, value):
    logits = _logits(query, key)
    mask = jnp.broadcast_to(causal(TIME), logits.shape)
    return _summed(jax.nn.softmax(logits, axis=-1, where=mask), value)


def _all_pairs_in_one_row(query, key, value):
    logits = _logits(query, key)
    scores = jax.nn.softmax(logits.reshape(BATCH, HEADS, -1), axis=-1)
    return _summed(scores.reshape(logits.shape), value)


def _complex(query, key, value):
    logits = jnp.abs(_logits(query * (1 + 1j), key))
    return _summed(jax.nn.softmax(logits, axis=-1), value)


OF_HEADS = {
    "weights_are_dropped_out": _dropped_out,
    "logits_are_capped": lambda q, k, v: attend_grouped(
        q, k, v, causal(TIME), jnp.float32, cap=20.0
    ),
    "the_softmax_is_a_region": _in_a_region,
    "the_softmax_is_of_columns": lambda q, k, v: _summed(jax.nn.softmax(_logits(q, k), axis=2), v),
    "the_sum_is_of_another_axis": _divided_by_sums(-2, lambda sums: sums[:, :, None]),
    "the_sum_stands_along_the_rows": _divided_by_sums(-1, lambda sums: sums[:, :, None]),
    "a_row_may_read_nothing": _divided_by_sums(-1, lambda sums: 1.0 + sums[..., None]),
    "a_loop_carries_them": _carried_by_a_loop,
    "keys_are_chosen_by_softmaxs_where": _chosen_by_softmaxs_where,
    "all_pairs_are_one_row": _all_pairs_in_one_row,
    "weights_sum_over_queries": lambda q, k, v: jnp.einsum(
        "bhqk,bqhd->bkhd", jax.nn.softmax(_logits(q, k), axis=-1), v
    ),
    "numbers_are_complex": _complex,
}


def _rounded(y):
    return y.astype(jnp.float16).astype(jnp.float32)


LOGITS_ARE = {  # changed before the softmax
    "clipped": lambda y: jnp.clip(y, -5.0, 5.0),
    "multiplied_by_a_mask": lambda y: y * causal(TIME) - 1e9 * ~causal(TIME),
    "subtracted": lambda y: 1.0 - y,
    "of_two_softmaxes": lambda y: jax.nn.softmax(y, axis=-1),
    "of_a_negative_scale": lambda y: y * -0.5,
    "of_a_scale_that_is_learned": lambda y: y * jnp.sum(y[0, 0, 0]) ** 0,
    "rounded_by_the_author": _rounded,
    "rounded_in_place": lambda y: jax.lax.reduce_precision(y, 8, 3),
    "masked_by_two_numbers": lambda y: jnp.where(PAIRS, jnp.where(causal(TIME), y, -1e9), -1e8),
}
WEIGHTS_ARE = {  # changed behind it
    "zero_in_rows_without_keys": lambda y: jnp.where(PAIRS, y, 0.0),
    "those_of_other_heads": lambda y: y[:, ::-1],
    "those_of_other_keys": lambda y: y[..., ::-1],
    "transposed": lambda y: y.swapaxes(-1, -2),
    "rounded_by_the_author": _rounded,
}


def _with_changed_weights(change):
    def fun(query, key, value):
        logits = _logits(query, key) * query.shape[-1] ** -0.5
        return _summed(change(jax.nn.softmax(logits, axis=-1)), value)

    return read_by_products(fun)


# -- of weights and x ------------------------------------------------------------------------------


def weights_are_returned(weights, x):
    query, key, value = heads(weights, x)
    scores = jax.nn.softmax(_logits(query, key), axis=-1)
    return out(weights, _summed(scores, value)), scores


def weights_are_read_twice(weights, x):
    query, key, value = heads(weights, x)
    scores = jax.nn.softmax(_logits(query, key), axis=-1)
    return out(weights, _summed(scores, value)) + out(weights, _summed(scores, key))


def logits_are_read_elsewhere(weights, x):
    query, key, value = heads(weights, x)
    logits = _logits(query, key)
    y = out(weights, _summed(jax.nn.softmax(logits, axis=-1), value))
    return y + 1e-3 * jnp.mean(logits**2)


def all_is_a_region(weights, x):
    with mpjax.full_precision():
        return FOUND["of_all"](weights, x)


def they_are_the_result(weights, x):
    return attend(*heads(weights, x), causal(TIME), jnp.float32)


def linens_module_drops_out(weights, x):
    module = nn.MultiHeadDotProductAttention(num_heads=HEADS, dropout_rate=0.1, deterministic=False)
    return module.apply(LINEN, x @ weights[0], rngs={"dropout": KEY}) @ weights[4]


def linens_module_sows_the_weights(weights, x):
    module = nn.MultiHeadDotProductAttention(num_heads=HEADS)
    y, sown = module.apply(LINEN, x @ weights[0], sow_weights=True, mutable=["intermediates"])
    return y @ weights[4], sown


def equinoxs_module_drops_out(weights, x):
    module = eqx.nn.MultiheadAttention(HEADS, WIDTH, dropout_p=0.2, key=KEY)
    return jax.vmap(lambda y: module(y, y, y, key=KEY))(x @ weights[0]) @ weights[4]


_IN_WHOLE = (
    *(weights_are_returned, weights_are_read_twice, logits_are_read_elsewhere, all_is_a_region),
    *(they_are_the_result, linens_module_drops_out, linens_module_sows_the_weights),
    equinoxs_module_drops_out,
)
NOT_FOUND = {
    **{name: read_by_products(fun) for name, fun in OF_HEADS.items()},
    **{f"logits_are_{name}": with_changed_logits(change) for name, change in LOGITS_ARE.items()},
    **{
        f"weights_are_{name}": _with_changed_weights(change) for name, change in WEIGHTS_ARE.items()
    },
    **{fun.__name__: fun for fun in _IN_WHOLE},
}
