"""What tracing autocast costs: equal groups of operations are traced once, wherever they stand."""

import functools
import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _differential import equations
from _hinted import hints
from _products import primitives
from jax.experimental.xla_metadata import set_xla_metadata

from benchmarks import tracing
from mpjax import autocast

X = jnp.linspace(-1.0, 1.0, 128 * 64, dtype=jnp.float32).reshape(128, 64)  # worth a checkpoint
W = jnp.full((64, 64), 0.01)


def groups(fun, *args):
    """Returns the equations that hold a group which the backward pass computes again."""
    found = equations(jax.make_jaxpr(autocast(fun, "bf16-mixed"))(*args))
    return [eqn for eqn in found if eqn.primitive.name in ("remat2", "checkpoint") or is_apart(eqn)]


def is_apart(eqn):
    """Whether an equation holds a group that is computed again from what passed a barrier."""
    return eqn.primitive.name == "custom_jvp_call"


def program(eqn):
    return eqn.params["call_jaxpr" if is_apart(eqn) else "jaxpr"]


def layers(x, w):
    for i in range(3):
        with jax.named_scope(f"layer_{i}"), jax.named_scope("softmax"):
            x = jax.nn.softmax(x @ w)
    return x @ w


def test_equal_groups_are_one_program():
    assert len({id(program(eqn)) for eqn in groups(layers, X, W)}) == 1


def test_equal_groups_keep_their_scopes():
    with hints.without("attended"):  # a softmax between two products would be one operation
        found = [str(eqn.source_info.name_stack) for eqn in groups(layers, X, W)]
    assert [name.split("/")[-2:] for name in found] == [[f"layer_{i}", "softmax"] for i in range(3)]


def test_a_move_stands_in_its_own_scope_though_a_reader_runs_it():
    """Its low copy is moved when the product reads it: `pre/first` was no layer of the model."""

    def fun(x, w):
        with jax.named_scope("first"), set_xla_metadata(mark="moved"):
            w = w.T
        with jax.named_scope("pre"):
            return x @ w

    eqns = equations(jax.make_jaxpr(autocast(fun, "bf16-mixed"))(X, W))
    moved = [eqn for eqn in eqns if eqn.primitive.name == "transpose"]
    names = [str(eqn.source_info.name_stack).split("/") for eqn in moved]
    assert names
    assert all("pre" not in name and name.count("first") == 1 for name in names)
    assert all(eqn.ctx.xla_metadata == {"mark": "moved"} for eqn in moved)


def test_groups_on_other_lines_are_others():
    def fun(x, w):
        y = jnp.exp(x @ w) * 2.0
        return jnp.exp(y @ w) * 2.0 @ w

    assert len({id(program(eqn)) for eqn in groups(fun, X, W)}) == 2


def test_groups_that_differ_in_the_sign_of_zero_are_two():
    def least(x, w, zero):
        return jnp.exp(x @ w) * zero

    @functools.partial(autocast, policy="bf16-mixed")
    def fun(x, w):
        return least(x, w, 0.0), least(x, w, -0.0)

    assert len(groups(fun, X, W)) == 2
    plus, minus = fun(X, W)
    assert not np.signbit(plus).any()
    assert np.signbit(minus).all()


def block(x, w):
    scores = jax.nn.softmax(x @ w["query"] @ x.T, axis=-1)
    y = jax.nn.standardize(x + scores @ x @ w["value"] + w["bias"])
    return x + jax.nn.gelu(y @ w["up"]) @ w["up"].T


def loss(blocks, x):
    for w in blocks:
        x = block(x, w)
    return jnp.mean(x**2)


def calls_while_tracing(fun, *args):
    """Returns how many functions Python calls: like seconds, and the same on a busy machine."""
    jax.clear_caches()
    count = itertools.count()
    sys.setprofile(lambda *_: next(count) and None)
    try:
        jax.jit(jax.value_and_grad(fun)).trace(*args)
    finally:
        sys.setprofile(None)
    return next(count)


def test_tracing_costs_little_more_than_tracing_the_function():
    weights = {"query": W, "value": W, "bias": W[0], "up": jnp.tile(W, 4)}
    args = [weights] * 8, X
    own = calls_while_tracing(loss, *args)
    assert calls_while_tracing(autocast(loss, "bf16-mixed"), *args) < 1.98 * own


