"""What rounding would ruin is float32, whoever reads it too: laws of autocast's page, by name."""

import functools

import _cuts
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _evaluate import exactly, off, run
from _metamorphic import hand_cast
from jax import lax

import mpjax

POLICIES = {"bf16": ("bf16-mixed", jnp.bfloat16), "f16": ("16-mixed", jnp.float16)}
_RNG = np.random.default_rng(5)
X = _RNG.normal(size=(24, 16)).astype(np.float32)
W = (3 * _RNG.normal(size=(16, 6)) / 4).astype(np.float32)
V = _RNG.normal(size=(6, 3)).astype(np.float32)
POINTS = _RNG.uniform(-3, 3, size=(40, 2)).astype(np.float32)


def against_float64(make, dtype, *args):
    """Asserts that autocast's values and gradients are within twice a hand cast's errors.

    `make` gives a function for a product.
    """
    policy, low = POLICIES[dtype]

    def weighted(out):
        return jnp.vdot(out, jnp.cos(jnp.arange(out.size, dtype=jnp.float32)))

    def both(fun):
        def values(*args):
            return fun(*args), jax.grad(lambda *a: weighted(fun(*a)))(*args)

        return values

    right = exactly(both(make(jnp.matmul)), *args)
    by_hand = off(run(both(make(hand_cast(low))), *args), right)
    got = off(run(both(mpjax.autocast(make(jnp.matmul), policy)), *args), right)
    assert got <= 2 * by_hand + float(jnp.finfo(low).eps), (got, by_hand)


# -- ill-conditioned readers ---------------------------------------------------

SATURATING = {
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
    "erf": lax.erf,
    "softmax": jax.nn.softmax,
    "exponential of a negative": lambda z: jnp.exp(-jnp.abs(z)),
    "one minus an exponential": lambda z: 1 - jnp.exp(-jax.nn.softplus(z)),
    "normalised": lambda z: z / jnp.linalg.norm(z, axis=-1, keepdims=True),
}
READERS = {
    "log": lambda q: jnp.log(jnp.abs(q) + 1e-6),
    "log1p": lambda q: jnp.log1p(-0.9999 * q),
    "one minus": lambda q: jnp.log(1.0001 - q),
    "reciprocal": lambda q: 1 / (1.02 - q),
    "acos": lambda q: jnp.arccos(0.9999 * q),
    "asin": lambda q: jnp.arcsin(0.9999 * q),
    "atanh": lambda q: jnp.arctanh(0.9999 * q),
    "rsqrt": lambda q: lax.rsqrt(1.001 - q**2),
    "log odds": lambda q: jnp.log((jnp.abs(q) + 1e-3) / (1.001 - jnp.abs(q))),
    "running product": lambda q: jnp.cumprod(1.001 - jnp.abs(q), axis=1),
    "product": lambda q: jnp.prod(1.001 - jnp.abs(q), axis=1),
}
BETWEEN = {
    "nothing": lambda q: q,
    "a call": jax.jit(lambda q: q * 0.9999),
    "a sort": lambda q: jnp.sort(q, axis=1),
    "a choice": lambda q: jnp.where(q > 0.5, q, 0.9 * q),
    "a slice": lambda q: q[:, 1:],
    "a scan": lambda q: lax.scan(lambda c, row: (c, row * 1.0), 0, q)[1],
}
OF_THEIR_OWN = {
    **_cuts.SUMS,
    "average pooling": lambda q: lax.reduce_window(q, 0.0, lax.add, (1, 1), (1, 1), "VALID"),
    ".at[].multiply": lambda q: jnp.ones((2, *q.shape)).at[1].multiply(q)[1],
    "a solve": lambda q: jnp.linalg.solve(jnp.eye(len(q)), q),
    "a running sum": lambda q: jnp.cumsum(q[None], axis=0)[0],
}
"""Operations in kernels of their own."""


def _read(saturate, between, read, dot):
    def fun(w, v):
        q = saturate(dot(jnp.asarray(X), w))
        return jnp.mean(read(between(q)), axis=0), dot(q, v)

    return lambda w, v: jnp.concatenate([jnp.ravel(x) for x in fun(w, v)])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", POLICIES)
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("saturating", SATURATING)
def test_law_of_readers_what_saturates_is_float32_for_them(saturating, reader, dtype):
    """Though a product reads it too."""
    between = _cuts.in_turn(BETWEEN, (READERS, reader), (SATURATING, saturating))
    parts = SATURATING[saturating], BETWEEN[between], READERS[reader]
    against_float64(lambda dot: _read(*parts, dot), dtype, W, V)


