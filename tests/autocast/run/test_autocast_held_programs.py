"""Programs that a primitive holds beside rules of its author's: entered, and their rules too."""

import contextlib

import jax
import jax.numpy as jnp
import pytest
from _products import primitives
from _small import BF16, W, X, distance, loss
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import xla_metadata
from jax.experimental.compute_on import compute_on
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.sparse import BCOO

from mpjax import autocast, explain

# -- programs with rules: each rule computes twice what the program says, so that it is told apart -


def layer(x, w):
    return jnp.tanh(x @ w)


def root(x, w):
    return lax.custom_root(
        lambda y: y - 0.1 * jnp.tanh(y @ w) - x,
        x,
        lambda f, y: lax.fori_loop(0, 9, lambda _, y: y - f(y), y),
        lambda g, y: 2 * lax.fori_loop(0, 9, lambda _, z: z + (y - g(z)), y),
    )


@jax.custom_batching.custom_vmap
def with_vmap(x, w):
    return layer(x, w)


@with_vmap.def_vmap
def _with_vmap_rule(size, batched, x, w):
    del size
    assert batched == [True, False]
    return 2 * jnp.tanh(jnp.einsum("bij,jk->bik", x, w)), True


partitioned = custom_partitioning(layer)
partitioned.def_partition(
    partition=lambda mesh, shapes, out: (mesh, layer, out.sharding, [s.sharding for s in shapes]),
    infer_sharding_from_operands=lambda mesh, shapes, out: out.sharding,
    sharding_rule="i j, j k -> i k",
)


def linear(x, w):
    call = jax.custom_derivatives.linear_call
    return call(lambda w, x: x @ w, lambda w, ct: 2 * ct @ w.T, w, x)


@jax.custom_vjp
def ruled(x, w):
    return layer(x, w)


def _ruled_backward(kept, ct):
    x, w, y = kept
    ct = 2 * ct * (1 - y * y)
    return ct @ w.T, x.T @ ct


def _ruled_forward(x, w):
    y = layer(x, w)
    return y, (x, w, y)


ruled.defvjp(_ruled_forward, _ruled_backward)


@jax.custom_jvp
def ruled_forward(x, w):
    return layer(x, w)


@ruled_forward.defjvp
def _(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    y = layer(x, w)
    return y, 2 * (1 - y * y) * (dx @ w + x @ dw)


optimised = jax.custom_vjp(lambda x, w: jnp.tanh(x @ w))
optimised.defvjp(_ruled_forward, _ruled_backward, optimize_remat=True)

by_name = jax.checkpoint(
    lambda x, w: jnp.tanh(checkpoint_name(layer(x, w), "kept") @ w),
    policy=jax.checkpoint_policies.save_only_these_names("kept"),
)

NONE, GRAD, VMAP, ALL = "", "grad", "vmap", "grad vmap"
# The function, and what JAX can do with it beside computing it.
HELD = {
    "composite": (lambda x, w: lax.composite(layer, "my.mlp", version=2)(x, w), NONE),
    "custom_root": (root, ALL),
    "custom_vmap": (with_vmap, VMAP),
    "custom_partitioning": (partitioned, NONE),
    "linear_call": (linear, NONE),
    "optimize_remat": (optimised, ALL),
}
FLAGS = {
    "jax_scan3": (
        lambda x, w: lax.scan(lambda c, _: (layer(c, w), None), x, None, length=3)[0],
        NONE,
    ),
    "jax_remat3": (jax.checkpoint(lambda x, w: layer(x, w) @ w), ALL),
    "jax_remat3 by name": (by_name, ALL),
    "jax_custom_vjp3": (ruled, ALL),
    "jax_custom_jvp3": (ruled_forward, ALL),
}


def types(tree):
    return jax.tree.map(jax.typeof, tree)


def results(fun, how):
    forms = {"forward": lambda f: f}
    if "grad" in how:
        forms["gradient"] = lambda f: jax.grad(loss(f), (0, 1))
    if "vmap" in how:
        forms["vmap"] = lambda f: lambda x, w: jax.vmap(f, (0, None))(jnp.stack([x, 2 * x]), w)
    return [jax.jit(form(fun))(X, W) for form in forms.values()]


def check(fun, how, want):
    for some in zip(results(autocast(fun, "bf16-mixed"), how), want, strict=True):
        assert types(some[0]) == types(some[1])
        assert 0 < distance(*some) < 16 * BF16
    rows = explain(fun, "bf16-mixed")(X, W).rows
    assert {r.dtype for r in rows if r.operation == "dot_general"} == {"bf16"}


@pytest.mark.no_leak_check("a linear_call keeps its operands in JAX itself")
@pytest.mark.parametrize("name", HELD)
def test_products_of_a_program_with_rules_are_low(name):
    fun, how = HELD[name]
    check(fun, how, results(fun, how))


@contextlib.contextmanager
def flag(name):
    """Programs as JAX will make them by default one day."""
    jax.config.update(name, True)
    jax.clear_caches()
    try:
        yield
    finally:
        jax.config.update(name, False)
        jax.clear_caches()


LEAKS = pytest.mark.no_leak_check("JAX's own new checkpoints keep a trace where a policy is given")


@LEAKS
@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="JAX 0.12 has the first that works")
@pytest.mark.parametrize("name", FLAGS)
def test_products_of_tomorrows_programs_are_low(name):
    fun, how = FLAGS[name]
    want = results(fun, how)  # JAX 0.12 computes nothing in a jitted loop of its new kind
    with flag(name.split()[0]):
        check(fun, how, want)


