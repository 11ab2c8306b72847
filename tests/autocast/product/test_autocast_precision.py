"""JAX's global precision is for the products that stay float32; one typed at a product stays."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import pytest
from _differential import equations
from _small import BF16, W, X, distance, loss, together
from jax import lax

from mpjax import autocast, explain, full_precision

SETTINGS = {
    "tensorfloat32": (lax.Precision.HIGH,) * 2,
    "high": (lax.Precision.HIGH,) * 2,
    "highest": (lax.Precision.HIGHEST,) * 2,
    "TF32_TF32_F32": lax.DotAlgorithmPreset.TF32_TF32_F32,
}


@contextlib.contextmanager
def once(setting):
    """What a user types at the top of a script."""
    before = jax.config.jax_default_matmul_precision
    jax.config.update("jax_default_matmul_precision", setting)
    try:
        yield
    finally:
        jax.config.update("jax_default_matmul_precision", before)


@full_precision()
def wide(x, w):
    return x @ w


@jax.custom_vjp
def with_rule(x, w):
    return x @ w


def _backward(kept, ct):
    x, w = kept
    return ct @ w.T, x.T @ ct


with_rule.defvjp(lambda x, w: (x @ w, (x, w)), _backward)

LOW = {
    "two layers": lambda x, w: jnp.tanh(x @ w) @ w,
    "a loop": lambda x, w: lax.fori_loop(0, 2, lambda _, c: jnp.tanh(c @ w), x),
    "a function with a rule": lambda x, w: with_rule(x, w),
    "checkpointed": jax.checkpoint(lambda x, w: jnp.tanh(x @ w) @ w),
}
WIDE = {
    "a region": wide,
    "a jit in a region": lambda x, w: full_precision()(jax.jit(lambda x, w: jnp.tanh(x @ w)))(x, w),
    "a loop in a region": lambda x, w: lax.fori_loop(0, 2, lambda _, c: wide(c, w), x),
    "a solver": lambda x, w: jnp.linalg.solve(jnp.eye(16) + 0.1 * wide(w.T, w), x.T),
    "iterations": lambda x, w: jax.scipy.sparse.linalg.cg(
        lambda v: v + wide(w, wide(w.T, v)), x[0]
    )[0],
}
TYPED = {
    "typed": lambda x, w: jnp.dot(x, w, precision="highest"),
    "around": lambda x, w: _around(x, w),
}


def _around(x, w):
    with jax.default_matmul_precision("highest"):
        return x @ w


def dots(fun):
    """The dtype and precision of every product of a function and of its gradient."""
    program = jax.make_jaxpr(lambda x, w: jax.grad(loss(fun), (0, 1))(x, w))(X, W)
    found = [e for e in equations(program.jaxpr) if e.primitive.name == "dot_general"]
    return {(e.invars[0].aval.dtype.name, e.params["precision"]) for e in found}


def gradients(funs):
    return together({name: jax.grad(loss(fun), (0, 1)) for name, fun in funs.items()}, X, W)


@functools.cache
def low_in_float32():
    return gradients(LOW)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("setting", SETTINGS)
def test_low_products_stay_low_and_have_their_own_precision(setting):
    fast = {name: autocast(fun, "bf16-mixed") for name, fun in LOW.items()}
    with once(setting):
        dots_of = {name: dots(fun) for name, fun in fast.items()}
        got = gradients(fast)
        rows = {name: explain(fun, "bf16-mixed")(X, W).rows for name, fun in LOW.items()}
    for name, found in dots_of.items():
        assert {dtype for dtype, _ in found} == {"bfloat16"}, name
        assert {p for _, p in found} <= {None, (lax.Precision.DEFAULT,) * 2}, name
        assert not any(r.reason == "its precision= asks for float32" for r in rows[name]), name
        assert distance(got[name], low_in_float32()[name]) < 16 * BF16, name


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", WIDE)
def test_products_that_stay_float32_have_the_global_precision(name, setting):
    with once(setting):
        found = dots(autocast(WIDE[name], "bf16-mixed"))
        assert found == dots(WIDE[name])  # JAX's solvers type a precision of their own, too
        assert ("float32", SETTINGS[setting]) in found


@pytest.mark.parametrize("setting", [None, *SETTINGS])
@pytest.mark.parametrize("name", TYPED)
def test_a_precision_typed_at_a_product_is_the_authors(name, setting):
    with once(setting):
        found = dots(autocast(TYPED[name], "bf16-mixed"))
        (row,) = explain(TYPED[name], "bf16-mixed")(X, W).rows
    assert found == {("float32", (lax.Precision.HIGHEST,) * 2)}
    assert row.reason == "its precision= asks for float32"


def test_what_is_asked_of_autocast_goes_before_the_global_precision():
    with once("highest"):
        fast = autocast(WIDE["a region"], "bf16-mixed", dot_precision=lax.Precision.HIGH)
        assert dots(fast) == {("float32", (lax.Precision.HIGH,) * 2)}


def test_an_inner_autocast_keeps_its_products_as_they_are():
    with once("TF32_TF32_F32"):
        inner = autocast(LOW["two layers"], "bf16-mixed")
        found = dots(autocast(lambda x, w: inner(x, w), "bf16-mixed"))
    assert {dtype for dtype, _ in found} == {"bfloat16"}
    assert {p for _, p in found} <= {None, (lax.Precision.DEFAULT,) * 2}


def test_a_default_set_where_a_gradient_is_pulled_back_is_remembered_for_no_other():
    """Programs of products are remembered: a later gradient would have it, and fail on a CPU."""

    def lowered(x):
        fun = autocast(lambda x: jnp.sum(jnp.tanh(x @ W) @ W), "bf16-mixed")
        return jax.jit(jax.grad(fun)).lower(x).as_text()

    x = X[:3]  # of a shape that no other test has
    _, pullback = jax.vjp(autocast(lambda x: jnp.tanh(x @ W) @ W, "bf16-mixed"), x)
    with once("TF32_TF32_F32"):
        jax.make_jaxpr(pullback)(x)
    assert "tf32" not in lowered(x)