@pytest.mark.parametrize("between", OF_THEIR_OWN)
def test_law_of_readers_a_distance_is_read_through_every_operation(between):
    def cosines(q):
        return OF_THEIR_OWN[between](jnp.sum(q * (q + 0.01 * q[::-1]), axis=1, keepdims=True))

    fun = _read(SATURATING["normalised"], cosines, READERS["acos"], jnp.matmul)
    rows = mpjax.explain(fun, "bf16-mixed")(W, V).rows
    assert any(
        row.operation == "div" and row.reason.startswith("its distance to a constant is read by")
        for row in rows
    )


def test_law_of_readers_a_product_still_reads_its_low_copy():
    fun = _read(jnp.tanh, BETWEEN["nothing"], READERS["log1p"], jnp.matmul)
    rows = mpjax.explain(fun, "bf16-mixed")(W, V).rows
    assert {r.dtype for r in rows if r.operation == "dot_general"} == {"bf16"}
    (row,) = (r for r in rows if r.operation == "tanh")
    assert row.dtype == "f32"
    assert row.reason.startswith("its distance to a constant is read by log1p, test_autocast_read")


# -- behind the last product ---------------------------------------------------


def test_law_of_the_last_product_nothing_behind_it_is_rounded():
    """A call around each operation would show a rounding."""

    def fun(w):
        z = jax.jit(lambda z: z * 1.001)(jnp.asarray(X) @ w)
        return jax.jit(lambda z: z - 0.25 * z.mean(1, keepdims=True))(z).std(1)

    rows = mpjax.explain(fun, "bf16-mixed")(W).rows
    assert {r.operation: r.dtype for r in rows}["dot_general"] == "bf16"
    assert {r.dtype for r in rows if r.operation != "dot_general"} == {"f32"}


# -- one expression, one rounding ---------------------------------------------------


def _softmax_by_a_loop(x, y, loop):
    def logits():
        return 4 * (x @ y.T)

    normaliser = loop(lambda _: jax.nn.logsumexp(logits(), axis=1), jnp.zeros(len(x)))
    return jnp.sum(jnp.exp(logits() - normaliser[:, None]), axis=1)


LOOPS = {
    "fori_loop": lambda turn, start: lax.fori_loop(0, 3, lambda _, f: turn(f), start),
    "scan": lambda turn, start: lax.scan(lambda f, _: (turn(f), None), start, None, 3)[0],
    "while": lambda turn, start: lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, turn(c[1])), (0, start)
    )[1],
    "while with a tolerance": lambda turn, start: lax.while_loop(
        lambda c: jnp.max(jnp.abs(c[0] - c[1])) > 1e-6,
        lambda c: (c[1], turn(c[1])),
        (start + 1, start),
    )[1],
    "a loop in a call": lambda turn, start: jax.jit(
        lambda f: lax.fori_loop(0, 3, lambda _, f: turn(f), f)
    )(start),
}