def lstm(params, xs):
    """A step is small; its equal groups are traced once for all steps."""
    c = h = jnp.zeros((8, 64))
    for x in xs:
        i, f, g, o = jnp.split(jnp.concatenate([x, h], axis=-1) @ params["w"] + params["b"], 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return jnp.mean(h**2)


def test_small_steps_of_an_unrolled_cell_keep_nothing_in_float32():
    params = {"w": jnp.full((128, 256), 0.01), "b": jnp.zeros(256)}
    fast = autocast(lstm, "bf16-mixed")

    def kept(params, xs):
        return jax.vjp(lambda p: fast(p, xs), params)[1]

    leaves = jax.tree.leaves(jax.eval_shape(kept, params, jnp.ones((6, 8, 64))))
    wide = [x.shape for x in leaves if x.dtype == jnp.float32 and x.shape == (8, 64)]
    assert len(wide) <= 2  # the first cell and the loss, not six gates a step


def test_a_constant_stands_in_the_program_once():
    table = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    text = jax.jit(autocast(lambda x: x @ table, "bf16-mixed")).lower(X).as_text()
    assert "dense<" in text
    assert "tensor<64x64xf32>" not in text


def test_a_constant_is_differentiated_around():
    table = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    fast = autocast(lambda x: jnp.tanh(x @ table) @ table, "bf16-mixed")
    got, want = (
        jax.grad(lambda x, f=f: jnp.sum(f(x) ** 2))(X)
        for f in (fast, lambda x: jnp.tanh(x @ table) @ table)
    )
    assert jnp.linalg.norm(got - want) < 2.0**-5 * jnp.linalg.norm(want)


# -- products: what a program holds of them ------------------------------------------------------


def network(ws, x):
    for up, down in ws:
        x = x + jnp.tanh(x @ up) @ down
    return jnp.sum(x**2)


def weights(count):
    return [(jnp.full((64, 128), 0.01), jnp.full((128, 64), 0.01)) for _ in range(count)]


def lowered(fun, platform, count):
    traced = jax.jit(jax.grad(fun)).trace(weights(count), X)
    return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_an_accelerators_program_holds_each_product_once(platform):
    plain, fast = (lowered(f, platform, 4) for f in (network, autocast(network, "bf16-mixed")))
    assert fast.count("stablehlo.dot_general") == plain.count("stablehlo.dot_general") == 23
    assert len(fast) < 1.5 * len(plain)


def test_a_forward_product_is_four_equations():
    program = jax.make_jaxpr(autocast(lambda x, w: x @ w @ w, "bf16-mixed"))(X, W)
    found = [eqn.primitive.name for eqn in program.eqns]
    one = ["hidden_operand", "hidden_operand", "dot_general", "linked_product"]
    assert [name for name in found if name != "convert_element_type"] == one * 2


def test_equal_products_are_traced_once_for_a_backend():
    fast = autocast(network, "bf16-mixed")
    lowered(fast, "cuda", 2)  # the first layer needs no cotangent of its input, others do
    before = primitives._traced.cache_info().misses
    lowered(fast, "cuda", 4)
    assert primitives._traced.cache_info().misses == before


# -- a checkpoint around autocast ------------------------------------------------------------------


@pytest.mark.parametrize("outside", [True, False])
@pytest.mark.parametrize("policy", ["bf16-mixed", "16-mixed"])
def test_a_checkpoint_saves_products_low_wherever_it_stands(policy, outside):
    keep = jax.checkpoint_policies.dots_saveable

    def fun(x, w):
        return jnp.tanh(jnp.tanh(x @ w) @ w) @ w

    inside = autocast(jax.checkpoint(fun, policy=keep), policy)
    around = jax.checkpoint(autocast(fun, policy), policy=keep)
    low = around if outside else inside
    w = jax.random.normal(jax.random.key(0), (64, 64)) / 8
    residuals = jax.tree.leaves(jax.vjp(lambda x, w: jnp.sum(low(x, w)), X, w)[1])
    kept = [r.dtype.itemsize for r in residuals if r.shape == X.shape and r is not X]
    assert kept.count(2) == 2
    assert kept.count(4) <= 1  # the operand
    total = lambda f: lambda x, w: jnp.sum(f(x, w))  # noqa: E731 - one expression
    got, want = (jax.jit(jax.grad(total(f), (0, 1)))(X, w) for f in (low, autocast(fun, policy)))
    for a, b in zip(got, want, strict=True):
        assert jnp.array_equal(a, b)


def test_equal_attentions_are_one_function_of_the_lowered_program():
    plain, fast = (
        jax.jit(jax.grad(tracing.FUNCTIONS[name]))
        .trace(*tracing.arguments(8))
        .lower(lowering_platforms=("cuda",))
        .as_text()
        for name in ("float32", "autocast")
    )
    assert fast.count("call @attention(") == fast.count("call @attention_backward(") == 8
    assert plain.count("stablehlo.exponential") == 8
    assert fast.count("stablehlo.exponential") == 4  # of each pass, and of its rows' sums
    assert len(fast) < 1.3 * len(plain)
