"""A cache: an argument that a function updates and hands back. It keeps its dtype, in any cut."""

import jax
import jax.numpy as jnp
import pytest
from _differential import equations
from jax import lax

import mpjax
from mpjax._autocast.known import updated

W = jnp.eye(8)
X = jnp.ones((4, 8))
POLICIES = ["bf16-mixed", "16-mixed", "int8_from_mixed_bfloat16", "O2"]
pytestmark = pytest.mark.filterwarnings("ignore:.*quantises no product")


def _dtype(array):
    return array.dtype


def _row(w, x, cache):
    return (x @ w).astype(cache.dtype)[:, None]


def _in_a_scan(w, x, cache, i):
    """Layers, each of which has a part of the cache."""

    def layer(x, part):
        part = lax.dynamic_update_slice(part, (x @ w).astype(part.dtype)[None], (i, 0, 0))
        return x + part.sum(0).astype(x.dtype), part

    return lax.scan(layer, x, jnp.stack([cache.transpose(1, 0, 2)] * 2))[1][1].transpose(1, 0, 2)


UPDATES = {
    "as it is": lambda w, x, cache, i: cache,
    "a slice": lambda w, x, cache, i: lax.dynamic_update_slice(cache, _row(w, x, cache), (0, i, 0)),
    "an index": lambda w, x, cache, i: cache.at[:, i].set(_row(w, x, cache)[:, 0]),
    "an addition": lambda w, x, cache, i: cache.at[:, i].add(_row(w, x, cache)[:, 0]),
    "a mask": lambda w, x, cache, i: jnp.where(
        (jnp.arange(16) == i)[:, None], _row(w, x, cache), cache
    ),
    "a window": lambda w, x, cache, i: jnp.concatenate([cache[:, 1:], _row(w, x, cache)], 1),
    "a ring": lambda w, x, cache, i: jnp.roll(cache, 1, 1).at[:, 0].set(_row(w, x, cache)[:, 0]),
    "an order of beams": lambda w, x, cache, i: cache[jnp.argsort((x @ w)[:, 0])],
    "a branch": lambda w, x, cache, i: lax.cond(
        i > 3, lambda c: c, lambda c: c.at[0].set(0), cache
    ),
    "a loop": lambda w, x, cache, i: lax.fori_loop(
        0, 2, lambda i, c: c.at[:, i].set(_row(w, x, c)[:, 0]), cache
    ),
    "a scan over layers": _in_a_scan,
    "a row of each request": lambda w, x, cache, i: jax.vmap(
        lambda c, r: lax.dynamic_update_slice(c, r, (i, 0))
    )(cache, _row(w, x, cache)),
}
CUTS = {"uncut": lambda fun: fun, "jit": jax.jit, "checkpoint": jax.checkpoint}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", UPDATES)
def test_law_of_caches_a_cache_comes_back_in_its_dtype(name, cut, policy, dtype):
    def step(w, x, cache, i):
        new = CUTS[cut](UPDATES[name])(w, x, cache, i)
        return {"logits": x @ w, "cache": new}

    cache = jnp.zeros((4, 16, 8), dtype)
    fast = mpjax.autocast(step, policy)
    got = jax.eval_shape(fast, W, X, cache, 2)
    assert got["cache"].dtype == cache.dtype
    assert got["logits"].dtype == jnp.float32
    loop = lambda c: lax.fori_loop(0, 2, lambda i, c: fast(W, X, c, i)["cache"], c)  # noqa: E731
    assert jax.eval_shape(loop, cache).dtype == cache.dtype


def test_a_cache_of_16_bits_is_donated():
    step = mpjax.autocast(UPDATES["a slice"], "bf16-mixed")
    cache = jnp.zeros((4, 16, 8), jnp.bfloat16)
    compiled = jax.jit(step, donate_argnums=2).lower(W, X, cache, 2).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == cache.nbytes


@pytest.mark.parametrize(
    "fun",
    [
        lambda x: x @ x,
        lambda x: x * 2,
        lambda x: jnp.tanh(x),
        lambda x: x[:4],
        lambda x: x + x[0],
        lambda x: x.astype(jnp.float32).astype(x.dtype),
    ],
)
def test_what_a_function_computes_has_the_output_dtype(fun):
    x = jnp.ones((8, 8), jnp.bfloat16)
    assert mpjax.autocast(fun, "bf16-mixed")(x).dtype == jnp.float32
    assert updated.keeps_dtype(jax.make_jaxpr(fun)(x)) == (False,)


def test_a_module_hands_its_cache_back_in_its_dtype():
    nn = pytest.importorskip("flax.linen")
    attention = nn.MultiHeadDotProductAttention(2, decode=True, dtype=jnp.bfloat16)
    made = attention.init(jax.random.key(0), jnp.ones((2, 4, 8)))
    cache = jax.tree.map(
        lambda a: a.astype(jnp.bfloat16) if a.dtype == jnp.float32 else a, made["cache"]
    )

    def step(params, cache, x):
        out, new = attention.apply({"params": params, "cache": cache}, x, mutable=["cache"])
        return out, new["cache"]

    fast = jax.jit(mpjax.autocast(step, "bf16-mixed"))
    for _ in range(3):
        out, new = fast(made["params"], cache, jnp.ones((2, 1, 8)))
        assert jax.tree.map(_dtype, new) == jax.tree.map(_dtype, cache)
        assert out.dtype == jnp.float32
        cache = new
    assert fast._cache_size() == 1


def _casts_inside_the_loop(fun, *args):
    """How many casts of a weight to bfloat16 the `while` of a program holds, at any depth."""
    jaxpr = jax.make_jaxpr(mpjax.autocast(fun, "bf16-mixed"))(*args).jaxpr
    (loop,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "while")
    casts = [
        eqn.outvars[0].aval
        for eqn in equations(loop.params["body_jaxpr"].jaxpr)
        if eqn.primitive.name == "convert_element_type"
    ]
    return sum(made.dtype == jnp.bfloat16 and made.shape == (8, 8) for made in casts)


LAYERS = {
    "one": lambda ws, x: jnp.tanh(x @ ws[0]),
    "each of a list": lambda ws, x: jnp.tanh(jnp.tanh(x @ ws[0]) @ ws[1]),
    "a stack": lambda ws, x: lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0],
    "a stack in a jit": lambda ws, x: jax.jit(
        lambda ws, x: lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]
    )(ws, x),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_loop_of_tokens_casts_no_weight_in_each_turn(name):
    ws = jnp.ones((2, 8, 8)) if "stack" in name else [W, W]

    def decode(ws, x):
        return lax.while_loop(
            lambda s: s[0] < 9, lambda s: (s[0] + 1, LAYERS[name](ws, s[1])), (0, x)
        )

    assert _casts_inside_the_loop(decode, ws, X) == 0
