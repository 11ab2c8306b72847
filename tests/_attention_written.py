"""Attention as people write it: functions of (weights, x)."""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from _samples import normal
from flax import nnx

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

FOUND = {}


def found(fun):
    FOUND[fun.__name__] = fun
    return fun


def heads(weights, x):
    return [(x @ weights[i]).reshape(*x.shape[:-1], HEADS, SIZE) for i in range(3)]


def out(weights, y):
    return y.reshape(BATCH, TIME, WIDTH) @ weights[3] @ weights[4]


def _fewer(weights, x):
    query, key, value = heads(weights, x)
    return query, key[:, :, :2], value[:, :, :2]


def of_logits(weights, x, change):
    """Returns attention whose logits are changed by a function before the softmax."""
    query, key, value = heads(weights, x)
    logits = change(jnp.einsum("bqhd,bkhd->bhqk", query, key) * SIZE**-0.5)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits, axis=-1), value)


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


@found
def of_all(weights, x):
    return out(weights, attend(*heads(weights, x), jnp.ones((), bool), jnp.float32))


@found
def causal_by_tril(weights, x):
    return out(weights, attend(*heads(weights, x), causal(TIME), jnp.float32))


@found
def in_groups(weights, x):
    return out(weights, attend_grouped(*_fewer(weights, x), causal(TIME), jnp.float32))


@found
def of_padded_keys(weights, x):
    return out(weights, attend(*heads(weights, x), FIRST[:, None, None, :], jnp.float32))


@found
def rows_without_keys(weights, x):
    mask = LAST[:, None, None, :] & causal(TIME)
    return out(weights, attend(*heads(weights, x), mask, jnp.float32))


@found
def by_jax_nn(weights, x):
    return out(weights, jax.nn.dot_product_attention(*_fewer(weights, x), is_causal=True))


@found
def by_jax_nn_in_a_window(weights, x):
    attention = jax.nn.dot_product_attention
    y = attention(*heads(weights, x), is_causal=True, local_window_size=(5, 0), scale=0.3)
    return out(weights, y)


@found
def by_jax_nn_with_a_bias(weights, x):
    bias = (weights[4, :TIME, :TIME] * 4 + weights[3, :TIME, None, :TIME][:4]).reshape(
        1, HEADS, TIME, TIME
    )
    return out(weights, jax.nn.dot_product_attention(*heads(weights, x), bias))


@found
def by_linen(weights, x):
    padded = nn.make_attention_mask(FIRST, FIRST)
    mask = nn.combine_masks(nn.make_causal_mask(jnp.ones((BATCH, TIME))), padded)
    return out(weights, nn.dot_product_attention(*heads(weights, x), mask=mask))


@found
def by_nnx(weights, x):
    mask = nnx.make_causal_mask(jnp.ones((BATCH, TIME)))
    return out(weights, nnx.dot_product_attention(*heads(weights, x), mask=mask))


def _added(mask, least):
    """A mask as transformers' Flax models add it."""
    shape = (BATCH, 1, TIME, TIME)
    cases = jnp.full(shape, 0.0), jnp.full(shape, least)
    return jax.lax.select(jnp.broadcast_to(mask, shape), *cases)


@found
def with_an_added_mask(weights, x):
    bias = _added(LAST[:, None, None, :] & causal(TIME), LEAST)
    return out(weights, nn.dot_product_attention(*heads(weights, x), bias=bias))


@found
def with_a_billion_added(weights, x):
    bias = _added(LAST[:, None, None, :] & causal(TIME), -1e9)
    return out(weights, nn.dot_product_attention(*heads(weights, x), bias=bias))


@found
def with_ten_thousand_added(weights, x):
    bias = _added(LAST[:, None, None, :] & causal(TIME), -1e4)
    return out(weights, nn.dot_product_attention(*heads(weights, x), bias=bias))


@found
def heads_first_by_hand(weights, x):
    query, key, value = (y.swapaxes(1, 2) for y in heads(weights, x))
    logits = query @ key.swapaxes(-1, -2) / jnp.sqrt(SIZE)
    logits = jnp.where(jnp.tril(jnp.ones((TIME, TIME))) == 0, -jnp.inf, logits)
    weights_of_keys = jnp.exp(logits - logits.max(-1, keepdims=True))
    weights_of_keys = weights_of_keys / weights_of_keys.sum(-1, keepdims=True)
    return out(weights, (weights_of_keys @ value).swapaxes(1, 2))


@found
def with_a_mask_multiplied(weights, x):
    bias = (1.0 - (LAST[:, None, None, :] & causal(TIME)).astype(jnp.float32)) * LEAST
    return out(weights, of_logits(weights, x, lambda logits: logits + bias))


@found
def with_minus_infinity_chosen(weights, x):
    mask = LAST[:, None, None, :] & causal(TIME)
    return out(weights, of_logits(weights, x, lambda y: jnp.where(mask, y, -jnp.inf)))


