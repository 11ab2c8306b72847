"""Attention's errors beside float64: by name or found, by a kernel or not, no larger than XLA's.

XLA's are those of attention by its definition, cast by hand: products low, softmax in float32.
"""

import functools
import types

import _attention_kernel as formulas
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _differential import equations
from _samples import chosen, normal
from _small import distance

import mpjax
from mpjax import dot_product_attention as attend

pytestmark = pytest.mark.no_leak_check("it traces everything anew: twice the time, same programs")
BATCH, QUERIES, KEYS, HEADS, SIZE = 4, 32, 32, 8, 16
LUCK = (
    1.25  # errors are norms of thousands of roundings, which fall on other numbers here and there
)
DTYPES = {"bf16-mixed": jnp.bfloat16, "16-mixed": jnp.float16}
NAMES = ("value", "query", "key", "values")


PADDED = (jnp.arange(KEYS) < jnp.array([32, 20, 9, 1])[:, None])[:, None, None]
PAIRS = chosen(3, 0.6, BATCH, 1, QUERIES, KEYS)
CASES = {  # heads of the keys, and what is asked of each
    "causal, grouped": (2, {"is_causal": True}),
    "padded": (8, {"mask": PADDED, "scale": 0.5}),
    "rows without keys": (8, {"mask": PAIRS.at[:, :, 5].set(False)}),
    "bias": (4, {"bias": normal(4, 1, HEADS, QUERIES, KEYS)}),
    "window": (8, {"is_causal": True, "local_window_size": (7, 0)}),
}
KERNELS = {
    "in a kernel": formulas,
    "its weights from the rows' sums": types.SimpleNamespace(
        NAME=formulas.NAME,
        why_not=formulas.why_not,
        why_not_installed=formulas.why_not,
        forward=formulas.forward,
        backward=formulas.recomputed.backward,
    ),
}
OUT = normal(8, HEADS, SIZE, HEADS * SIZE, scale=1 / 8)


def projected(fun):
    """Returns attention as a layer reads it: its heads are joined by a product."""
    return lambda *args: jnp.einsum("bqhd,hde->bqe", (y := fun(*args)), OUT.astype(y.dtype))


def by_definition(query, key, value, *, dtype=None, bias=None, mask=None, scale=None, **places):
    """Attention whose rows without keys give the mean of all values; cast by hand to a dtype."""
    product, low = jnp.einsum, query.dtype if dtype is None else dtype
    if dtype is not None:
        product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    query, key, value = (x.astype(low) for x in (query, key, value))
    key, value = (jnp.repeat(x, HEADS // x.shape[2], axis=2) for x in (key, value))
    logits = product("bqhd,bkhd->bhqk", query, key) * (SIZE**-0.5 if scale is None else scale)
    if bias is not None:
        logits = logits + bias.astype(logits.dtype)
    if places:
        distance = jnp.arange(QUERIES)[:, None] - jnp.arange(KEYS)
        before, _ = places.get("local_window_size", (KEYS, 0))
        mask = (distance >= 0) & (distance <= before)
    if mask is not None:
        logits = jnp.where(mask, logits, -1e9)
    weights = jax.nn.softmax(logits, axis=-1).astype(low)
    return product("bhqk,bkhd->bqhd", weights, value).astype(low)


def results(fun, *args):
    """Returns the value and the gradients of query, key and values, of a tangent's share."""
    *args, tangent = args

    def loss(*args):
        out = fun(*args).astype(tangent.dtype)
        return jnp.sum(out * tangent), out

    (_, out), grads = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(*args)
    return out, *grads


def errors(name, policy):
    """Returns of each way its errors in value and gradients, relative to the norm."""
    shared, kwargs = CASES[name]
    shapes = (BATCH, QUERIES, HEADS, SIZE), *[(BATCH, KEYS, shared, SIZE)] * 2
    args = [normal(i, *shape) for i, shape in enumerate(shapes)]
    args.append(normal(9, BATCH, QUERIES, HEADS * SIZE))
    plain = projected(functools.partial(by_definition, **kwargs))
    hand = projected(functools.partial(by_definition, dtype=DTYPES[policy], **kwargs))
    ways = {"found": plain, "by name": projected(functools.partial(attend, **kwargs))}

    def ours(*args):
        return {way: results(mpjax.autocast(fun, policy), *args) for way, fun in ways.items()}

    assert attentions(ours, *args) == len(ways)
    made = jax.jit(lambda *xs: {"hand": results(hand, *xs)} | ours(*xs))(*args)
    for where, kernel in KERNELS.items():
        with formulas.everywhere(kernel):
            by_kernel = jax.jit(lambda *xs: ours(*xs))(*args)
        made |= {f"{way}, {where}": outs for way, outs in by_kernel.items()}
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x), jnp.float64) for x in args]
        right = jax.jit(functools.partial(results, plain))(*wide)
        assert right[0].dtype == jnp.float64
    return {way: list(map(distance, found, right)) for way, found in made.items()}


def attentions(fun, *args):
    eqns = equations(jax.make_jaxpr(fun)(*args).jaxpr)
    return sum(eqn.primitive.name == "attention" for eqn in eqns)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("policy", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_no_error_is_larger_than_that_of_xlas_attention(name, policy):
    measured = errors(name, policy)
    by_hand = measured.pop("hand")
    assert len(measured) == 2 * (1 + len(KERNELS))
    for way, found in measured.items():
        for of, ours, xlas in zip(NAMES, found, by_hand, strict=True):
            assert ours < LUCK * xlas, f"{way}, {of}: {ours} beside {xlas}"
