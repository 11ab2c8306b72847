"""Regions, paths, rules and names reach inside small functions, and prove nothing by themselves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _planned import op_rules
from _samples import normal

import mpjax
from mpjax import PolicyMap, PolicyWarning, autocast, full_precision

X = normal(0, 8, 16)
W = normal(1, 16, 16, scale=1 / 4)
POLICIES = {"bf16": "bf16-mixed", "f16": "16-mixed"}


def inexact(fun, policy="bf16-mixed", **options):
    """Returns how far a function of a product is from itself on the product that autocast makes."""
    low = autocast(lambda x, w: x @ w, policy)(X, W)  # an output: not rounded
    found = autocast(lambda x, w: fun(x @ w), policy, **options)(X, W)
    exact = fun(low)
    return float(jnp.abs(found - exact).max() / jnp.abs(exact).max())


def region(fun):
    @jax.jit
    def inside(y):
        with mpjax.full_precision():
            return fun(y)

    return inside


def inner_autocast(fun):
    return jax.jit(autocast(fun, "float32"))


@pytest.mark.parametrize("within", [region, inner_autocast])
def test_a_region_inside_a_small_function_is_heeded(within):
    def fun(y):
        for _ in range(3):
            y = within(lambda y: y * 1.01 + 0.3)(y)
        return y

    explained = mpjax.explain(lambda x, w: fun(x @ w) @ w, "bf16-mixed")(X, W)
    dtypes = {row.dtype for row in explained.rows if row.operation in ("mul", "add")}
    assert dtypes == {"f32"}


def test_a_path_inside_a_small_function_is_heeded():
    @jax.jit
    def inside(y):
        with jax.named_scope("gate"):
            return jnp.tanh(y) * 3

    policy = mpjax.PolicyMap("bf16-mixed", {"gate": "float32"})
    rows = mpjax.explain(lambda x, w: inside(x @ w) @ w, policy)(X, W).rows
    assert {r.dtype for r in rows if r.module == "gate"} == {"f32"}


def test_a_policy_path_holds_a_whole_activation_in_float32():
    def fun(x, w):
        with jax.named_scope("body"):
            y = x @ w
        with jax.named_scope("head"):
            return jax.nn.gelu(y) * 2

    policy = mpjax.PolicyMap("bf16-mixed", {"head": "float32"})
    rows = mpjax.explain(fun, policy)(X, W).rows
    assert {r.dtype for r in rows if r.module == "head"} == {"f32"}


@pytest.mark.parametrize("rules", [{"tanh": "full"}, {"silu": "full"}])
def test_a_rule_of_full_reads_a_product_that_is_not_rounded(rules):
    (name,) = rules
    fun = {"tanh": jnp.tanh, "silu": jax.nn.silu}[name]
    assert inexact(fun, rules=rules) < 1e-6
    assert inexact(jax.jit(lambda y: fun(y) * 2), rules=rules) < 1e-6
    assert inexact(lambda y: fun(y) @ W) > 1e-4  # without the rule it would be seen


@pytest.mark.parametrize("dtype", POLICIES)
def test_a_name_proves_nothing(dtype):
    def called(name):
        def fun(y):
            return jnp.exp(y)

        fun.__name__ = fun.__qualname__ = name
        return jax.jit(fun)

    def result(name):
        fun = autocast(lambda x, w: jnp.cumsum(called(name)(12 + x @ w), axis=0), POLICIES[dtype])
        return np.asarray(fun(X, W))

    assert np.isfinite(result("mish")).all()
    assert np.array_equal(result("mish"), result("boltzmann"))


@pytest.mark.parametrize(
    "name", ["celu", "elu", "gelu", "log_sigmoid", "mish", "selu", "silu", "softplus"]
)
def test_an_activation_of_jax_is_known_by_what_it_computes(name):
    fun = jax.jit(getattr(jax.nn, name))  # gelu is inlined without
    rows = mpjax.explain(lambda x, w: fun(x @ w) @ w, "bf16-mixed")(X, W).rows
    assert {r.dtype for r in rows if r.operation == name} == {"bf16"}


def test_both_forms_of_gelu_are_known():
    def fun(x, w):
        tail = jax.jit(jax.nn.gelu, static_argnames="approximate")
        return tail(tail(x @ w, approximate=False) @ w) @ w

    rows = mpjax.explain(fun, "bf16-mixed")(X, W).rows
    assert {r.dtype for r in rows if r.operation == "gelu"} == {"bf16"}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", sorted(op_rules.ACTIVATIONS & set(dir(jax.nn))))
def test_derivatives_that_carry_an_activations_name_are_taken_for_none(name):
    fun = jax.jit(getattr(jax.nn, name))

    def inner(x, w):
        return jax.value_and_grad(lambda x: jnp.sum(fun(x @ w)))(x)

    value, slope = autocast(inner, "bf16-mixed")(X, W)
    want, true = inner(X, W)  # a slope jumps where a product is rounded across a kink
    assert abs(float(value - want)) <= 0.02 * float(jnp.abs(fun(X @ W)).sum())
    assert float(jnp.linalg.norm(slope - true)) <= 0.2 * float(jnp.linalg.norm(true))


def test_regions_and_paths_reach_into_what_was_traced_before():
    def layer(x):
        with jax.named_scope("inner"):
            return jnp.tanh(x @ W)

    traced = jax.jit(layer)
    want = traced(X)

    def fun(x):
        with full_precision():
            kept = traced(x)
        return kept, traced(x)

    kept, low = jax.jit(autocast(fun, "bf16-mixed"))(X)
    assert jnp.array_equal(kept, want)
    assert not jnp.array_equal(low, want)
    by_path = autocast(traced, PolicyMap("bf16-mixed", {"inner": "float32"}))
    assert jnp.array_equal(by_path(X), want)
    with pytest.warns(PolicyWarning, match=r"(?s)'iner'.*Nearest: 'inner'"):
        autocast(traced, PolicyMap("bf16-mixed", {"iner": "float32"}))(X)
