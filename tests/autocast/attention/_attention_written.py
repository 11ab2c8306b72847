"""Attention as people write it, and what looks like it: functions of (weights, x) in two tables."""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from _samples import normal
from flax import nnx

import mpjax
from benchmarks.networks._attention import attend, attend_grouped, causal

BATCH, TIME, HEADS, SIZE = 2, 16, 4, 8
WIDTH = HEADS * SIZE
KEY = jax.random.key(0)
WEIGHTS = normal(0, 5, WIDTH, WIDTH, scale=0.25)
X = normal(1, BATCH, TIME, WIDTH)
_FIRST = np.arange(TIME) < np.array([10, 16])[:, None]
FIRST = jnp.asarray(_FIRST)  # which tokens are there
LAST = jnp.asarray(~_FIRST | (np.arange(TIME) == TIME - 1))  # padded in front: no keys for some
PAIRS = jnp.asarray(_FIRST[:, None, :, None] & _FIRST[:, None, None, :])  # padded: no row, no key
LEAST = float(jnp.finfo(jnp.float32).min)


def heads(weights, x):
    return [(x @ weights[i]).reshape(*x.shape[:-1], HEADS, SIZE) for i in range(3)]


def out(weights, y):
    return y.reshape(BATCH, TIME, WIDTH) @ weights[3] @ weights[4]


def of_logits(query, key, value, change):
    """Returns attention whose logits are changed by a function before the softmax."""
    logits = change(jnp.einsum("bqhd,bkhd->bhqk", query, key) * SIZE**-0.5)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits, axis=-1), value)


def later_keys():
    """A causal mask in front of which some keys are missing: rows without keys."""
    return LAST[:, None, None, :] & causal(TIME)


def _added(mask, least):
    """A mask as transformers' Flax models add it."""
    shape = (BATCH, 1, TIME, TIME)
    cases = jnp.full(shape, 0.0), jnp.full(shape, least)
    return jax.lax.select(jnp.broadcast_to(mask, shape), *cases)


def _of_linens_masks(query, key, value):
    padded = nn.make_attention_mask(FIRST, FIRST)
    mask = nn.combine_masks(nn.make_causal_mask(jnp.ones((BATCH, TIME))), padded)
    return nn.dot_product_attention(query, key, value, mask=mask)


def _heads_first_by_hand(query, key, value):
    query, key, value = (y.swapaxes(1, 2) for y in (query, key, value))
    logits = query @ key.swapaxes(-1, -2) / jnp.sqrt(SIZE)
    logits = jnp.where(jnp.tril(jnp.ones((TIME, TIME))) == 0, -jnp.inf, logits)
    weights = jnp.exp(logits - logits.max(-1, keepdims=True))
    weights = weights / weights.sum(-1, keepdims=True)
    return (weights @ value).swapaxes(1, 2)


def _with_weights_by_key_first(query, key, value):
    logits = jnp.einsum("bqhd,bkhd->bhqk", query, key) * SIZE**-0.5
    weights = jax.nn.softmax(jnp.where(causal(TIME), logits, -1e9), axis=-1)
    return jnp.einsum("bhkq,bkhd->bqhd", weights.swapaxes(-1, -2), value)


def _of_one_key_head_without_an_axis(query, key, value):
    logits = jnp.einsum("bqhd,bkd->bhqk", query, key[:, :, 0]) * 0.3
    scores = jax.nn.softmax(jnp.where(causal(TIME), logits, -1e9), axis=-1)
    return jnp.einsum("bhqk,bkd->bqhd", scores, value[:, :, 0])


def _slopes():
    places = jnp.arange(TIME)
    slopes = 2.0 ** -jnp.arange(1.0, HEADS + 1)
    return slopes[:, None, None] * (places[None, :] - places[:, None])


