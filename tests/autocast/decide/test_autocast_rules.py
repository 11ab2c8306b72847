"""What autocast's rules promise: nesting, regions, paths, constants, casts, samples, traces."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _differential import equations
from _samples import normal
from _small import BF16, KEY, W, X, distance, loss, products
from jax import lax

from mpjax import Policy, autocast, explain
from mpjax.testing import assert_products

# -- nesting -----------------------------------------------------------------------------------


def test_an_inner_policy_holds_in_loops_checkpoints_gradients_and_calls():
    exact = autocast(jnp.matmul, "float32")
    inside = {
        "jit": lambda x, w: jax.jit(exact)(x, w),
        "scan": lambda x, w: lax.scan(lambda c, _: (exact(c, w), None), x, None, length=2)[0],
        "remat": jax.checkpoint(exact),
        "vmap": lambda x, w: jax.vmap(exact, (0, None))(x, w),
        "grad": lambda x, w: jax.grad(lambda x: jnp.sum(jnp.sin(exact(x, w))))(x),
        "cond": lambda x, w: lax.cond(x[0, 0] > 0, exact, exact, x, w),
    }
    for name, inner in inside.items():
        mixed = autocast(lambda x, w, inner=inner: inner(x, w) @ w, "bf16-mixed")
        assert products(mixed, X, W)[-1] == "bfloat16", name
        assert set(products(mixed, X, W)[:-1]) == {"float32"}, name
        outer_grad = products(jax.grad(lambda x, m=mixed: m(x, W).sum()), X)
        assert outer_grad.count("float32") >= 1, name


def test_three_policies_deep():
    innermost = autocast(jnp.matmul, "float32")
    middle = autocast(lambda x, w: innermost(x @ w, w) @ w, "16-mixed")
    outer = autocast(lambda x, w: middle(x @ w, w) @ w, "bf16-mixed")
    assert products(outer, X, W) == ["bfloat16", "float16", "float32", "float16", "bfloat16"]


def test_autocast_twice_gives_the_same_bits_and_gradients():
    once = autocast(lambda x, w: jnp.sum(jnp.tanh(x @ w) @ w), "bf16-mixed")
    for policy in ("bf16-mixed", "16-mixed"):
        twice = autocast(once, policy)
        assert jnp.array_equal(twice(X, W), once(X, W))
        assert jnp.array_equal(jax.grad(twice, 1)(X, W), jax.grad(once, 1)(X, W))
        inside = autocast(jax.grad(once, 1), policy)
        assert jnp.array_equal(inside(X, W), jax.grad(once, 1)(X, W))


# -- rules="widest", 64 bits, paths, constants --------------------------------------------------


def test_widest_lets_a_float32_operand_win():
    bias = 2 * X

    def fun(x, w, bias=bias):
        y = x @ w
        low = jnp.tanh(y + y)
        return ((low + bias) @ w + low @ w) @ w

    def carriers(rules):
        fast = autocast(fun, "bf16-mixed", rules=rules)
        eqns = equations(jax.make_jaxpr(fast)(X, W, bias).jaxpr)
        return [e.invars[1].aval.dtype for e in eqns if e.primitive.name == "linked_product"]

    assert carriers("widest") == ["float32", "float32", "bfloat16", "bfloat16"]
    assert carriers(None) == ["float32", "bfloat16", "bfloat16", "bfloat16"]
    fast = autocast(fun, "bf16-mixed", rules="widest")
    assert_products(fast, X, W, bias, dtype="bfloat16", least=4)
    want = jax.grad(loss(fun), (0, 1))(X, W)
    assert distance(jax.grad(loss(fast), (0, 1))(X, W), want) < 8 * BF16


def test_64_bit_types():
    with jax.enable_x64(True):
        x, w = np.asarray(X, np.float64), jnp.asarray(W)

        def fun(x, w):
            n = jnp.arange(3)
            return x @ x.T, w @ w, x.astype(jnp.float32) @ w, 2.5 * w, n, n.astype(jnp.float64)

        fast = autocast(fun, "bf16-mixed")
        got, want = fast(x, w), fun(jnp.asarray(x), w)
        assert [y.dtype for y in got] == [y.dtype for y in want]
        assert jnp.array_equal(got[0], want[0])
        assert products(fast, x, w).count("bfloat16") == 2
        assert products(fast, x, w).count("float64") == 1
        of_numpy = [row for row in explain(fun, "bf16-mixed")(x, w).rows if row.dtype == "f64"]
        assert of_numpy[0].reason.startswith("as written")

        def total(w):
            return jnp.sum((x.astype(jnp.float32) @ w).astype(jnp.float64) * x)

        grad = jax.grad(autocast(total, "bf16-mixed"))(w)
        assert grad.dtype == jnp.float32
        assert distance(grad, jax.grad(total)(w)) < 4 * BF16


def test_a_float64_policy_changes_no_double():
    with jax.enable_x64(True):
        x = jnp.asarray(np.asarray(X, np.float64))
        assert jnp.array_equal(autocast(lambda x: x @ x.T, "float64")(x), x @ x.T)


@jax.jit
def _layer(x, w):
    with jax.named_scope("layer"):
        return x @ w


@pytest.mark.parametrize("policy", ["bf16-mixed", "16-mixed"])
def test_constants_beside_a_product_keep_their_values(policy):
    """A literal that the compute dtype cannot hold is not cast to it, wherever it goes."""
    eye = jnp.eye(8)
    programs = {
        "factor": lambda x: ((x * 2.0**-14) @ eye * 2.0**17) @ eye,
        "mask": lambda x: jax.nn.softmax(x @ eye + jnp.where(jnp.tri(8, dtype=bool), 0, -1e9)),
        "epsilon": lambda x: (x @ eye) / (jnp.abs(x @ eye) + 1e-12),
        "count": lambda x: (x @ eye) * 100_000 / 100_000,
        "limit": lambda x: jnp.max(jnp.where(x > 0, x @ eye, jnp.finfo(jnp.float32).min), -1),
        "square": lambda x: jnp.square(300 * (x @ eye)) / 90_000,
        "function": lambda x: lax.sort(jax.jit(lambda y: 1e-9 * y)(x @ eye)) * 1e9,
    }
    x = jnp.round(4 * jax.random.normal(KEY, (8, 8))) / 4 + 1 / 8  # exact in either dtype
    for name, fun in programs.items():
        got, want = autocast(fun, policy)(x), fun(x)
        np.testing.assert_allclose(got, want, rtol=2 * 2.0**-8, atol=1e-6, err_msg=name)


def test_a_loss_is_no_residual_stream():
    """The maximum in a logsumexp is added to a logarithm: the sum is not to be rounded."""
    x = jnp.round(4 * jax.random.normal(KEY, (8, 8))) / 4  # exact in bfloat16

    def loss_of(x):
        logits = x @ jnp.eye(8)
        most = jnp.max(logits, axis=1)
        total = jnp.log(jnp.sum(jnp.exp(logits - most[:, None]), axis=1)) + most
        return jnp.sum(total - jnp.take_along_axis(logits, jnp.arange(8)[:, None], 1)[:, 0])

    np.testing.assert_allclose(autocast(loss_of, "bf16-mixed")(x), loss_of(x), rtol=1e-6)


@pytest.mark.parametrize(("policy", "size"), [("bf16-mixed", 512), ("16-mixed", 4096)])
def test_positions_that_a_product_reads_stay_exact(policy, size):
    w = jnp.zeros((size, 2)).at[size - 3].set(1.0)  # picks an odd one
    for positions in (lambda: jnp.arange(float(size)), lambda: lax.iota(jnp.float32, size)):
        fun = lambda w, positions=positions: positions() @ w  # noqa: E731 - one expression
        assert jnp.array_equal(autocast(fun, policy)(w), fun(w))
    small = lambda w: jnp.arange(64.0) @ w  # noqa: E731 - these fit
    assert products(autocast(small, policy), jnp.ones((64, 2))) != ["float32"]


# -- forms of functions, casts -----------------------------------------------------------------


class _Model:
    def __call__(self, x):
        return x @ W

    def method(self, x):
        return x @ W

    @autocast("bf16-mixed")
    def decorated(self, x, *, scale):
        return (x @ W) * scale


def test_every_kind_of_function():
    model, want = _Model(), jax.jit(autocast(lambda x: x @ W, "bf16-mixed"))(X)
    kinds = [model, model.method, functools.partial(jnp.matmul, b=W), jax.jit(model.method)]
    kinds += [jax.checkpoint(model.method), lambda x, *rest, **more: x @ W]
    for fun in kinds:
        assert jnp.array_equal(jax.jit(autocast(fun, "bf16-mixed"))(X), want)
    assert jnp.array_equal(model.decorated(X, scale=2.0), 2 * want)


def test_values_of_a_trace_around_autocast_are_read():
    product = autocast(lambda x, w: x @ w, "bf16-mixed")
    closed = lambda x: autocast(lambda w: x @ w, "bf16-mixed")(W)  # noqa: E731 - one expression
    assert jnp.array_equal(jax.vmap(closed)(X), product(X, W))
    assert jnp.array_equal(jax.jit(closed)(X), jax.jit(product)(X, W))
    scanned = lax.scan(lambda c, x: (c, closed(x)), 0, X)[1]
    assert distance(scanned, product(X, W)) < 1e-6  # one row at a time: another order of sums


def _twice(x, w):
    return lax.fori_loop(0, 2, lambda _, c: jnp.tanh(c @ w), x)


CASTS = {
    "ten readers": (1, lambda x, w: functools.reduce(lambda h, _: jnp.tanh(h @ w), range(10), x)),
    "scan": (1, lambda x, w: lax.scan(lambda c, _: (c @ w, None), x, None, length=3)[0] @ w),
    "nested": (
        1,
        lambda x, w: lax.fori_loop(
            0,
            2,
            lambda _, c: jax.jit(lambda c: lax.fori_loop(0, 2, lambda _, c: jnp.tanh(c @ w), c))(c),
            x,
        ),
    ),
    "branches": (1, lambda x, w: lax.cond(x[0, 0] > 0, lambda c: c @ w, lambda c: c @ w.T, x)),
    "two calls": (1, lambda x, w: _layer(_layer(x, w), w)),
    "transposed": (1, lambda x, w: (x @ w) @ w.T),
    "rows of a table": (0, lambda x, w: w[jnp.array([1, 2])] @ x.T),
    "no product": (0, lambda x, w: x + w[0]),
}


@pytest.mark.parametrize("name", CASTS)
def test_a_weight_is_cast_once(name):
    count, fun = CASTS[name]
    eqns = equations(jax.make_jaxpr(autocast(fun, "bf16-mixed"))(X, W).jaxpr)
    casts = [
        eqn
        for eqn in eqns
        if eqn.primitive.name == "convert_element_type"
        and eqn.invars[0].aval.shape == W.shape
        and eqn.params["new_dtype"] == jnp.bfloat16
    ]
    assert len(casts) == count


def test_samples_are_those_of_the_function():
    def fun(key, x):
        first, second = jax.random.split(key)
        samples = [
            jax.random.normal(first, (4,)),
            jax.random.gumbel(second, (3,)),
            jax.random.bernoulli(second, 0.3, (8,)),
            jax.random.gamma(first, 2.0, (3,)),
            jax.random.permutation(second, 8),
            jax.random.orthogonal(first, 4),
            jax.random.multivariate_normal(first, jnp.zeros(3), jnp.eye(3)),
        ]
        return samples, x @ x.T

    got, want = autocast(fun, "bf16-mixed")(KEY, X)[0], fun(KEY, X)[0]
    for a, b in zip(got, want, strict=True):
        assert jnp.array_equal(a, b)


def test_explicit_casts_complex_and_eight_bit_values_are_left_alone():
    def fun(x):
        eight = x.astype(jnp.float8_e4m3fn)
        z, half = lax.complex(x, x), x.astype(jnp.float16)
        multiplied = z @ z.T, (half @ half.T).astype(jnp.float32)
        return x.astype(jnp.int8), eight.astype(jnp.float32), x > 0, *multiplied

    for a, b in zip(autocast(fun, "bf16-mixed")(X), fun(X), strict=True):
        assert a.dtype == b.dtype
        assert jnp.array_equal(a, b)


def test_one_trace_for_equal_policies_and_repeated_calls():
    traces = []

    def fun(x):
        traces.append(1)
        return x @ W

    step = jax.jit(lambda policy, x: autocast(fun, policy)(x), static_argnums=0)
    for policy in ("bf16-mixed", "bf16-mixed"):
        step(policy, X)
    for policy in (Policy(jnp.float32, "bfloat16", np.float32), Policy("f32", "bf16", "f32")):
        step(policy, X)
    assert len(traces) == 2  # the name, and the policy
    traces.clear()
    jax.grad(lambda x: autocast(fun, "bf16-mixed")(x).sum())(X)
    assert len(traces) == 1


def _long_convolution(x, kernel):
    spectrum = jnp.fft.rfft(x, n=32, axis=0) * jnp.fft.rfft(kernel, n=32, axis=0)
    return jnp.fft.irfft(spectrum, n=32, axis=0)[:16]


SPECTRA = {
    "a long convolution": _long_convolution,
    "a GELU of one": lambda x, kernel: jax.nn.gelu(_long_convolution(x, kernel)),
    "a magnitude": lambda x, _: jnp.abs(jnp.fft.fft(x)),
    "a logarithm of one": lambda x, _: jnp.log(1 + jnp.abs(jnp.fft.fft(x))),
    "a real part": lambda x, _: jnp.fft.fft2(x).real,
}


@pytest.mark.parametrize("policy", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("name", SPECTRA)
def test_what_an_fft_of_inputs_makes_is_no_constant(name, policy):
    def fun(w, x):
        return SPECTRA[name](x, w) @ w.T

    rows = explain(fun, policy)(normal(0, 16, 16), W).rows
    low = "bf16" if policy == "bf16-mixed" else "f16"
    assert {r.dtype for r in rows if r.operation == "dot_general"} == {low}
