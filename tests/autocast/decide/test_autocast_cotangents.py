"""Law 9 of autocast's page: cotangents of several readers of a low value add up in float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _evaluate import exactly, run
from jax import lax

import mpjax

_RNG = np.random.default_rng(5)
X = _RNG.normal(size=(24, 16)).astype(np.float32)
W = (3 * _RNG.normal(size=(16, 6)) / 4).astype(np.float32)


@jax.custom_vjp
def _through(h, c):
    return jnp.sum(h * c)


_through.defvjp(lambda h, c: (_through(h, c), (h, c)), lambda res, ct: (ct * res[1], ct * res[0]))


@jax.custom_vjp
def _through_a_loop(h, c):
    return lax.fori_loop(0, 1, lambda _, s: s + jnp.sum(h * c), jnp.zeros(()))


_through_a_loop.defvjp(
    lambda h, c: (_through_a_loop(h, c), (h, c)), lambda res, ct: (ct * res[1], ct * res[0])
)
COTANGENTS = {
    "custom_vjp": _through,
    "a custom_vjp that holds a loop": lambda h, c: _through_a_loop(h, c),
    "a loop": lambda h, c: lax.fori_loop(0, 4, lambda _, s: s + jnp.sum(h * c) / 4, jnp.zeros(())),
    "a region": lambda h, c: _in_full(h, c),
}


def _in_full(h, c):
    with mpjax.full_precision():
        return jnp.sum(h * c)


@pytest.mark.parametrize("policy", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("reader", COTANGENTS)
def test_law_of_cotangents_those_that_cancel_are_added_before_they_are_rounded(reader, policy):
    c, d = 30 * X[:, :6], X[:, 6:12]

    def loss(w):
        h = jnp.asarray(X) @ w
        return jnp.sum(h * c) - COTANGENTS[reader](h, c + d)

    (right,) = run(jax.grad(loss), W)
    (got,) = run(jax.grad(mpjax.autocast(loss, policy)), W)
    scale = np.linalg.norm(X.T @ np.float64(d))
    assert np.linalg.norm(got - right) < 2**-6 * scale


@jax.custom_vjp
def _square(h):
    return h * h


_square.defvjp(lambda h: (h * h, h), lambda h, ct: (2 * h * ct,))


def _square_in_full(h):
    with mpjax.full_precision():
        return h * h


SQUARES = {
    "custom_vjp": _square,
    "a loop": lambda h: lax.scan(lambda c, row: (c, row * row), jnp.float32(0), h)[1],
    "a region": _square_in_full,
}
CUTS = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "cond": lambda square: lambda h: lax.cond(h[0, 0] < 1e9, square, jnp.zeros_like, h),
    "barrier": lambda square: lambda h: square(lax.optimization_barrier(h)),
    "reshape": lambda square: lambda h: square(h.reshape(-1, 3)).reshape(h.shape),
    "transposed": lambda square: lambda h: square(h.T).T,
    "reversed": lambda square: lambda h: jnp.flip(square(jnp.flip(h))),
}


@pytest.mark.parametrize("cut", [*CUTS, "made in a jit", "all in a jit"])
@pytest.mark.parametrize("reader", SQUARES)
def test_law_of_cotangents_those_that_cancel_meet_across_cuts_and_moves(reader, cut):
    """`|h|² - 2 h·t` hands 2 (h - t) back, of which roundings of both terms leave nothing."""

    def made(w):
        return jnp.asarray(X) @ w + 1

    def loss(w, t, v, cut=cut):
        square = CUTS.get(cut, lambda square: square)(SQUARES[reader])
        h = (jax.jit(made) if cut == "made in a jit" else made)(w)
        head = lambda h, t: square(h) - 2 * h * t  # noqa: E731
        return jnp.tanh((jax.jit(head) if cut == "all in a jit" else head)(h, t) @ v).sum()

    near = (X @ W + 1) * (1 + 1e-3 * _RNG.normal(size=(24, 6)))
    args = (W, near.astype(np.float32), W[:6] / 3)
    (right,) = exactly(jax.grad(loss), *args)

    def error(fun):
        (got,) = run(jax.grad(mpjax.autocast(fun, "bf16-mixed")), *args)
        return np.linalg.norm(got - right) / np.linalg.norm(right)

    assert error(loss) <= 1.01 * error(functools.partial(loss, cut=None))


def _stacked(fun):
    def run(*xs):
        _, outs = lax.scan(lambda c, x: (c, fun(*x)), 0, jax.tree.map(lambda x: x[None], xs))
        return jax.tree.map(lambda x: x[0], outs)

    return run


PARTS = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "barrier": lambda fun: lambda *xs: lax.optimization_barrier(fun(*lax.optimization_barrier(xs))),
    "cond": lambda fun: lambda *xs: lax.cond(xs[0][0, 0] < 1e9, fun, fun, *xs),
    "scan": _stacked,
}
OFFSET = (10 + X).astype(np.float32)


@pytest.mark.parametrize("policy", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("cut", ["behind the mean", "behind all", "before the mean is read"])
@pytest.mark.parametrize("part", PARTS)
def test_law_of_cotangents_that_of_a_mean_meets_those_of_its_values(part, cut, policy):
    """A batch norm, cut: `h - mean(h)` hands back what has no mean, times data of 10."""

    def statistics(x, w):
        h = x @ w
        mean = h.mean(0, keepdims=True)
        return h, mean, jnp.mean((h - mean) ** 2, 0)

    def loss(w, part=PARTS[part]):
        def of(name, fun):
            return part(fun) if name == cut else fun

        x = jnp.asarray(OFFSET, w.dtype)
        if cut == "behind all":
            h, mean, spread = part(statistics)(x, w)
        else:
            h, mean = of("behind the mean", lambda x, w: statistics(x, w)[:2])(x, w)
            spread = None

        def normed(h, mean):
            c = h - mean
            return c * lax.rsqrt((jnp.mean(c**2, 0) if spread is None else spread) + 1e-5)

        normed = of("before the mean is read", normed)(h, mean)
        return jnp.sum(jnp.tanh(normed) * jnp.asarray(X[:, :6] + 3, w.dtype))

    (right,) = exactly(jax.grad(loss), W)

    def error(fun):
        (got,) = run(jax.grad(mpjax.autocast(fun, policy)), W)
        return np.linalg.norm(got - right) / np.linalg.norm(right)

    assert error(loss) <= 1.5 * error(functools.partial(loss, part=lambda fun: fun))


def _each_turn_multiplies(made, h):
    return lax.scan(lambda h, _: (h @ made, None), h, None, length=100)[0]


def _each_turn_adds(made, h):
    return lax.scan(lambda h, _: (h + made + made**2, None), h, None, length=100)[0]


@pytest.mark.parametrize("policy", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize(
    "around", [lambda fun: fun, jax.jit, jax.checkpoint], ids=["", "jit", "remat"]
)
@pytest.mark.parametrize("loop", [_each_turn_multiplies, _each_turn_adds])
def test_law_of_cotangents_those_of_all_turns_add_up_before_they_are_rounded(loop, around, policy):
    """All turns of a loop read a softmax, whose derivative takes off what its rows share."""

    def loss(w, low=None):
        x = jnp.asarray(X[:6], w.dtype)
        z = x @ w if low is None else (x.astype(low) @ w.astype(low)).astype(w.dtype)
        made = jax.nn.softmax(z)
        looped = around(loop)(made, jnp.ones_like(made))
        return jnp.sum(jnp.log(looped) * jnp.asarray(np.arange(3.0, 9.0), w.dtype))

    (right,) = exactly(jax.grad(loss), W)

    def error(fun):
        (got,) = run(jax.grad(fun), W)
        return np.linalg.norm(got - right) / np.linalg.norm(right)

    low = mpjax.get_policy(policy).compute_dtype
    by_hand = error(functools.partial(loss, low=low))
    assert error(mpjax.autocast(loss, policy)) <= 2 * max(by_hand, 4 * float(jnp.finfo(low).eps))