@pytest.mark.parametrize("policy", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("loop", LOOPS)
def test_law_of_one_expression_rows_of_a_softmax_sum_to_one(loop, policy):
    x, y = (jnp.asarray(a, jnp.bfloat16).astype(jnp.float32) for a in (X[:, :8], X[:20, 8:]))
    fun = functools.partial(_softmax_by_a_loop, loop=LOOPS[loop])
    (rows,) = run(mpjax.autocast(fun, policy), x, y)
    np.testing.assert_allclose(rows, 1, atol=1e-5)


# -- a factorisation or a running sum ---------------------------------------------------

KERNELS = {
    "power": lambda dot, x: (1 + dot(x, x.T)) ** 3,
    "exponential": lambda dot, x: jnp.exp(dot(_unit(x), _unit(x).T)),
    "tanh of a small one": lambda dot, x: jnp.tanh(dot(x, x.T) / 64),
    "logistic": lambda dot, x: jnp.eye(40) + jax.nn.sigmoid(dot(_unit(x), _unit(x).T)) / 64,
    "a choice in a call": lambda dot, x: jax.jit(lambda k: jnp.where(k > -9, k, 0.0))(
        jnp.exp(dot(x, x.T) / 16)
    ),
}
ENDS = {
    "solve": lambda k, y: y @ jnp.linalg.solve(k, y),
    "slogdet": lambda k, y: jnp.linalg.slogdet(k)[1],
    "inverse": lambda k, y: jnp.sum(y * (jnp.linalg.inv(k) * y).sum(1)),
    "cholesky": lambda k, y: jnp.log(jnp.diag(jnp.linalg.cholesky(k))).sum(),
    "cumsum": lambda k, y: jnp.cumsum(k, axis=1)[:, -1] - k.sum(1) + y,
}


def _unit(x):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", POLICIES)
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_law_of_factorisations_they_read_unrounded_sums(kernel, end, dtype):
    def value(x, dot):
        k = KERNELS[kernel](dot, x) + 0.1 * jnp.eye(len(x))
        return jnp.sum(ENDS[end](k, jnp.sin(x[:, 0])))

    policy, low = POLICIES[dtype]
    (right,) = map(float, exactly(lambda x: value(x, jnp.matmul), POINTS))
    hand = float(run(lambda x: value(x, hand_cast(low)), POINTS)[0])
    got = float(run(mpjax.autocast(lambda x: value(x, jnp.matmul), policy), POINTS)[0])
    assert abs(got - right) <= 3 * abs(hand - right) + 0.02 * abs(right) + 1e-3, (got, hand, right)


# -- what contracts one element ---------------------------------------------------

OUTER = {
    "outer": lambda t, f: jnp.outer(t, f),
    "matmul": lambda t, f: t[:, None] @ f[None],
    "einsum": lambda t, f: jnp.einsum("bi,id->bd", t[:, None], f[None]),
    "batched": lambda t, f: (f[None, :, None] @ t[None, None])[0].T,
    "two axes": lambda t, f: jnp.einsum("bij,ijd->bd", t[:, None, None], f[None, None]),
    "convolution": lambda t, f: lax.conv(t[None, None], f[:, None, None], (1,), "SAME")[0].T,
}


@pytest.mark.parametrize("policy", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("form", OUTER)
def test_law_of_one_element_its_product_is_elementwise(form, policy):
    frequencies = jnp.float32(1) / jnp.float32(10000) ** (jnp.arange(32, dtype=jnp.float32) / 32)
    positions = jnp.arange(30000, 30064, dtype=jnp.float32)
    right = np.cos(np.outer(np.float64(positions), np.float64(frequencies)))
    fun = mpjax.autocast(lambda t, f: jnp.cos(OUTER[form](t, f)), policy)
    (got,) = run(fun, positions, frequencies)
    np.testing.assert_allclose(got, right, atol=0.01)


# -- differences that cancel ---------------------------------------------------


def _sum(x):
    return jnp.sum(x, axis=-1)


DISTANCES = {
    "broadcasts": lambda a, b: _sum(a**2)[:, None] + _sum(b**2)[None] - 2 * a @ b.T,
    "doubled first": lambda a, b: _sum(a * a)[:, None] - (2 * a) @ b.T + _sum(b * b)[None],
    "einsum": lambda a, b: (
        jnp.einsum("id,id->i", a, a)[:, None]
        + jnp.einsum("id,id->i", b, b)
        - 2 * jnp.einsum("id,jd->ij", a, b)
    ),
    "a call for each": lambda a, b: (
        jax.jit(lambda a: _sum(a**2)[:, None])(a)
        + jax.jit(lambda b: _sum(b**2)[None])(b)
        - 2 * jax.jit(lambda a, b: a @ b.T)(a, b)
    ),
    "added up in a call": lambda a, b: jax.jit(lambda n, m, p: n[:, None] + m - 2 * p)(
        _sum(a**2), _sum(b**2), a @ b.T
    ),
    "a checkpoint, a transposition": lambda a, b: (
        jax.checkpoint(lambda a, b: _sum(a**2)[:, None] - 2 * (b @ a.T).T)(a, b) + _sum(b**2)
    ),
    "a branch": lambda a, b: (
        lax.cond(
            a[0, 0] < 1e9, lambda p: p - 2 * a @ b.T, lambda p: p + 2 * a @ b.T, _sum(a**2)[:, None]
        )
        + _sum(b**2)
    ),
    "of points that a layer made": lambda a, b: DISTANCES["broadcasts"](
        jnp.tanh(a @ jnp.asarray(W[:, :4])) + 2, jnp.tanh(b @ jnp.asarray(W[:, :4])) + 2
    ),
}


@pytest.mark.parametrize("dtype", POLICIES)
@pytest.mark.parametrize("form", DISTANCES)
def test_law_of_cancelling_distances_are_not_noise(form, dtype):
    a = jnp.asarray(X + 3)
    b = a + jnp.asarray(0.05 * X[::-1])
    fun = DISTANCES[form]
    (right,) = exactly(fun, a, b)
    (got,) = run(mpjax.autocast(fun, POLICIES[dtype][0]), a, b)
    # Points that a layer made are as exact as the layer; their distances are those of such points.
    atol = 0.06 if form.startswith("of points") else 1e-3 * right.max()
    assert np.abs(np.diag(np.float64(got)) - np.diag(right)).max() < atol
    assert got.min() > -atol


def test_law_of_cancelling_a_gram_matrix_of_distances_stays_positive():
    def likelihood(x):
        gram = jnp.exp(-0.5 * DISTANCES["broadcasts"](x, x)) + 1e-3 * jnp.eye(len(x))
        return jnp.log(jnp.diag(jnp.linalg.cholesky(gram))).sum()

    (right,) = run(likelihood, POINTS)
    (got,) = run(mpjax.autocast(likelihood, "bf16-mixed"), POINTS)
    np.testing.assert_allclose(got, right, rtol=1e-2)


def test_law_of_cancelling_angles_between_rotations():
    def angles(vectors, others):
        def rotation(v):
            q, _ = jnp.linalg.qr(v.reshape(-1, 3, 3))
            return q

        trace = jnp.trace(
            rotation(vectors) @ jnp.swapaxes(rotation(others), -1, -2), axis1=-2, axis2=-1
        )
        return jnp.arccos(jnp.clip((trace - 1) / 2, -1 + 1e-6, 1 - 1e-6))

    vectors = jnp.asarray(X[:, :9])
    others = vectors + 0.01 * X[:, 7:]
    (right,) = run(angles, vectors, others)
    (got,) = run(mpjax.autocast(angles, "bf16-mixed"), vectors, others)
    np.testing.assert_allclose(got, right, atol=2e-3)


def test_law_of_cancelling_a_factorisation_machine():
    def pairs(x, v):
        return 0.5 * ((x @ v) ** 2 - x**2 @ v**2)

    x = np.eye(16, dtype=np.float32)  # one feature each: no pairs
    (got,) = run(mpjax.autocast(pairs, "bf16-mixed"), x, W)
    np.testing.assert_allclose(got, 0, atol=1e-5)


# How many products of each are float32: the others of the same values are no terms that cancel.
FLOAT32_OF = {
    "distances of two networks": (lambda y, z: DISTANCES["broadcasts"](y, z), 1),
    "a distance of means by grams": (
        lambda y, z: (y @ y.T).mean() + (z @ z.T).mean() - 2 * (y @ z.T).mean(),
        3,
    ),
    "a value and its square": (lambda y, z: y * y - y + z, 0),
    "a product of two parts, less one": (lambda y, z: y[:, 0] * y[:, 1] - y[:, 0] + z[:, 0], 0),
    "a logistic step": (lambda y, z: y + 0.1 * y * (1 - y) + z, 0),
    "a product of means, less one": (lambda y, z: y.mean() * z.mean() - y.mean(), 0),
}


@pytest.mark.parametrize("name", FLOAT32_OF)
def test_products_that_do_not_cancel_stay_low(name):
    read, count = FLOAT32_OF[name]

    def fun(x, w, v):
        return jnp.tanh(read(jnp.tanh(x) @ w, jnp.tanh(x) @ v)).sum()

    for g in (fun, jax.value_and_grad(fun, argnums=(1, 2))):
        rows = mpjax.explain(g, "bf16-mixed")(X, W, W).rows
        dtypes = [r.dtype for r in rows if r.operation == "dot_general" for _ in range(r.count)]
        # Of a product that is float32, both gradients are, where the function takes these.
        assert dtypes.count("f32") == count * (1 if g is fun else 3)


@pytest.mark.parametrize(
    ("fun", "says"),
    [
        (DISTANCES["broadcasts"], "cancels it: float32; to have it low, cast its operands"),
        (
            lambda a, b: jnp.arccos(
                jnp.clip(0.3 * jnp.trace(jnp.tanh(a[:3, :3]) @ jnp.tanh(b[:3, :3])), -1, 1)
            ),
            "constants of few columns, or into few cells: float32; to have it low",
        ),
    ],
)
def test_explain_says_why_a_product_is_float32_and_what_to_type_to_have_it_low(fun, says):
    rows = mpjax.explain(fun, "bf16-mixed")(X, X).rows
    (row,) = (r for r in rows if r.operation == "dot_general")
    assert row.dtype == "f32"
    assert says in row.reason

    def cast(a, b):
        return _sum(a**2)[:, None] - 2 * (a.astype(jnp.bfloat16) @ b.T.astype(jnp.bfloat16)).astype(
            jnp.float32
        )

    rows = mpjax.explain(cast, "bf16-mixed")(X, X).rows
    assert "bf16" in {r.dtype for r in rows if r.operation == "dot_general"}


ALMOST_THE_SAME = "a value that may be almost the same is subtracted from it by sub, test_autocast_"
ANGLE = "rounded, a large angle or remainder is another one: read by "


@pytest.mark.parametrize(
    ("fun", "operation", "says"),
    [
        (lambda x, w: (lambda u: u[1:] - u[:-1])(288 + x @ w) @ w.T, "add", ALMOST_THE_SAME),
        (lambda x, w: (lambda u: u - u.mean(0))(288 + x @ w) @ w.T, "add", ALMOST_THE_SAME),
        (
            lambda x, w: (lambda z: jnp.tanh(z) - jnp.tanh(1.01 * z))(x @ w) @ w.T,
            "tanh",
            ALMOST_THE_SAME,
        ),
        (lambda x, w: (lambda u: u - x[:, :6])(x[:, :6] + x @ w) @ w.T, "add", ALMOST_THE_SAME),
        (lambda x, w: jnp.sin(x[:, :6] + jnp.tanh(x @ w)) @ w.T, "add", ANGLE + "sin, test_"),
        (lambda x, w: lax.rem(x[:, :6] + jnp.tanh(x @ w), x[:, 6:12]) @ w.T, "add", ANGLE + "rem"),
        (lambda x, w: jnp.fmod(jnp.tanh(x @ w), 0.1) @ w.T, "tanh", ANGLE + "fmod, test_"),
        (lambda x, w: ((x @ w + 300) % 24) @ w.T, "add", ANGLE + "remainder, test_"),
    ],
)
def test_explain_says_what_is_not_rounded_before_a_difference_or_a_sine(fun, operation, says):
    for row in mpjax.explain(fun, "bf16-mixed")(X, W).rows:
        if row.operation == operation:
            assert row.dtype == "f32"
            assert row.reason.startswith(says)
            return
    pytest.fail(f"no row of {operation}")


@pytest.mark.parametrize("periodic", [jnp.sin, lambda z: jnp.fmod(z, 24), lambda z: z % 24])
def test_what_a_sine_or_a_remainder_reads_of_a_product_is_as_it_was_added_up(periodic):
    fun = mpjax.autocast(lambda x, w: periodic(1000 + 8 * (x @ w)) @ w.T, "bf16-mixed")
    eqns = jax.make_jaxpr(fun)(X, W).eqns
    products = [e for e in eqns if e.primitive.name == "dot_general"]
    assert all(v.aval.dtype == jnp.bfloat16 for e in products for v in e.invars)
    rounded = [e.outvars[0].aval.dtype for e in eqns if e.primitive.name == "linked_product"]
    assert rounded == [jnp.float32, jnp.float32]


NOT_CANCELLING = {
    "a norm behind a product": lambda x, w: (lambda h: h - h.mean(1, keepdims=True))(x @ w) @ w.T,
    "two products of one input": lambda x, w: (x[:, :8] @ w[:8] + x[:, :8] @ w[8:]) @ w.T,
    "products with a weight each": lambda x, w: (x @ w - jnp.tanh(x @ w) @ w[:6] @ w[:6]) @ w.T,
    "neighbours of one product": lambda x, w: (lambda u: u[1:] - u[:-1])(x @ w) @ w.T,
    "gates of a recurrence": lambda x, w: (
        (lambda z, n: (1 - z) * n[::-1] + z * n)(jax.nn.sigmoid(x @ w), jnp.tanh(x @ w)) @ w.T
    ),
    "a gram, and its product": lambda x, w: ((x @ x.T) @ (x @ w) + x @ w) @ w.T,
    "a pool beside a product": lambda x, w: (
        (lax.reduce_window(x, np.float32(0), lax.add, (3, 1), (1, 1), "SAME") + x @ (w @ w.T)) @ w
    ),
    "a norm behind a bias": lambda x, w: (lambda u: u - u.mean(0))(x @ w + w[0]) @ w.T,
    "the tangent of a gelu": lambda x, w: jax.jvp(
        lambda u: jax.nn.gelu(jax.nn.gelu(x @ u) @ u.T) @ u, (w,), (w[::-1],)
    ),
    "a Hessian, times a vector": lambda x, w: jax.jvp(
        jax.grad(lambda u: jnp.mean((jax.nn.gelu(x @ u) @ u.T) ** 2)), (w,), (w,)
    ),
    "a penalty on the weight": lambda x, w: jnp.mean((x @ w) ** 2) + 1e-2 * jnp.sum(w**2),
}


@pytest.mark.parametrize("name", NOT_CANCELLING)
def test_other_sums_leave_their_products_low(name):
    rows = mpjax.explain(NOT_CANCELLING[name], "bf16-mixed")(X, W).rows
    assert {r.dtype for r in rows if r.operation == "dot_general"} == {"bf16"}


@pytest.mark.parametrize("form", ["ij,ij->ij", "ij,i->ij"])
def test_an_einsum_that_multiplies_by_gates_is_elementwise(form):
    def gated(x, w):
        gates = jnp.exp(x[:, :6] - x[:, :6].max(1, keepdims=True))
        return jnp.einsum(form, x @ w, gates if form == "ij,ij->ij" else gates[:, 0]) @ w.T

    rows = mpjax.explain(gated, "bf16-mixed")(X, W).rows
    assert not [r for r in rows if "constants of few columns" in r.reason]
    low = [r for r in rows if r.operation == "dot_general" and r.dtype == "bf16"]
    assert sum(r.count for r in low) == 2, rows


# -- a stop test ---------------------------------------------------


def _turns(body, start, going):
    def turn(c):
        return (*body(*c[:-1]), c[-1] + 1)

    return lax.while_loop(lambda c: going(*c[:-1]) & (c[-1] < 2000), turn, (*start, 0))[-1]


def _new(z, w):
    return jnp.tanh(z @ w + jnp.asarray(X[:8, :6]))


STOPS = {
    "a carried change": lambda w: _turns(
        lambda z, _: (_new(z, w), jnp.max(jnp.abs(_new(z, w) - z))),
        (jnp.zeros((8, 6)), jnp.float32(np.inf)),
        lambda _, change: change > 1e-5,
    ),
    "compared in the condition": lambda w: _turns(
        lambda z, _: (_new(z, w), z),
        (jnp.zeros((8, 6)), jnp.ones((8, 6))),
        lambda z, before: jnp.linalg.norm(z - before) > 1e-5,
    ),
    "a carried boolean": lambda w: _turns(
        lambda z, _: (_new(z, w), jnp.all(jnp.abs(_new(z, w) - z) < 1e-5)),
        (jnp.zeros((8, 6)), jnp.asarray(False)),
        lambda _, done: ~done,
    ),
    "a product in the condition": lambda w: _turns(
        lambda z: (_new(z, w),),
        (jnp.zeros((8, 6)),),
        lambda z: jnp.sum((_new(z, w) - z) ** 2) > 1e-10,
    ),
    "a product in a call": lambda w: _turns(
        lambda z, _: (jax.jit(_new)(z, w), jnp.max(jnp.abs(jax.jit(_new)(z, w) - z))),
        (jnp.zeros((8, 6)), jnp.float32(np.inf)),
        lambda _, change: change > 1e-5,
    ),
}


def _differ(a, b):
    """Returns whether a host says that arrays differ: nobody can look into that."""
    out = jax.ShapeDtypeStruct((), bool)
    return jax.pure_callback(lambda a, b: np.any(np.abs(a - b) > 1e-5), out, a, b)


STOPS["a condition that cannot be looked into"] = lambda w: _turns(
    lambda z, _: (_new(z, w), z), (jnp.zeros((8, 6)), jnp.ones((8, 6))), _differ
)


@pytest.mark.parametrize("policy", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("stop", STOPS)
def test_law_of_the_stop_test_a_fixed_point_ends(stop, policy):
    w = jnp.asarray(W[:6] / np.linalg.norm(W[:6], 2) * 0.9)
    (right,) = run(STOPS[stop], w)
    (got,) = run(mpjax.autocast(STOPS[stop], policy), w)
    assert right < 200
    assert abs(int(got) - int(right)) <= 2


def test_law_of_the_stop_test_a_decoder_stops_at_an_integer_and_is_low():
    def decode(w, v):
        def turn(c):
            token, count = c
            logits = jax.nn.one_hot(token, 16) @ w @ v
            return jnp.argmax(logits), count + 1

        return lax.while_loop(lambda c: (c[0] != 3) & (c[1] < 20), turn, (jnp.int32(0), 0))[1]

    rows = mpjax.explain(decode, "bf16-mixed")(W, _RNG.normal(size=(6, 16)).astype(np.float32)).rows
    assert {r.dtype for r in rows if r.operation == "dot_general"} == {"bf16"}


@pytest.mark.parametrize("stop", ["a carried change", "a condition that cannot be looked into"])
def test_law_of_the_stop_test_explain_says_so(stop):
    rows = mpjax.explain(STOPS[stop], "bf16-mixed")(W[:6]).rows
    reasons = {r.reason for r in rows if r.operation == "dot_general"}
    assert any("stop test" in r and "cast its operands" in r for r in reasons), reasons


def test_law_of_the_stop_test_layers_before_the_loop_are_low():
    """Also where what each turn computes of their result is computed again behind the loop."""

    def loss(w, x):
        z = jnp.tanh(jnp.tanh(x @ w) @ w)

        def similar():
            return jnp.tanh(z @ z.T / 4)

        def turn(c):
            return jnp.tanh(similar().sum(1) / 8 + c[0] / 2), c[0]

        start = jnp.zeros(8), jnp.ones(8)
        u = lax.while_loop(lambda c: jnp.max(jnp.abs(c[0] - c[1])) > 1e-5, turn, start)[0]
        return jnp.mean((similar().mean(1) - lax.stop_gradient(u)) ** 2)

    rows = mpjax.explain(loss, "bf16-mixed")(W[:6], X[:8, :6]).rows
    products = [r for r in rows if r.operation == "dot_general"]
    assert {r.dtype: sum(p.count for p in products if p.dtype == r.dtype) for r in products} == {
        "bf16": 2,
        "f32": 2,
    }


# -- decisions -------------------------------------------------------------------------------------


def _result_of_first_product(fun, *args):
    eqns = jax.make_jaxpr(mpjax.autocast(fun, "bf16-mixed"))(*args).jaxpr.eqns
    return next(e.outvars[0].aval.dtype for e in eqns if e.primitive.name == "dot_general")


def test_law_of_decisions_a_maximum_by_equality_reads_an_unrounded_product():
    def hard(x, w, v):
        z = x @ w
        return (z == z.max(1, keepdims=True)).astype(z.dtype) @ v

    assert _result_of_first_product(hard, X, W, V) == jnp.float32


def test_law_of_decisions_the_derivative_of_a_maximum_reads_what_is_stored():
    def pooled(x, w, v):
        return jnp.sum(jnp.tanh((x @ w).reshape(24, 3, 2).max(2)) @ v[:3])

    grad = jax.grad(pooled, 1)
    assert "eq" in {e.primitive.name for e in jax.make_jaxpr(grad)(X, W, V).jaxpr.eqns}
    assert _result_of_first_product(grad, X, W, V) == jnp.bfloat16
