"""The affine part of a norm over more than rows: its derivative adds up each array once."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _differential import equations
from _directions import directions
from _hinted import centred, hints
from _planned import Planned
from _samples import normal
from jax import lax

from mpjax import autocast

F32 = 2.0**-24
X, W = normal(0, 8, 16, 16), normal(1, 16, 16, scale=1 / 4)
SCALE, BIAS = (jnp.asarray(1 + np.asarray(normal(seed, 16, scale=0.1))) for seed in (2, 3))


def moments(x, axes):
    mean = jnp.mean(x, axes, keepdims=True)
    return mean, jnp.mean(x * x, axes, keepdims=True) - mean**2


def by_product(x, scale, bias, axes=(0, 1)):
    mean, var = moments(x, axes)
    return (x - mean) * (lax.rsqrt(var + 1e-5) * scale) + bias


def by_quotient(x, scale, bias, axes=(0, 1)):
    mean, var = moments(x, axes)
    return scale * ((x - mean) / jnp.sqrt(var + 1e-5)) + bias


def repeated_first(x, scale, bias, axes=(0, 1)):
    mean, var = moments(x, axes)
    mean, factor = (jnp.broadcast_to(v, x.shape) for v in (mean, lax.rsqrt(var + 1e-5) * scale))
    return (x - mean) * factor - bias


NORMS = {"product": by_product, "quotient": by_quotient, "repeated first": repeated_first}


def network(norm, axes=(0, 1)):
    def fun(w, scale, bias, x):
        y = jax.nn.silu(norm(x @ w, scale, bias, axes))
        return jnp.sum((y @ w) ** 2) / x.size

    return fun


def affine_values(fun, *args):
    """How many steps each scaled affine value of a function's groups has."""
    plan = Planned(fun, *args).plan
    groups = [[plan.decisions[i].eqn for i in s.members] for s in plan.steps if s.group]
    steps = [len(a.steps) for eqns in groups for a in centred.centred(eqns).by_variable.values()]
    return [count for count in steps if count > 1]


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("axes", [(0, 1), (1,), (0,)])
def test_a_norm_over_more_than_rows_is_affine_up_to_its_bias(name, axes):
    steps = affine_values(network(NORMS[name], axes), W, SCALE, BIAS, X)
    assert max(steps) == {"product": 3, "quotient": 4, "repeated first": 3}[name]


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_of_rows_is_not_one_kernel_reads_them(name):
    assert not affine_values(network(NORMS[name], (-1,)), W, SCALE, BIAS, X)


def test_differences_of_whole_arrays_and_of_integers_are_none():
    def fun(w, x, i):
        y = x @ w
        return (y - x) * y + (i - jnp.min(i, 0)).astype(jnp.float32) @ w

    assert not affine_values(fun, W, X, jnp.ones(X.shape, jnp.int32))


def large_sums(fun, *args):
    """How many sums over whole activations a program holds."""
    jax.clear_caches()
    found = equations(jax.make_jaxpr(fun)(*args).jaxpr)
    return sum(e.primitive.name == "reduce_sum" and e.invars[0].aval.size == X.size for e in found)


@pytest.mark.parametrize("name", NORMS)
def test_its_derivative_adds_up_an_array_less(name):
    grads = jax.grad(autocast(network(NORMS[name]), "bf16-mixed"), (0, 1, 2))
    with hints.without("centred"):
        before = large_sums(grads, W, SCALE, BIAS, X)
    assert large_sums(grads, W, SCALE, BIAS, X) < before


def both(fun, hint):
    """Derivatives of a network with a hint and without it, by name."""

    def computed():
        jax.clear_caches()
        return jax.jit(functools.partial(directions, functools.partial(fun, W)))(SCALE, BIAS, X)

    found = computed()
    with hints.without(hint):
        plain = computed()
    return {name: (found[name], plain[name]) for name in found}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NORMS)
def test_law_derivatives_of_every_order_are_those_of_the_formula(name):
    """In float32 alone, so that nothing but the order of sums differs: against float64."""
    fun = autocast(network(NORMS[name]), "bf16-mixed", rules={"dot_general": "full"})
    pairs = both(fun, "centred")
    np.testing.assert_array_equal(*pairs["value"])
    for pair in pairs.values():
        for a, b in zip(*map(jax.tree.leaves, pair), strict=True):
            # Sums of some 2**11 terms, each rounded twice, seen through two products.
            np.testing.assert_allclose(a, b, atol=2**6 * F32 * max(1, float(jnp.abs(b).max())))


# -- a shift whose cotangent is added up in a kernel of its own -----------------------------------


def activated(act, axes=(0, 1)):
    def fun(w, scale, bias, x):
        y = act(by_product(x @ w, scale, bias, axes))
        return jnp.sum((y @ w) ** 2) / x.size

    return fun


def parts_of_sums(fun, platform):
    """The types of what is added up before all else, on a platform."""
    text = program(fun, platform)
    return re.findall(r"optimization_barrier %\w+ : tensor<(\w+xf32)>", text)


@pytest.mark.parametrize("act", [jax.nn.silu, jax.nn.gelu, lambda y: y / (1 + jnp.exp(-y))])
def test_a_gpu_adds_up_the_cotangent_of_a_shift_in_two_steps_behind_an_exponential(act):
    assert parts_of_sums(activated(act), "cuda") == ["8x1x16xf32"]
    assert not parts_of_sums(activated(act), "tpu")
    assert not parts_of_sums(activated(act), "cpu")
    with hints.without("shifted_apart"):
        assert not parts_of_sums(activated(act), "cuda")


@pytest.mark.parametrize("act", [jax.nn.relu, jax.nn.leaky_relu, lambda y: y])
def test_behind_what_is_cheap_both_sums_are_one_kernel(act):
    assert not parts_of_sums(activated(act), "cuda")


def test_a_sum_over_one_axis_has_one_step():
    assert not parts_of_sums(activated(jax.nn.silu, (1,)), "cuda")


def test_law_a_shift_added_up_in_two_steps_has_the_derivatives_of_one():
    fun = autocast(activated(jax.nn.silu), "bf16-mixed")
    for pair in both(fun, "shifted_apart").values():
        for a, b in zip(*map(jax.tree.leaves, pair), strict=True):
            # Another order of float32 sums, which may round a low value to its other neighbour.
            np.testing.assert_allclose(a, b, atol=2.0**-9 * float(jnp.abs(b).max()))


# -- what is kept apart from its recomputation --------------------------------------------------


def program(fun, platform):
    grads = jax.jit(jax.grad(lambda *a: jnp.sum(autocast(fun, "bf16-mixed")(*a)), (0, 1, 2)))
    jax.clear_caches()
    return grads.trace(W, SCALE, BIAS, X).lower(lowering_platforms=(platform,)).as_text()


def test_what_is_but_scaled_is_not_kept_apart_from_its_recomputation():
    def gated(gate):
        def fun(w, scale, bias, x):
            y = x @ w
            return (y * gate(jnp.mean(y, 1, keepdims=True) @ w * scale + bias)) @ w

        return fun

    held = "optimization_barrier"
    assert held not in program(gated(jax.nn.sigmoid), "tpu")
    assert held in program(lambda w, s, b, x: (jax.nn.gelu(x @ w) * s + b) @ w, "tpu")
