"""autocast and JAX's transformations where no random program goes: eager, devices, loops' types.

The others, and their combinations, are `test_autocast_fuzz.py`'s modes. Bounds are 16 roundings to
the compute dtype: each program has at most three products in a row, and each rounds two operands
and a result, forward and backward.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _small import BF16, W, X, distance, mesh_of_four, together
from jax import lax
from jax.sharding import PartitionSpec as P

from mpjax import autocast


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


def gelu(x, w):
    return jax.nn.gelu(x @ w) @ w


def lstm(x, w):
    def cell(carry, xi):
        h, c = carry
        z = xi @ w + h @ w
        c = jax.nn.sigmoid(z) * c + jnp.tanh(z)
        h = jax.nn.sigmoid(z) * jnp.tanh(c)
        return (h, c), h

    return lax.scan(cell, (jnp.zeros(16), jnp.zeros(16)), x)


def scalar(fun):
    """A scalar of the results that is neither flat nor steep."""
    return lambda *args: sum(jnp.mean(jnp.sin(y)) for y in jax.tree.leaves(fun(*args)))


def test_disabled_jit_agrees_with_jit():
    """Each operation of a gradient is then compiled by itself: one program will do."""
    grads = jax.grad(scalar(autocast(gelu, "bf16-mixed")), (0, 1))
    with jax.disable_jit():
        got = grads(X, W)
    assert distance(got, jax.jit(grads)(X, W)) < 2.0**-8


def attend(x, w):
    q = (x @ w).reshape(1, -1, 2, 8)
    return jax.nn.dot_product_attention(q, q, q)


@pytest.mark.parametrize("wrap", [jax.jit, lambda fun: fun], ids=["jit", "eager"])
@pytest.mark.parametrize("name", ["gelu", "attend"])
def test_debug_nans_names_the_operation_that_made_the_nan(name, wrap):
    fun = {"gelu": gelu, "attend": attend}[name]
    low = autocast(scalar(fun), "16-mixed")
    grads = wrap(jax.grad(lambda x, w: 2.0**60 * low(x, w)))
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"invalid value \(nan\)"):
        grads(X, W)


def with_vjp(fun):
    """A function whose rule is what JAX would do, for reverse mode alone."""
    made = jax.custom_vjp(fun)
    made.defvjp(lambda *xs: (fun(*xs), xs), lambda xs, ct: jax.vjp(fun, *xs)[1](ct))
    return made


ACTIVATIONS = {
    "tanh": with_vjp(jnp.tanh),
    "silu": with_vjp(lambda h: h * jax.nn.sigmoid(h)),
    "a sum": lambda h: jnp.tanh(with_vjp(jnp.add)(h, jnp.ones_like(h))),
    "in a jit": jax.jit(lambda h: 2 * with_vjp(jnp.tanh)(h)),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_custom_vjp_function_of_many_elements_is_differentiated_three_times(name):
    def mean_square(x, w):
        return jnp.mean((ACTIVATIONS[name](x @ w) @ w.T) ** 2)

    def by_direction(fun):  # the derivative of a derivative along a direction, and that squared
        grads = jax.grad(fun, 1)
        return jax.grad(lambda x, w: jnp.sum(jax.jvp(lambda w: grads(x, w), (w,), (w,))[1] ** 2), 1)

    x, w = jnp.ones((64, 16)), jnp.full((16, 128), 0.1)
    for fun in (by_direction(autocast(mean_square, "bf16-mixed")),
                autocast(by_direction(mean_square), "bf16-mixed")):  # fmt: skip
        assert jax.eval_shape(fun, x, w).shape == w.shape


@pytest.mark.parametrize("size", [8, 128])
def test_a_buffer_that_a_function_closes_over_is_changed(size):
    def run(around):
        buffer = jax.new_ref(jnp.ones((size, size)))

        def fun(w):
            h = jnp.tanh(buffer[...] @ w)
            buffer[...] = h
            return h.sum()

        return around(fun)(jnp.full((size, size), 0.01)), buffer[...]

    plain, low = run(lambda fun: fun), run(lambda fun: autocast(fun, "bf16-mixed"))
    assert distance(low, plain) < 4 * BF16
    assert distance(low[1], jnp.ones((size, size))) > 0.1


def test_a_barrier_without_operands_passes():
    def fun(x, w):
        lax.optimization_barrier([])
        return gelu(x, w) * gelu(x, w)

    assert jax.eval_shape(autocast(fun, "bf16-mixed"), X, W).shape == fun(X, W).shape


@pytest.mark.parametrize("zeros", [False, True])
def test_rules_that_multiply_tangents_are_pushed_and_transposed(zeros):
    fun = functools.partial(rule_with_products, symbolic_zeros=zeros)
    fast, direction = autocast(fun, "bf16-mixed"), (W[:8], 0.1 * W)

    def derivatives(f):
        return lambda *xs: (jax.jvp(f, xs, direction)[1], jax.grad(scalar(f))(*xs))

    both = together({"got": derivatives(fast), "want": derivatives(fun)}, X, W)
    for roundings, got, want in zip((32, 16), both["got"], both["want"], strict=True):
        assert distance(got, want) < roundings * 2.0**-8


# -- devices -----------------------------------------------------------------------------------


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", ["gelu", "conv"])
def test_shard_map_outside(name, check_vma):
    def gradient(loss):
        def shard(x, w):
            grad = jax.grad(loss, 1)(x, w)
            return grad if check_vma else lax.psum(grad, "d")

        specs = {"in_specs": (P("d"), P()), "out_specs": P()}
        return jax.jit(jax.shard_map(shard, mesh=mesh_of_four(), check_vma=check_vma, **specs))

    fun = gelu if name == "gelu" else _small_convolution
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