OF_HEADS = {  # functions of query, key and value
    "of_all": lambda q, k, v: attend(q, k, v, jnp.ones((), bool), jnp.float32),
    "causal_by_tril": lambda q, k, v: attend(q, k, v, causal(TIME), jnp.float32),
    "in_groups": lambda q, k, v: attend_grouped(
        q, k[:, :, :2], v[:, :, :2], causal(TIME), jnp.float32
    ),
    "of_padded_keys": lambda q, k, v: attend(q, k, v, FIRST[:, None, None, :], jnp.float32),
    "rows_without_keys": lambda q, k, v: attend(q, k, v, later_keys(), jnp.float32),
    "by_jax_nn": lambda q, k, v: jax.nn.dot_product_attention(
        q, k[:, :, :2], v[:, :, :2], is_causal=True
    ),
    "by_jax_nn_in_a_window": lambda q, k, v: jax.nn.dot_product_attention(
        q, k, v, is_causal=True, local_window_size=(5, 0), scale=0.3
    ),
    "by_linen": _of_linens_masks,
    "by_nnx": lambda q, k, v: nnx.dot_product_attention(
        q, k, v, mask=nnx.make_causal_mask(jnp.ones((BATCH, TIME)))
    ),
    "with_an_added_mask": lambda q, k, v: nn.dot_product_attention(
        q, k, v, bias=_added(later_keys(), LEAST)
    ),
    "with_a_billion_added": lambda q, k, v: nn.dot_product_attention(
        q, k, v, bias=_added(later_keys(), -1e9)
    ),
    "with_ten_thousand_added": lambda q, k, v: nn.dot_product_attention(
        q, k, v, bias=_added(later_keys(), -1e4)
    ),
    "heads_first_by_hand": _heads_first_by_hand,
    "of_scaled_query_and_key": lambda q, k, v: attend(
        q * 0.5, k * 0.75, v, causal(TIME), jnp.float32
    ),
    "of_one_array": lambda q, k, v: attend(q, q, q, causal(TIME), jnp.float32),
    "with_weights_by_key_first": _with_weights_by_key_first,
    "of_one_key_head_without_an_axis": _of_one_key_head_without_an_axis,
}
OF_LOGITS = {  # functions of scaled logits, before the softmax
    "with_a_mask_multiplied": lambda y: y + (1.0 - later_keys().astype(jnp.float32)) * LEAST,
    "with_minus_infinity_chosen": lambda y: jnp.where(later_keys(), y, -jnp.inf),
    "with_minus_infinity_added": lambda y: y + jnp.where(PAIRS, 0.0, -jnp.inf),
    "with_the_logarithm_of_a_mask_added": lambda y: y + jnp.log(PAIRS.astype(jnp.float32)),
    "with_the_least_half_of_a_mask": lambda y: jnp.where(
        PAIRS, y, float(jnp.finfo(jnp.float16).min)
    ),
    "with_a_mask_of_queries": lambda y: jnp.where(FIRST[:, None, :, None], y, -1e9),
    "with_a_mask_of_each_head": lambda y: jnp.where(
        jnp.arange(TIME) <= (3 * jnp.arange(HEADS) + 2)[:, None, None], y, -1e9
    ),
    "with_slopes_of_positions": lambda y: jnp.where(causal(TIME), y + _slopes(), -1e9),
}


def by_jax_nn_with_a_bias(weights, x):
    bias = weights[4, :TIME, :TIME] * 4 + weights[3, :TIME, None, :TIME][:4]
    bias = bias.reshape(1, HEADS, TIME, TIME)
    return out(weights, jax.nn.dot_product_attention(*heads(weights, x), bias))


def in_windows(weights, x):
    query, key, value = (y.reshape(BATCH, 4, 4, HEADS, SIZE) for y in heads(weights, x))
    bias = weights[4, :HEADS, :16].reshape(-1, 4, 4)
    logits = jnp.einsum("bwqhd,bwkhd->bwhqk", query, key) + bias
    return out(weights, jnp.einsum("bwhqk,bwkhd->bwqhd", jax.nn.softmax(logits), value))


def of_one_head(weights, x):
    query, key, value = (x @ weights[i] for i in range(3))
    scores = jax.nn.softmax(jnp.einsum("bqc,bkc->bqk", query, key) * 0.2, axis=-1)
    return out(weights, jnp.einsum("bqk,bkc->bqc", scores, value))


def of_one_example_mapped(weights, x):
    def one(x):
        query, key, value = heads(weights, x)
        scores = jax.nn.softmax(jnp.einsum("qhd,khd->hqk", query, key) * 0.2, axis=-1)
        return jnp.einsum("hqk,khd->qhd", scores, value)

    return out(weights, jax.vmap(one)(x))