@found
def with_minus_infinity_added(weights, x):
    bias = jnp.where(PAIRS, 0.0, -jnp.inf)
    return out(weights, of_logits(weights, x, lambda logits: logits + bias))


@found
def with_the_logarithm_of_a_mask_added(weights, x):
    bias = jnp.log(PAIRS.astype(jnp.float32))
    return out(weights, of_logits(weights, x, lambda logits: logits + bias))


@found
def with_the_least_half_of_a_mask(weights, x):
    least = float(jnp.finfo(jnp.float16).min)
    return out(weights, of_logits(weights, x, lambda y: jnp.where(PAIRS, y, least)))


@found
def with_a_mask_of_queries(weights, x):
    mask = FIRST[:, None, :, None]
    return out(weights, of_logits(weights, x, lambda y: jnp.where(mask, y, -1e9)))


@found
def with_a_mask_of_each_head(weights, x):
    mask = jnp.arange(TIME) <= (3 * jnp.arange(HEADS) + 2)[:, None, None]
    return out(weights, of_logits(weights, x, lambda y: jnp.where(mask, y, -1e9)))


@found
def with_slopes_of_positions(weights, x):
    places = jnp.arange(TIME)
    slopes = 2.0 ** -jnp.arange(1.0, HEADS + 1)
    bias = slopes[:, None, None] * (places[None, :] - places[:, None])
    return out(weights, of_logits(weights, x, lambda y: jnp.where(causal(TIME), y + bias, -1e9)))


@found
def of_scaled_query_and_key(weights, x):
    query, key, value = heads(weights, x)
    return out(weights, attend(query * 0.5, key * 0.75, value, causal(TIME), jnp.float32))


@found
def of_one_array(weights, x):
    (query, *_) = heads(weights, x)
    return out(weights, attend(query, query, query, causal(TIME), jnp.float32))


@found
def of_one_key_head_without_an_axis(weights, x):
    query, key, value = heads(weights, x)
    logits = jnp.einsum("bqhd,bkd->bhqk", query, key[:, :, 0]) * 0.3
    scores = jax.nn.softmax(jnp.where(causal(TIME), logits, -1e9), axis=-1)
    return out(weights, jnp.einsum("bhqk,bkd->bqhd", scores, value[:, :, 0]))


@found
def in_windows(weights, x):
    query, key, value = (y.reshape(BATCH, 4, 4, HEADS, SIZE) for y in heads(weights, x))
    logits = jnp.einsum("bwqhd,bwkhd->bwhqk", query, key) + weights[4, :HEADS, :16].reshape(
        -1, 4, 4
    )
    return out(weights, jnp.einsum("bwhqk,bwkhd->bwqhd", jax.nn.softmax(logits), value))


@found
def by_linens_module(weights, x):
    module = nn.MultiHeadDotProductAttention(num_heads=HEADS)
    return module.apply(LINEN, x @ weights[0], mask=causal(TIME)) @ weights[4]


@found
def by_nnxs_module(weights, x):
    module = nnx.merge(*NNX)
    return module(x @ weights[0], mask=causal(TIME)) @ weights[4]


@found
def by_equinoxs_module(weights, x):
    mask = jnp.broadcast_to(causal(TIME)[0, 0], (TIME, TIME))
    return jax.vmap(lambda y: EQUINOX(y, y, y, mask=mask))(x @ weights[0]) @ weights[4]


@found
def by_haikus_module(weights, x):
    y = x @ weights[0]
    return (
        HAIKU.apply(HAIKU_PARAMS, y, jnp.broadcast_to(causal(TIME), (BATCH, 1, TIME, TIME)))
        @ (weights[4])
    )


@found
def of_one_head(weights, x):
    query, key, value = (x @ weights[i] for i in range(3))
    scores = jax.nn.softmax(jnp.einsum("bqc,bkc->bqk", query, key) * 0.2, axis=-1)
    return out(weights, jnp.einsum("bqk,bkc->bqc", scores, value))


@found
def of_one_example_mapped(weights, x):
    def one(x):
        query, key, value = heads(weights, x)
        scores = jax.nn.softmax(jnp.einsum("qhd,khd->hqk", query, key) * 0.2, axis=-1)
        return jnp.einsum("hqk,khd->qhd", scores, value)

    return out(weights, jax.vmap(one)(x))


@found
def in_a_scan(weights, x):
    def layer(x, _):
        y = nn.LayerNorm(use_scale=False, use_bias=False).apply({}, x)
        y = attend(*heads(weights, y), causal(TIME), jnp.float32)
        return x + y.reshape(x.shape) @ weights[3], None

    return jax.lax.scan(layer, x, None, length=2)[0] @ weights[4]


@found
def in_a_checkpoint(weights, x):
    @jax.checkpoint
    def layer(x):
        y = attend(*heads(weights, x), causal(TIME), jnp.float32)
        return x + y.reshape(x.shape) @ weights[3]

    return layer(x) @ weights[4]
