"""Exponentials under float16: past 65504, or below 6e-8 and divided by, where float32 is right."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _cuts import AROUND, cuts_in_turn
from _small import check_all, each_inside_and_outside, products
from jax import lax

import mpjax

_RNG = np.random.default_rng(0)
X = _RNG.normal(size=(32, 8)).astype(np.float32)
W = (0.5 * _RNG.normal(size=(8, 8))).astype(np.float32)


def _attention_without_a_maximum(cut):
    """Scores of up to 30: their exponentials are past 1e12."""

    def loss(x, w):
        q = x @ w
        scores = 30 * jnp.tanh(q @ q.T)
        weights = cut(jnp.exp)(scores)
        return jnp.mean((cut(lambda p, x: p @ x)(weights, x) / weights.sum(-1, keepdims=True)) ** 2)

    return loss


def _masked(cut):
    def loss(x, w):
        q = x @ w
        weights = cut(lambda s: jnp.where(jnp.tri(32) > 0, jnp.exp(s), 0))(30 * jnp.tanh(q @ q.T))
        return jnp.mean((weights.T @ x).T ** 2 / (weights.sum(0) + 1) ** 2)

    return loss


def _masked_by_an_input(cut):
    seen = np.tri(32, dtype=np.float32)

    def loss(x, w):
        q = x @ w
        mask = seen + 0 * x[:, :1]
        weights = cut(lambda s, m: jnp.exp(s) * m)(30 * jnp.tanh(q @ q.T), mask)
        return jnp.mean(jnp.log(cut(lambda p, x: p @ x**2)(weights, x) + 1))

    return loss


def _read_by_log(kernel):
    def made(cut):
        def loss(x, w):
            weights = cut(kernel)(30 * jnp.tanh(x @ w @ (x @ w).T))
            return jnp.mean(jnp.log(cut(lambda k, x: k @ x**2)(weights, x) + 1))

        return loss

    return made


def _sinkhorn(cut):
    """An entropic transport in its kernel form: `exp(-cost)` of costs of up to 40."""

    def loss(x, w):
        z = x @ w
        cost = jnp.sum((z[:, None] - x[None]) ** 2, -1)
        kernel = cut(lambda c: jnp.exp(-c))(cost)
        share = jnp.ones(32) / 32

        def turn(pair, _):
            v = cut(lambda k, u: share / (k.T @ u))(kernel, pair[0])
            return (cut(lambda k, v: share / (k @ v))(kernel, v), v), None

        (u, v), _ = lax.scan(turn, (share, share), None, length=30)
        return jnp.sum(u[:, None] * kernel * v * cost)

    return loss


def _means(weigh, divide=lambda y, s: y / s):
    """Means by weights that are all small: of their sum, however small it is, they are shares."""

    def made(cut):
        def loss(x, w):
            weights = cut(weigh)(x @ w)
            products = cut(lambda a, b: a.T @ b)(weights, jnp.tanh(x @ w.T))
            means = cut(divide)(products, jnp.sum(weights, 0)[:, None])
            return jnp.mean(jnp.tanh(means @ w) ** 2)

        return loss

    return made


def _added_by_a_scan(cut):
    """An attention by small features, whose context is added up position by position."""

    def loss(x, w):
        q, k, v = cut(jax.nn.sigmoid)(x @ w - 18), cut(jax.nn.silu)(x @ w.T - 18), x @ w**2

        def turn(carry, kv):
            context, count = carry
            k, v = kv
            return (0.9 * context + cut(jnp.outer)(k, v), 0.9 * count + k), None

        (context, count), _ = lax.scan(turn, (jnp.zeros((8, 8)), jnp.zeros(8)), (k, v))
        return jnp.mean((cut(lambda q, c: q @ c)(q, context) / (q @ count)[:, None]) ** 2)

    return loss


def _chosen_by(largest):
    """An attention by positive features, whose exponents are lowered by some maximum."""

    def features(h):
        exponents = 2 * h - jnp.sum(h**2, -1, keepdims=True)
        return jnp.exp(exponents - largest(exponents)) + 1e-6

    def made(cut):
        def loss(x, w):
            h = 2 * x @ w
            q, k = cut(features)(h), cut(features)(jnp.roll(h, 1, 1))
            context, count = cut(lambda k, x: k.T @ x)(k, x), k.sum(0)
            return jnp.mean((cut(lambda q, c: q @ c)(q, context) / (q @ count)[:, None]) ** 2)

        return loss

    return made


LOSSES = {
    "means by sigmoids": _means(lambda a: jax.nn.sigmoid(a - 18)),
    "means by a power": _means(lambda a: 10.0 ** (a - 8)),
    "means by products": _means(lambda a: jnp.cumprod(jax.nn.sigmoid(a - 3), -1)),
    "centres of clusters, one far away": _means(lambda a: jax.nn.softmax(a - 18 * jnp.eye(8)[0])),
    "means by scaled weights": _means(lambda a: 1e-8 * jax.nn.softplus(a)),
    "means by a reciprocal": _means(lambda a: jax.nn.sigmoid(a - 18), lambda y, s: y * (1 / s)),
    "means by swishes": _means(lambda a: jax.nn.silu(a - 18)),
    "means by gelus": _means(lambda a: jax.nn.gelu(a - 5, approximate=False)),
    "means by gates": _means(lambda a: a * jax.nn.sigmoid(jnp.roll(a, 1, 1) - 18)),
    "features that a scan adds up": _added_by_a_scan,
    "features below the maximum of all": _chosen_by(jnp.max),
    "features below half of their maximum": _chosen_by(lambda e: 0.5 * jnp.max(e, -1)[:, None]),
    "an attention without a maximum": _attention_without_a_maximum,
    "one with a mask": _masked,
    "one with a mask that is an input": _masked_by_an_input,
    "a kernel of two scales": _read_by_log(lambda s: jnp.exp(s) + jnp.exp(s / 2) + 1e-6),
    "squares of exponentials": _read_by_log(lambda s: jnp.exp(s / 2) ** 2),
    "powers of ten": _read_by_log(lambda s: 10.0 ** (s / 3)),
    "hyperbolic cosines": _read_by_log(jnp.cosh),
    "an entropic transport": _sinkhorn,
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", LOSSES)
def test_law_of_exponentials_what_float16_cannot_hold_stays_float32(name):
    right = jax.value_and_grad(LOSSES[name](AROUND["uncut"]), (0, 1))(X, W)
    taken = functools.partial(jax.value_and_grad, argnums=(0, 1))
    funs = {cut: LOSSES[name](AROUND[cut]) for cut in cuts_in_turn((LOSSES, name))}
    for where, got in each_inside_and_outside(taken, funs, "16-mixed", X, W):
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(right), strict=True):
            assert np.linalg.norm(a - b) < 0.03 * np.linalg.norm(b), where


def _softmax_by_hand(x, w):
    z = x @ w
    e = jnp.exp(z - z.max(-1, keepdims=True))
    return (e @ w) / e.sum(-1, keepdims=True)


def _deep(head):
    """A head behind two layers, whose swishes may be small."""
    return lambda x, w: head(jax.nn.silu(jax.nn.silu(x @ w) @ w), w)


LOW = {
    "a softmax": lambda x, w: jax.nn.softmax(x @ w) @ w,
    "a softmax by hand": _softmax_by_hand,
    "one with a temperature": lambda x, w: jnp.exp((x - x.max(-1, keepdims=True)) / 3) @ w,
    "of a logsumexp": lambda x, w: (
        jnp.exp(x - jax.scipy.special.logsumexp(x, -1, keepdims=True)) @ w
    ),
    "of a log softmax": lambda x, w: jnp.exp(jax.nn.log_softmax(x @ w)) @ w,
    "limited": lambda x, w: jnp.exp(jnp.clip(x @ w, -5, 5)) @ w,
    "a softplus": lambda x, w: jax.nn.softplus(x @ w) @ w,
    "an elu": lambda x, w: jax.nn.elu(x @ w) @ w,
    "a sigmoid by hand": lambda x, w: 1 / (1 + jnp.exp(-x @ w)) @ w,
    "an affine coupling": lambda x, w: (
        jnp.concatenate(
            [x[:, :4] * jnp.exp(jnp.tanh((x @ w)[:, :4])) + (x @ w)[:, 4:], x[:, 4:]], -1
        )
        @ w
    ),
    "a spread of a latent": lambda x, w: (x @ w + jnp.exp(0.5 * (x @ w)) * x) @ w,
    "a mean over its spread": _deep(lambda h, w: h @ w / (jax.nn.softplus(h @ w.T) + 1e-3)),
    "times its reciprocal": _deep(lambda h, w: h @ w * (1 / (jax.nn.softplus(h @ w.T) + 1e-3))),
    "over an elu": _deep(lambda h, w: h @ w / (jax.nn.elu(h @ w.T) + 1.001)),
    "over a root": _deep(lambda h, w: h @ w / jnp.sqrt(jax.nn.softplus(h @ w.T) + 1e-3)),
    "over a magnitude": _deep(lambda h, w: h @ w / (1 + abs(h @ w.T))),
}


def _gradients(fun):
    return jax.grad(lambda x, w: jnp.mean(fun(x, w) ** 2), (0, 1))


@pytest.mark.parametrize("taken", [lambda fun: fun, _gradients], ids=["value", "gradients"])
@pytest.mark.parametrize("name", LOW)
def test_layers_with_exponentials_in_range_are_low(name, taken):
    rows = mpjax.explain(taken(LOW[name]), "16-mixed")(X, W).rows
    assert {row.dtype for row in rows if row.operation == "dot_general"} == {"f16"}


def test_bfloat16_holds_an_exponential_and_explain_says_why_float16_does_not():
    fun = LOSSES["an attention without a maximum"](AROUND["uncut"])
    rows = {
        policy: [r for r in mpjax.explain(fun, policy)(X, W).rows if r.operation == "dot_general"]
        for policy in ("bf16-mixed", "16-mixed")
    }
    assert {r.dtype for r in rows["bf16-mixed"]} == {"bf16"}
    (kept,) = [r for r in rows["16-mixed"] if r.dtype == "f32"]
    assert "float16 might not hold an exponential" in str(kept.reason)


def _trunk(x, w):
    """Layers whose results may be small, and a stream that adds them up."""
    x = jax.nn.gelu(x @ w)
    return x + jax.nn.silu(x @ w) @ w


def _by_positive_features(features):
    """An attention without a softmax."""

    def loss(x, w):
        h = _trunk(x, w)
        q, k, v = features(h @ w), features(h @ w.T), h @ w
        return jnp.mean((q @ (k.T @ v) / ((q @ k.sum(0))[:, None] + 1e-6)) ** 2)

    return loss


def _by_chances(x, w):
    """Values weighted by exponentials, of which one is 1."""
    h = _trunk(x, w)
    scores = (h @ w[:, :1])[:, 0]
    weights = jnp.exp(scores - scores.max())
    return jnp.mean((weights @ (h @ w) / weights.sum()) ** 2)


def _pooled(weigh):
    """A mean of rows, weighted by gates."""

    def loss(x, w):
        h = _trunk(x, w)
        weights = weigh(h @ w)
        return jnp.mean((weights.T @ h / weights.sum(0)[:, None]) ** 2)

    return loss


WEIGHTED = {  # losses, with how many of their products come before the weights, and how many after
    "an attention by an elu": (_by_positive_features(lambda z: jax.nn.elu(z) + 1), 6, 3),
    "by a swish": (_by_positive_features(jax.nn.silu), 6, 3),
    "by a softplus": (_by_positive_features(jax.nn.softplus), 6, 3),
    "by a gated unit": (_by_positive_features(lambda z: z * jax.nn.sigmoid(z[:, ::-1])), 6, 3),
    "pooled by sigmoids": (_pooled(jax.nn.sigmoid), 4, 1),
    "pooled by gelus": (_pooled(jax.nn.gelu), 4, 1),
}


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("cut", ["uncut", "jit", "checkpoint"])
@pytest.mark.parametrize("name", WEIGHTED)
def test_layers_before_weights_of_a_mean_are_low(name, cut, inside):
    """Weights may be too small for float16. What a layer made of them, or they of a layer, is not.

    Of the gradient, float32 are the derivatives of the products of the weights, what is computed
    again, and what is added to these; no layer is.
    """
    fun, layers, after = WEIGHTED[name]
    fun = AROUND[cut](fun)
    if not inside:
        expected = ["float16"] * layers + ["float32"] * after
        assert products(mpjax.autocast(fun, "16-mixed"), X, W) == expected
        return
    dtypes = products(mpjax.autocast(jax.grad(fun, (0, 1)), "16-mixed"), X, W)
    assert dtypes.count("float32") <= 5 * after


def test_exponentials_below_their_maximum_are_weights_in_range():
    assert "float32" not in products(mpjax.autocast(_by_chances, "16-mixed"), X, W)


# Sums of squares that a product reads: float32 holds them where float16 does not.
POWERS = {
    "causal weights": lambda r, cut: jnp.exp(
        -cut(lambda e: jnp.tril(jnp.ones((8, 8)), -1) @ e)(jnp.mean(r.reshape(8, -1) ** 2, 1))
    ),
    "squared lengths": lambda r, cut: cut(lambda r: jnp.sum(r * r, 0) @ W)(r) / 1e6,
    "fourth powers": lambda r, cut: jnp.log(cut(lambda r: jnp.sum(r**4, 0) @ W**2)(r)),
    "by einsum": lambda r, cut: jnp.tanh(1e-6 * cut(lambda r: jnp.einsum("nd,nd->d", r, r) @ W)(r)),
    "two errors": lambda r, cut: (
        cut(lambda r: jnp.stack([jnp.mean(r**2), jnp.sum(r[0] ** 2)]) @ W[:2])(r) / 1e6
    ),
    "a ratio": lambda r, cut: cut(lambda r: (r**2).sum(1) @ X)(r) / (r**2).sum(),
    "cubes": lambda r, cut: cut(lambda r: r**3 @ W)(r) / 1e9,
    "powers": lambda r, cut: (
        cut(lambda r: jnp.concatenate([r[:, :1] ** k for k in range(8)], 1) @ W)(r) / 1e20
    ),
}


@pytest.mark.parametrize("name", POWERS)
def test_law_of_range_a_sum_of_powers_is_float32_for_a_product_too(name):
    def fun(cut):
        return lambda x, w: jnp.mean(POWERS[name](1e3 * jnp.tanh(x @ w) @ w, AROUND[cut]))

    check_all({cut: fun(cut) for cut in AROUND}, "16-mixed", X, W, rtol=1e-2)


# Sums of exponentials, or the largest of them, before a product.
ADDED_UP = {
    "a sum": lambda e: e.sum(1),
    "a mean": lambda e: e.mean(1),
    "the largest": lambda e: e.max(1),
    "a running sum": lambda e: jnp.cumsum(e, 1)[:, -1],
    "by a product with ones": lambda e: jnp.einsum("nkm,k->nm", e, jnp.ones(2)),
    "of segments": lambda e: jax.ops.segment_sum(e[:, 0], jnp.arange(32) // 2, 16),
    "of rows of a loop": lambda e: lax.scan(
        lambda c, x: (c + x, None), jnp.zeros((32, 8)), e.swapaxes(0, 1)
    )[0],
    ".at[].add": lambda e: jnp.zeros((32, 8)).at[:].add(e[:, 0]),
    "scaled": lambda e: e.sum(1) * (W[0] + 2),
}


@pytest.mark.parametrize("shift", [-18.0, 12.0])
@pytest.mark.parametrize("name", ADDED_UP)
def test_law_of_range_a_sum_of_exponentials_is_as_each_of_them(name, shift):
    def fun(cut):
        def of(x, w):
            z = jnp.stack([x @ w, x @ w.T], 1) / 4 + shift
            made = cut(lambda z: ADDED_UP[name](jnp.exp(z)))(z)
            return jnp.log(jnp.abs(cut(lambda e, w: e @ w)(made, abs(w) + 0.1)))

        return of

    funs = {cut: fun(AROUND[cut]) for cut in cuts_in_turn((ADDED_UP, name))}
    check_all(funs, "16-mixed", X, W, rtol=1e-7, atol=2e-2)


def _written_out(turn, carry, rows):
    outs = []
    for row in zip(*rows, strict=True):
        carry, out = turn(carry, row)
        outs.append(out)
    return jnp.stack(outs)


LOOPS = {
    "written out": _written_out,
    "scan": lambda turn, carry, rows: lax.scan(turn, carry, rows)[1],
    "two scans": lambda turn, carry, rows: lax.scan(
        lambda c, row: lax.scan(turn, c, row),
        carry,
        jax.tree.map(lambda a: a.reshape(4, 2, *a.shape[1:]), rows),
    )[1].reshape(8, -1),
}


@pytest.mark.parametrize("shift", [-18.0, 12.0])
@pytest.mark.parametrize("loop", LOOPS)
def test_law_of_range_a_sum_of_exponentials_is_one_in_each_turn_of_a_loop(loop, shift):
    """As the sums of an attention without a maximum are, token by token."""

    def fun(x, w):
        k, q = (x @ w)[:8] + shift, abs(x @ w)[:8]

        def turn(total, row):
            read = jnp.log(jnp.outer(row[1], total) @ (abs(w) + 0.1))[0]
            return total + jnp.exp(row[0]), read

        return LOOPS[loop](turn, jnp.exp(k[0] - 1), (k, q + 0.1))

    right = fun(X, W)
    np.testing.assert_allclose(mpjax.autocast(fun, "16-mixed")(X, W), right, atol=2e-2)


TABLE = (1 + np.abs(_RNG.normal(size=(8, 8)))).astype(np.float32) * np.sign(W)
# Arrays that a function closes over: float16 has 0 or inf for some of their rows or columns.
NOT_HELD = {
    "amounts of 1e-9": lambda x: 1e9 * (x @ (1e-9 * TABLE).astype(np.float32)),
    "heats of 1e6": lambda x: 1e-6 * (x @ (1e6 * TABLE).astype(np.float32)),
    "a column of 1e-9": lambda x: (
        x
        @ np.float32(TABLE * np.geomspace(1e-9, 1, 8))
        @ np.float32(np.diag(np.geomspace(1e9, 1, 8)))
    ),
    "a row of 1e-9": lambda x: (
        (x * np.float32(np.geomspace(1e9, 1, 8)))
        @ np.float32(TABLE * np.geomspace(1e-9, 1, 8)[:, None])
    ),
    "on a device": lambda x: 1e9 * (x @ jnp.array(1e-9 * TABLE)),
    "scaled inputs": lambda x: 1e9 * ((x * 1e-9) @ TABLE.astype(np.float32)),
    "divided weights": lambda x: 1e8 * (x @ (jnp.asarray(TABLE) / 1e8)),
    "large inputs": lambda x: ((x * 2e6) @ TABLE.astype(np.float32)) / 2e6,
    "turned": lambda x: 1e9 * jnp.einsum("nd,ed->ne", x, jnp.array(1e-9 * TABLE)[::-1].T),
}


@pytest.mark.parametrize("name", NOT_HELD)
def test_law_of_range_a_constant_that_float16_does_not_hold_is_not_made_so(name):
    def fun(cut):
        return lambda x, w: cut(NOT_HELD[name])(jnp.tanh(x @ w))

    funs = {where: fun(cut) for where, cut in AROUND.items()}
    check_all(funs, "16-mixed", X, W, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("size", [1e-9, 1e6])
def test_law_of_range_what_a_number_takes_out_of_it_is_so_behind_a_branch_and_a_loop(size):
    def fun(cut):
        return lambda x, w: cut(lambda h: h * size)(jnp.tanh(x @ w)) @ w / size

    funs = {where: fun(cut) for where, cut in AROUND.items()}
    check_all(funs, "16-mixed", X, W, rtol=4e-3, atol=4e-3)


def test_weights_that_a_function_closes_over_are_low_also_small_ones():
    for weights in (W, 1e-3 * W, np.float32(np.sign(W) * 1e-4), jnp.zeros((8, 8)), 1e4 * W):
        fun = mpjax.autocast(lambda x, w: jnp.tanh(x @ w) @ weights, "16-mixed")  # noqa: B023
        assert products(fun, X, W) == ["float16"] * 2


def test_what_a_network_reads_of_powers_is_low():
    squared = {
        "relu squared": lambda x, w: jnp.square(jax.nn.relu(x @ w)) @ w,
        "a norm": lambda x, w: jnp.linalg.norm((x @ w).reshape(32, 2, 4), axis=-1) @ w[:2],
        "rms": lambda x, w: (x @ w) * lax.rsqrt(jnp.mean((x @ w) ** 2, -1, keepdims=True)) @ w,
        "a limit": lambda x, w: jnp.minimum(jnp.sum((x @ w)[:, :, None] ** 2, -1), 100.0) @ w,
    }
    for name, fun in squared.items():
        assert set(products(mpjax.autocast(fun, "16-mixed"), X, W)) == {"float16"}, name