def _residual(weights, x, read):
    y = attend(*heads(weights, read), causal(TIME), jnp.float32)
    return x + y.reshape(x.shape) @ weights[3]


def in_a_scan(weights, x):
    def layer(x, _):
        normed = nn.LayerNorm(use_scale=False, use_bias=False).apply({}, x)
        return _residual(weights, x, normed), None

    return jax.lax.scan(layer, x, None, length=2)[0] @ weights[4]


def in_a_checkpoint(weights, x):
    return jax.checkpoint(lambda x: _residual(weights, x, x))(x) @ weights[4]


# -- modules of libraries --------------------------------------------------------------------------

LINEN = jax.jit(nn.MultiHeadDotProductAttention(num_heads=HEADS).init)(KEY, X)
NNX = nnx.split(nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=nnx.Rngs(0)))
EQUINOX = eqx.filter_jit(eqx.nn.MultiheadAttention)(HEADS, WIDTH, key=KEY)


def _haiku(x, mask):
    init = hk.initializers.VarianceScaling(1.0)
    return hk.MultiHeadAttention(HEADS, SIZE, w_init=init)(x, x, x, mask)


HAIKU = hk.without_apply_rng(hk.transform(_haiku))
HAIKU_PARAMS = jax.jit(HAIKU.init)(
    KEY, X, np.broadcast_to(np.tri(TIME, dtype=bool), (BATCH, 1, TIME, TIME))
)


def _equinoxs_module(y):
    mask = jnp.broadcast_to(causal(TIME)[0, 0], (TIME, TIME))
    return jax.vmap(lambda y: EQUINOX(y, y, y, mask=mask))(y)


MODULES = {
    "by_linens_module": lambda y: nn.MultiHeadDotProductAttention(num_heads=HEADS).apply(
        LINEN, y, mask=causal(TIME)
    ),
    "by_nnxs_module": lambda y: nnx.merge(*NNX)(y, mask=causal(TIME)),
    "by_equinoxs_module": _equinoxs_module,
    "by_haikus_module": lambda y: HAIKU.apply(
        HAIKU_PARAMS, y, jnp.broadcast_to(causal(TIME), (BATCH, 1, TIME, TIME))
    ),
}

# -- all of them, as functions of (weights, x) -----------------------------------------------------


def read_by_products(fun):
    """Returns a function of query, key and value as one of weights and x."""
    return lambda weights, x: out(weights, fun(*heads(weights, x)))


def with_changed_logits(change):
    return read_by_products(lambda *qkv: of_logits(*qkv, change))


def _between_products(module):
    return lambda weights, x: module(x @ weights[0]) @ weights[4]


_IN_WHOLE = (
    *(by_jax_nn_with_a_bias, in_windows, of_one_head, of_one_example_mapped),
    *(in_a_scan, in_a_checkpoint),
)
FOUND = {
    **{name: read_by_products(fun) for name, fun in OF_HEADS.items()},
    **{name: with_changed_logits(change) for name, change in OF_LOGITS.items()},
    **{name: _between_products(module) for name, module in MODULES.items()},
    **{fun.__name__: fun for fun in _IN_WHOLE},
}


# -- what looks like attention and is not, or is read elsewhere ------------------------------------


def _logits(query, key):
    return jnp.einsum("bqhd,bkhd->bhqk", query, key)


def _summed(scores, value):
    return jnp.einsum("bhqk,bkhd->bqhd", scores, value)


def _exponentials(query, key):
    logits = _logits(query, key)
    return jnp.exp(logits - logits.max(-1, keepdims=True))


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


ALIKE_OF_HEADS = {
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


_ALIKE_IN_WHOLE = (
    *(weights_are_returned, weights_are_read_twice, logits_are_read_elsewhere, all_is_a_region),
    *(they_are_the_result, linens_module_drops_out, linens_module_sows_the_weights),
    equinoxs_module_drops_out,
)
NOT_FOUND = {
    **{name: read_by_products(fun) for name, fun in ALIKE_OF_HEADS.items()},
    **{f"logits_are_{name}": with_changed_logits(change) for name, change in LOGITS_ARE.items()},
    **{
        f"weights_are_{name}": _with_changed_weights(change) for name, change in WEIGHTS_ARE.items()
    },
    **{fun.__name__: fun for fun in _ALIKE_IN_WHOLE},
}
