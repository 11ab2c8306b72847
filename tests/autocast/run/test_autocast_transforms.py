"""autocast under, over and around JAX's transformations and functions with rules of their own.

A program's values and gradients are compared with those in float32, relative in the norm. The
bound is 16 roundings to the compute dtype: each program has at most three products in a row, and
each rounds two operands and a result, forward and backward.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _samples import normal
from _small import distance, together
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from mpjax import autocast

EPS = {"bf16-mixed": 2.0**-8, "16-mixed": 2.0**-11}
KEY = jax.random.key(0)
X = normal(0, 8, 16)
W = normal(1, 16, 16, scale=0.3)


def straight_through(x, w):
    @jax.custom_vjp
    def quantize(x):
        return jnp.round(4 * x) / 4

    quantize.defvjp(lambda x: (quantize(x), None), lambda _, ct: (ct,))
    return quantize(x) @ w


def doubled_gradient(x, w):
    @functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
    def product(x, w, n):
        return (x @ w) * n

    def forward(x, w, n):
        return product(x, w, n), (x, w)

    product.defvjp(forward, lambda n, res, ct: (n * ct @ res[1].T, 2.0 * n * res[0].T @ ct))
    return jnp.tanh(product(x, w, 2.0)) @ w


def rule_with_products(x, w, symbolic_zeros=False):
    zero = jax.custom_derivatives.SymbolicZero

    @jax.custom_jvp
    def product(x, w):
        return x @ w

    def rule(primals, tangents):
        (x, w), (tx, tw) = primals, tangents
        out = product(x, w)
        tangent = jnp.zeros_like(out)
        tangent = tangent if type(tx) is zero else tangent + 2 * tx @ w
        return out, tangent if type(tw) is zero else tangent + x @ tw

    product.defjvp(rule, symbolic_zeros=symbolic_zeros)
    return jnp.tanh(product(x, w)) @ w


def saved_by_name(x, w):
    def block(x):
        return checkpoint_name(jnp.tanh(x @ w), "h") @ w

    return jax.checkpoint(block, policy=jax.checkpoint_policies.save_only_these_names("h"))(x)


def convolution(x, w):
    image = x.reshape(2, 8, 8, 1)
    kernel = w[:9, :4].reshape(3, 3, 1, 4)
    dims = ("NHWC", "HWIO", "NHWC")
    y = lax.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=dims)
    y = jax.nn.relu(y)
    grouped = w[:9, :8].reshape(3, 3, 2, 4)
    return lax.conv_general_dilated(
        y, grouped, (2, 2), "SAME", (1, 1), (2, 2), dims, feature_group_count=2
    )


def lstm(x, w):
    def cell(carry, xi):
        h, c = carry
        z = xi @ w + h @ w
        c = jax.nn.sigmoid(z) * c + jnp.tanh(z)
        h = jax.nn.sigmoid(z) * jnp.tanh(c)
        return (h, c), h

    return lax.scan(cell, (jnp.zeros(16), jnp.zeros(16)), x)


def normalised(x, w):
    y = x @ w
    y = (y - y.mean(0)) * lax.rsqrt(y.var(0) + 1e-5)
    return jax.nn.relu(y) @ w


def attention(x, w):
    scores = jnp.where(jnp.tri(8, dtype=bool), (x @ w) @ x.T / 4, -1e9)
    return jax.nn.softmax(scores) @ x


PROGRAMS = {
    "relu": lambda x, w: jax.nn.relu(x @ w) @ w,
    "gelu": lambda x, w: jax.nn.gelu(x @ w) @ w,
    "straight_through": straight_through,
    "doubled_gradient": doubled_gradient,
    "fori_loop": lambda x, w: lax.fori_loop(0, 3, lambda i, c: jnp.tanh(c @ w), x),
    "scan": lambda x, w: lax.scan(lambda c, xi: (c + jnp.mean(xi @ w), xi @ w), 0.0 * x[0, 0], x),
    "cond": lambda x, w: lax.cond(x[0, 0] > 0, lambda c: c @ w, lambda c: c * 2.0, x) @ w,
    "switch": lambda x, w: lax.switch(1, [lambda c: c, lambda c: jnp.tanh(c @ w)], x) @ w,
    "jit": lambda x, w: jax.jit(lambda x: jnp.tanh(x @ w))(x) @ w,
    "remat": lambda x, w: jax.checkpoint(lambda x: jnp.tanh(x @ w) @ w)(x),
    "saved_by_name": saved_by_name,
    "vmap": lambda x, w: jax.vmap(lambda xi: jnp.tanh(w @ xi))(x),
    "grad": lambda x, w: jax.grad(lambda x: jnp.sum(jnp.tanh(x @ w) ** 2))(x),
    "jvp": lambda x, w: jax.jvp(lambda x: jnp.tanh(x @ w), (x,), (x,))[1],
    "conv": convolution,
    "lstm": lstm,
    "normalised": normalised,
    "attention": attention,
    "ragged": lambda x, w: jnp.tanh(lax.ragged_dot(x, jnp.stack([w, -w]), jnp.array([3, 5]))),
    "embedding": lambda x, w: x[jnp.array([0, 2])] @ w @ x.T,
    "solve": lambda x, w: jnp.linalg.solve(jnp.eye(16) + 0.1 * w @ w.T, x.T),
    "loss": lambda x, w: -jax.nn.log_softmax(x @ w)[jnp.arange(8), jnp.arange(8)].mean(),
}
FORWARD_MODE = {name: PROGRAMS[name] for name in PROGRAMS if "through" not in name} | {
    "rule": rule_with_products,
    "rule_with_zeros": lambda x, w: rule_with_products(x, w, symbolic_zeros=True),
}
del FORWARD_MODE["doubled_gradient"]


def scalar(fun):
    """A scalar of the results that is neither flat nor steep."""
    return lambda *args: sum(jnp.mean(jnp.sin(y)) for y in jax.tree.leaves(fun(*args)))


def value_and_gradient(fun):
    return lambda x, w: (fun(x, w), jax.grad(scalar(fun), (0, 1))(x, w))


@functools.cache
def in_float32():
    """Returns the value and gradients of each program."""
    return together({name: value_and_gradient(fun) for name, fun in PROGRAMS.items()}, X, W)


# Float16 differs from bfloat16 in its range and in what XLA:CPU multiplies, not by transformation.
IN_FLOAT16 = ("gelu", "straight_through", "scan", "conv", "ragged", "solve", "loss")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("names", "policy"), [(PROGRAMS, "bf16-mixed"), (IN_FLOAT16, "16-mixed")], ids=EPS
)
def test_values_and_gradients_are_those_of_float32_within_rounding(names, policy):
    fast = {name: autocast(PROGRAMS[name], policy) for name in names}
    found = together({name: value_and_gradient(fun) for name, fun in fast.items()}, X, W)
    for name, (value, grads) in found.items():
        want, want_grads = in_float32()[name]
        # A straight-through estimator turns one rounding into a step of a quarter.
        bound = 16 * EPS[policy] if name != "straight_through" else 0.2
        assert jax.eval_shape(fast[name], X, W) == jax.eval_shape(PROGRAMS[name], X, W), name
        assert distance(value, want) < bound, name
        assert {g.dtype for g in grads} == {jnp.dtype("float32")}, name
        assert distance(grads, want_grads) < bound, name


def test_autocast_of_the_gradient():
    names = ("gelu", "doubled_gradient", "lstm", "attention", "remat")
    grads = {name: jax.grad(scalar(PROGRAMS[name]), (0, 1)) for name in names}
    found = together({name: autocast(grad, "bf16-mixed") for name, grad in grads.items()}, X, W)
    for name, got in found.items():
        assert distance(got, in_float32()[name][1]) < 16 * 2.0**-8, name


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["gelu", "lstm", "cond", "conv"])
def test_eager_mode_agrees_with_jit(name):
    fast = autocast(PROGRAMS[name], "bf16-mixed")
    assert distance(fast(X, W), jax.jit(fast)(X, W)) < 2.0**-8


def test_disabled_jit_agrees_with_jit():
    """Each operation of a gradient is then compiled by itself: one program will do."""
    grads = jax.grad(scalar(autocast(PROGRAMS["gelu"], "bf16-mixed")), (0, 1))
    with jax.disable_jit():
        got = grads(X, W)
    assert distance(got, jax.jit(grads)(X, W)) < 2.0**-8


def test_forward_mode():
    def tangents(fun):
        fast, direction = autocast(fun, "bf16-mixed"), (W[:8], 0.1 * W)
        return lambda *args: (
            jax.jvp(fun, args, direction)[1],
            jax.jvp(fast, args, direction)[1],
            jax.linearize(fast, *args)[1](*direction),
        )

    names = ("gelu", "lstm", "scan", "normalised", "rule", "rule_with_zeros")
    found = together({name: tangents(FORWARD_MODE[name]) for name in names}, X, W)
    for name, (want, pushed, linear) in found.items():
        assert distance(pushed, want) < 32 * 2.0**-8, name
        assert distance(linear, want) < 32 * 2.0**-8, name


@pytest.mark.parametrize("name", ["rule", "rule_with_zeros"])
def test_rules_that_multiply_tangents_are_transposed(name):
    fun = FORWARD_MODE[name]
    losses = {"got": scalar(autocast(fun, "bf16-mixed")), "want": scalar(fun)}
    both = together({which: jax.grad(loss) for which, loss in losses.items()}, X, W)
    assert distance(both["got"], both["want"]) < 16 * 2.0**-8


@pytest.mark.sampled(2)
@pytest.mark.parametrize("axes", [(0, None), (None, 0)])
def test_vmap_of_grad(axes):
    args = (jnp.stack([X, 0.5 * X]), W) if axes[0] == 0 else (X, jnp.stack([W, -W]))

    def both(fun):
        fast = autocast(fun, "bf16-mixed")
        return lambda *xs: [jax.vmap(jax.grad(scalar(f), 1), axes)(*xs) for f in (fast, fun)]

    names = ("gelu", "conv", "lstm", "attention")
    found = together({name: both(PROGRAMS[name]) for name in names}, *args)
    for name, (got, want) in found.items():
        assert distance(got, want) < 16 * 2.0**-8, name


# -- devices -----------------------------------------------------------------------------------


def mesh(axis_type=AxisType.Auto):
    return jax.make_mesh((4,), ("d",), axis_types=(axis_type,), devices=jax.devices()[:4])


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", ["gelu", "conv"])
def test_shard_map_outside(name, check_vma):
    def gradient(loss):
        def shard(x, w):
            grad = jax.grad(loss, 1)(x, w)
            return grad if check_vma else lax.psum(grad, "d")

        specs = {"in_specs": (P("d"), P()), "out_specs": P()}
        return jax.jit(jax.shard_map(shard, mesh=mesh(), check_vma=check_vma, **specs))

    fun = PROGRAMS["gelu"] if name == "gelu" else _small_convolution
    x = X if name == "gelu" else jnp.tile(X, (4, 1)).reshape(4, 8, 8, 2)
    got = gradient(scalar(autocast(fun, "bf16-mixed")))(x, W)
    assert distance(got, gradient(scalar(fun))(x, W)) < 16 * 2.0**-8


def _small_convolution(x, w):
    kernel = w[:9, :6].reshape(3, 3, 2, 3)
    return lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


# -- what calls keep ---------------------------------------------------------------------------


def find(jaxpr, name):
    return next(eqn for eqn in jaxpr.eqns if eqn.primitive.name == name)


def test_jit_keeps_its_name_and_donation():
    @functools.partial(jax.jit, donate_argnums=0)
    def inner(x, w):
        return x @ w

    eqn = find(jax.make_jaxpr(autocast(lambda x, w: inner(x * 2, w), "bf16-mixed"))(X, W), "jit")
    assert eqn.params["name"] == "inner"
    assert eqn.params["donated_invars"][:2] == (True, False)


def test_scan_keeps_its_parameters_and_casts_constants_outside():
    def fun(x, w):
        return lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, length=6, reverse=True, unroll=2)

    jaxpr = jax.make_jaxpr(autocast(lambda x, w: fun(x, w)[0], "bf16-mixed"))(X, W).jaxpr
    eqn = find(jaxpr, "scan")
    assert (eqn.params["length"], eqn.params["reverse"], eqn.params["unroll"]) == (6, True, 2)
    body = getattr(eqn.params["jaxpr"], "jaxpr", eqn.params["jaxpr"])
    casts = [e for e in body.eqns if e.primitive.name == "convert_element_type"]
    assert not [e for e in casts if e.invars[0].aval.shape == (16, 16)]


def test_a_scan_carry_is_low_only_if_it_is_a_stream_and_stays_so():
    def fun(x, w):
        def body(carry, w):
            stream, total = carry
            stream = stream + jnp.tanh(jax.nn.standardize(stream) @ w)
            return (stream, total + stream[0]), None

        return lax.scan(body, (x, jnp.zeros(16)), w)[0]

    ws = jnp.stack([W] * 3)
    eqn = find(jax.make_jaxpr(autocast(fun, "bf16-mixed"))(X, ws).jaxpr, "scan")
    carried = {v.aval.shape: v.aval.dtype.name for v in eqn.outvars}
    assert carried == {(8, 16): "bfloat16", (16,): "float32"}


@pytest.mark.parametrize(
    ("read", "dtype"),
    [
        (lambda ys, w: ys @ w, "bfloat16"),
        (lambda ys, w: jnp.tanh(ys) @ w, "float32"),
        (lambda ys, w: ys, "float32"),
        (lambda ys, w: (ys @ w, ys), "float32"),
        (lambda ys, w: jnp.sum(ys), "float32"),
    ],
)
def test_what_a_loop_stacks_for_products_is_low_though_it_carries_it_in_float32(read, dtype):
    def fun(x, w):
        return read(lstm(x, w)[1], w)

    eqn = find(jax.make_jaxpr(autocast(fun, "bf16-mixed"))(X, W).jaxpr, "scan")
    assert [v.aval.dtype.name for v in eqn.outvars] == ["float32", "float32", dtype]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(4))
def test_cpu_runs_products_of_any_layout(seed):
    """XLA:CPU fails at run time on bfloat16 products whose transposes it folds."""
    rng = np.random.default_rng(seed)
    for _ in range(3):
        batch, free_x, free_y, contract = (
            "ab"[: rng.integers(3)],
            "cd"[: rng.integers(1, 3)],
            "e",
            "g",
        )
        x, y, out = (
            "".join(rng.permutation(list(s)))
            for s in (batch + free_x + contract, batch + free_y + contract, batch + free_x + free_y)
        )
        size = dict(zip("abcdeg", (2, 3, 4, 8, 5, 6), strict=True))
        args = [jnp.ones([size[c] for c in s]) for s in (x, y)]

        def fun(a, b, spec=f"{x},{y}->{out}"):
            return jnp.sum(jnp.tanh(jnp.einsum(spec, a, b)))

        got = jax.block_until_ready(jax.jit(jax.grad(autocast(fun, "bf16-mixed"), (0, 1)))(*args))
        assert distance(got, jax.jit(jax.grad(fun, (0, 1)))(*args)) < 8 * 2.0**-8


def test_a_rule_that_is_a_function_s_own_derivative_can_be_linearised():
    """Its groups hold values beside tangents, and are large enough to be computed again."""

    random = np.random.default_rng(0)

    def block(x, w, b):
        return jnp.tanh(x @ w + b)

    with_rule = jax.custom_jvp(block)
    with_rule.defjvp(lambda primals, tangents: jax.jvp(block, primals, tangents))
    args = tuple(random.normal(size=n).astype(np.float32) for n in ((64, 16), (16, 64), (1, 64)))

    def grads(fun):
        loss = autocast(lambda *args: jnp.sum(fun(*args)), "bf16-mixed")
        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*args)

    for got, want in zip(grads(with_rule), grads(block), strict=True):
        np.testing.assert_allclose(got, want, rtol=2**-5, atol=2**-5)
