"""A checkpoint's policy saves the same products with autocast as without it, and saves them low."""

import jax
import jax.numpy as jnp
import pytest
from _differential import equations
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from mpjax import PolicyMap, autocast

SAVE = jax.checkpoint_policies
NEW = pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="JAX 0.12 has the first that works")
LEAKS = pytest.mark.no_leak_check("JAX's own new checkpoints keep a trace where a policy is given")


def low_operands(primitive, *avals, **_):
    return primitive.name == "dot_general" and avals[0].dtype.itemsize == 2


POLICIES = {
    "everything": SAVE.everything_saveable,
    "nothing": SAVE.nothing_saveable,
    "dots": SAVE.dots_saveable,
    "dots without batches": SAVE.dots_with_no_batch_dims_saveable,
    "anything except a name": SAVE.save_anything_except_these_names("inner"),
    "a name": SAVE.save_only_these_names("inner"),
    "any names but": SAVE.save_any_names_but_these("outer"),
    "both": SAVE.save_from_both_policies(SAVE.dots_saveable, SAVE.save_only_these_names("inner")),
    "all but products": lambda primitive, *_, **__: primitive.name != "dot_general",
    "products of 16 bits": low_operands,
}
EVERYTHING = ("everything", "anything except a name")
# Every product has a result of its own shape, so that a residual's shape tells which product it is.
X = jnp.ones((32, 64))
W = tuple(jnp.ones((64 + 8 * i, 72 + 8 * i)) for i in range(3))


def chain(x, ws):
    for w in ws:
        x = x @ w
    return x


def sines(x, ws):
    for w in ws:
        x = jnp.sin(x @ w)
    return x


def named(x, ws):
    x = checkpoint_name(x @ ws[0], "inner")
    return jnp.sin(x) @ ws[1] @ ws[2]


def inside(x, ws):
    return jax.jit(chain)(jnp.sin(x), ws[:2]) @ ws[2]


def attention(x, ws):
    """Long enough to be one operation, which saves its operands and no array of logits."""
    x = jnp.tile(x, (8, 1))
    q, k, v = (
        jnp.reshape(f(x) @ ws[0][:, :32], (1, 256, 2, 16)) for f in (jnp.sin, jnp.cos, jnp.tanh)
    )
    out = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k)), v)
    return out.reshape(256, 32) @ ws[1][:32]


def integers(x, ws):
    """A product whose dtypes the user chose, as a quantising library does."""
    x, w = (jnp.round(v * 16).astype(jnp.int8) for v in (x, ws[0]))
    dims = (((1,), (0,)), ((), ()))
    out = lax.dot_general(x, w, dims, preferred_element_type=jnp.int32)
    return jnp.sin(out.astype(jnp.float32) * ws[1][0, :1]) @ ws[1]


FUNCTIONS = (chain, sines, named, inside, attention, integers)


def products(fun):
    """Returns the shapes of the products of a function, but for an attention's logits."""
    eqns = equations(jax.make_jaxpr(fun)(X, W).jaxpr)
    shapes = {e.outvars[0].aval.shape for e in eqns if e.primitive.name == "dot_general"}
    return {shape for shape in shapes if shape[-2:] != (256, 256)}


def saved(fun, shapes):
    """Returns the residuals of some shapes, and their bytes an element."""
    kept = jax.eval_shape(lambda x, ws: jax.vjp(fun, x, ws)[1], X, W)
    sizes = [(r.shape, r.dtype.itemsize) for r in jax.tree.leaves(kept) if r.shape in shapes]
    return sorted(sizes)


def second(fun):
    """Returns the gradients of a function, of which `saved` takes derivatives again."""

    def gradients(x, ws):
        out, pullback = jax.vjp(fun, x, ws)
        return pullback(jnp.ones_like(out))

    return gradients


def mapped(fun):
    return lambda x, ws: jax.vmap(fun, (0, None))(jnp.stack([x, x]), ws)


def check(fun, around=lambda fun: fun, batch=()):
    """Asserts that each policy saves the same products with autocast as without it."""
    shapes = {(*batch, *shape) for shape in products(fun)}
    plain, low = {}, {}
    for name, policy in POLICIES.items():
        if fun is attention and name in EVERYTHING:
            continue  # without autocast it saves the logits, of which these are functions
        one = jax.checkpoint(fun, policy=policy)
        plain[name] = [shape for shape, _ in saved(around(one), shapes)]
        low[name] = [shape for shape, _ in saved(around(autocast(one, "bf16-mixed")), shapes)]
    assert low == plain
    assert plain["dots"] != plain["nothing"]


@pytest.mark.parametrize("fun", FUNCTIONS)
def test_a_policy_saves_the_products_that_it_saves_without_autocast(fun):
    check(fun)


@NEW
@LEAKS
@pytest.mark.parametrize("fun", [f for f in FUNCTIONS if f is not attention])
def test_so_does_it_in_tomorrows_checkpoints(fun):
    """They ask no policy about a primitive of another library: an attention is computed again."""
    jax.config.update("jax_remat3", True)
    jax.clear_caches()
    try:
        check(fun)
    finally:
        jax.config.update("jax_remat3", False)
        jax.clear_caches()


@pytest.mark.parametrize("fun", [chain, inside])
def test_so_does_it_where_a_derivative_is_differentiated_again(fun):
    check(fun, second)


def test_so_does_it_where_examples_are_mapped():
    check(attention, mapped, batch=(2,))


INT8 = PolicyMap("bf16-mixed", {"*": "int8_from_mixed_bfloat16"})


@pytest.mark.parametrize("policy", ["bf16-mixed", "16-mixed", INT8], ids=str)
@pytest.mark.parametrize("fun", [attention, chain])
def test_it_saves_them_low(fun, policy):
    low = autocast(jax.checkpoint(fun, policy=SAVE.dots_saveable), policy)
    sizes = {size for _, size in saved(low, products(fun))}
    assert sizes == {2}