@LEAKS
@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="JAX 0.12 has the first that works")
def test_a_rule_of_tomorrow_has_no_rule_of_ours_inside():
    x, w = jnp.ones((64, 16)), jnp.full((16, 128), 0.1)  # so large that a group is computed again
    with flag("jax_custom_jvp3"):
        grads = jax.grad(loss(autocast(ruled_forward, "bf16-mixed")), (0, 1))
        shapes = [grad.shape for grad in jax.eval_shape(grads, x, w)]
    assert shapes == [x.shape, w.shape]


@LEAKS
@pytest.mark.parametrize("is_new", [False, True])
def test_what_a_checkpoint_keeps_by_name_is_low(is_new):
    if is_new and jax.__version_info__ < (0, 12):
        pytest.skip("JAX 0.12 has the first that works")
    with flag("jax_remat3") if is_new else contextlib.nullcontext():
        low = autocast(by_name, "bf16-mixed")
        kept = jax.eval_shape(lambda x, w: jax.vjp(low, x, w)[1], jnp.tile(X, (64, 1)), W)
    found = [r.dtype for r in jax.tree.leaves(kept) if r.shape == (512, 16)]
    assert sorted(dtype.name for dtype in found) == ["bfloat16", "float32"]  # and the input


@pytest.mark.no_leak_check("a linear_call keeps its operands in JAX itself")
def test_a_linear_call_is_transposed_by_its_author():
    fast = autocast(linear, "bf16-mixed")
    (got,) = jax.linear_transpose(lambda x: fast(x, W), X)(X)
    assert distance(got, 2 * X @ W.T) < 4 * BF16


# -- rules that loop over tangents ---------------------------------------------------------------


def by_loop(step):
    """A function whose rule makes its tangent by a loop that reads a product of the others."""

    @jax.custom_jvp
    def fun(x, w):
        return jnp.sin(x @ w)

    @fun.defjvp
    def _(primals, tangents):
        (x, w), (dx, dw) = primals, tangents
        return fun(x, w), jnp.cos(x @ w) * step(dx @ w + x @ dw, w)

    return fun


RULES = {
    "fori_loop": lambda d, w: lax.fori_loop(0, 3, lambda _, c: 0.1 * (c @ w) + d, 0 * d),
    "scan": lambda d, w: lax.scan(lambda c, v: (0.1 * (c @ v) + d, None), 0 * d, jnp.stack([w, w]))[
        0
    ],
    "vmapped": lambda d, w: jax.vmap(
        lambda r: lax.fori_loop(0, 3, lambda _, c: 0.1 * (c @ w) + r, 0 * r)
    )(d),
}


@pytest.mark.parametrize("name", RULES)
def test_a_rule_that_loops_over_tangents_is_transposed_through_what_the_loop_reads(name):
    fun = by_loop(RULES[name])
    fast = autocast(fun, "bf16-mixed")
    for form in (jax.grad, jax.jacfwd):
        got, want = (form(loss(f), (0, 1))(X, W) for f in (fast, fun))
        assert distance(got, want) < 8 * BF16


# -- where, or as what, a program runs ---------------------------------------------------------


def on_the_host(x, w):
    if jax.__version_info__ < (0, 11):  # a context there
        with compute_on("device_host"):
            return layer(x, w)
    space = jax.memory.Space.Device
    return compute_on(layer, compute_type="device_host", out_memory_spaces=space)(x, w)


def marked(x, w):
    with xla_metadata.set_xla_metadata(mark="here"):
        return layer(x, w)


PLACED = {"on the host": (on_the_host, '"host"'), "marked": (marked, 'mark = "here"')}
if hasattr(xla_metadata, "xla_metadata_call"):
    called = xla_metadata.xla_metadata_call(layer, mark="here")
    PLACED["called with a mark"] = called, 'mark = "here"'


def marked_lines(fun, mark):
    """Counts the products and calls of a lowered gradient: those that are marked, and the rest."""
    traced = jax.jit(jax.grad(loss(fun), (0, 1))).trace(X, W)
    lines = traced.lower(lowering_platforms=("cuda",)).as_text().splitlines()
    found = [mark in line for line in lines if "dot_general" in line or " call @" in line]
    return found.count(True), found.count(False)


@pytest.mark.parametrize("name", PLACED)
def test_products_stay_where_they_are_placed_and_no_others(name):
    fun, mark = PLACED[name]

    def both(x, w):
        return layer(fun(x, w) @ w, w)

    check(both, GRAD, results(both, GRAD))
    primitives._traced.cache_clear()
    jax.clear_caches()
    assert marked_lines(autocast(both, "bf16-mixed"), mark) == marked_lines(both, mark)
    marked, others = marked_lines(autocast(layer, "bf16-mixed"), mark)
    assert (marked, others) == (0, 3)


# -- what cannot be entered ----------------------------------------------------------------------


def sparse(x, w):
    return (BCOO.fromdense(w, nse=w.size) @ (x @ w).T) @ jnp.ones((8, 2))


def test_what_has_no_rule_has_a_row_and_counts():
    table = explain(sparse, "bf16-mixed")(X, W)
    rows = {r.operation: (r.dtype, r.reason) for r in table.rows}
    assert rows["bcoo_dot_general"] == ("f32", "no rule: as traced, float32")
    assert "no rule: as traced, float32" in str(table)
    assert table.summary()[1].startswith("other operations: 2 f32")
