"""What is added up is added up in float32: what loops carry, and the cotangents of low values."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _differential import equations
from _planned import constants, sizes
from _samples import normal
from _small import BF16, distance, together
from flax import linen as nn
from flax import nnx
from jax import lax

from mpjax import Policy, autocast

KEY = jax.random.key(0)
X = normal(0, 6, 8)
W = normal(1, 8, 8)
ROWS = jnp.array([0, 1, 1, 2])
HALF = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
SUMS = ("reduce_sum", "scatter-add", "psum", "psum_invariant", "reduce_scatter", "cumsum")


def low_sums(fun, *args):
    """The sums of more than one value that a function takes in 16 bits."""
    found = []
    for eqn in equations(jax.make_jaxpr(fun)(*args).jaxpr):
        atoms = (*eqn.invars, *eqn.outvars)
        low = any(getattr(v.aval, "dtype", None) in HALF for v in atoms)
        if (
            eqn.primitive.name == "reduce_sum"
            and eqn.invars[0].aval.size == eqn.outvars[0].aval.size
        ):
            continue  # over axes of size one
        if low and eqn.primitive.name in SUMS:
            found.append(str(eqn))
    return found


# -- what loops carry --------------------------------------------------------------------------


def test_a_float32_accumulator_is_not_rounded_in_the_loop():
    """A scan that adds up products is as exact as the sum of what it adds."""

    def total(x, w):
        return lax.scan(lambda c, xi: (c + xi @ w, None), jnp.zeros(8), x)[0]

    x = 1 + jnp.abs(jax.random.normal(KEY, (512, 8)))
    w = jnp.abs(W)
    for fun in (total, lambda x, w: total(x, w) @ jnp.eye(8), _while_total):
        want = total(x, w)
        error = jnp.linalg.norm(autocast(fun, "bf16-mixed")(x, w) - want) / jnp.linalg.norm(want)
        # Each term is rounded a few times, each at random; a rounded carry loses a half-ulp of the
        # total 512 times, which is a quarter of it and more.
        assert float(error) < 2.0**-8


def _while_total(x, w):
    body = lambda i, c: jnp.where(i >= 0, c + x[i] @ w, c)  # noqa: E731 - one expression
    return lax.fori_loop(0, 512, body, jnp.zeros(8)) @ jnp.eye(8)


def test_a_carry_that_no_product_touches_keeps_its_bits():
    def fun(x, w):
        c, ys = lax.scan(lambda c, _: (c + 0.5 * c, c), jnp.sum(x, axis=0), None, length=2)
        return c, ys, c @ w

    got, want = autocast(fun, "bf16-mixed")(X, W), fun(X, W)
    for a, b in zip(got[:2], want[:2], strict=True):
        assert jnp.array_equal(a, b)


@pytest.mark.parametrize("steps", ["unrolled", "in a loop"])
def test_small_steps_along_gradients_that_the_function_takes_are_not_lost(steps):
    """Rounded to bfloat16, a step of 1e-4 would leave the weight where it is."""

    def step(w, _):
        gradient = jax.grad(lambda w: jnp.mean(jnp.square(jnp.tanh(X @ w) - 1)))(w)
        return w - 1e-4 * gradient, None

    def fun(w):
        if steps == "in a loop":
            return lax.scan(step, w, None, length=3)[0]
        return step(step(step(w, None)[0], None)[0], None)[0]

    got, want = jax.jit(autocast(fun, "bf16-mixed"))(W), jax.jit(fun)(W)
    assert distance(got - W, want - W) < 8 * BF16


def test_a_product_whose_result_is_dropped_rounds_nothing():
    def fun(x, w, pred):
        turn = lambda s: (s[0] + 1, jnp.concatenate([s[1][1:], s[1][:1]]))  # noqa: E731
        turned = lax.while_loop(lambda s: s[0] < 3, turn, (0, x))[1]

        def no(p):
            jax.checkpoint(lambda t: jnp.tanh(t @ w))(turned)
            return p

        return lax.cond(pred, lambda p: p, no, turned)

    def tangents(x, w, pred):
        return jax.jvp(lambda x, w: fun(x, w, pred), (x, w), (jnp.sin(x + 2), jnp.sin(w + 2)))

    for f in (fun, tangents):
        got, want = (jax.tree.leaves(g(X, W, True)) for g in (autocast(f, "bf16-mixed"), f))
        for a, b in zip(got, want, strict=True):
            assert jnp.array_equal(a, b)


def test_a_function_rounds_what_depends_on_a_low_operand_only():
    def fun(x, w):
        y = x @ w
        pair = jax.jit(lambda y, x: (jnp.tanh(y), jnp.tanh(x), y - y))
        low, exact, _ = pair(y, x)
        return low @ w, jnp.logaddexp(exact, 1.0), jax.jit(lambda y, x: x / 3)(y, x)

    got, want = autocast(fun, "bf16-mixed")(X, W), fun(X, W)
    for a, b in zip(got[1:], want[1:], strict=True):
        assert jnp.array_equal(a, b)
    barrier = lambda x, w: lax.optimization_barrier(fun(x, w)[1:])  # noqa: E731 - stored
    stored = jax.make_jaxpr(autocast(barrier, "bf16-mixed"))(X, W).jaxpr.eqns[-1]
    assert {v.aval.dtype.name for v in stored.invars} == {"float32"}


def test_a_weight_that_a_loop_only_scales_stays_pure():
    """Its gradient would be rounded with it."""

    def loss(w, x):
        w = lax.fori_loop(0, 2, lambda _, v: v / jnp.sqrt(jnp.sum(v * v)), jnp.exp(w))
        return jnp.sum(x @ (2 * w))

    eqns = list(equations(jax.make_jaxpr(autocast(loss, "bf16-mixed"))(W, X).jaxpr))
    product = next(eqn for eqn in eqns if eqn.primitive.name == "linked_product")
    assert product.invars[3].aval.dtype == jnp.float32  # what the gradient flows through


# -- cotangents --------------------------------------------------------------------------------


def _loop(body):
    def fun(x, w):
        h = (x @ w)[0]
        return lax.scan(lambda c, xi: (c, body(xi, h, w)), 0.0, x)[1]

    return fun


REPEATING = {
    "broadcast": lambda x, w: jnp.broadcast_to(x @ w, (5, 6, 8)) @ w,
    "tile": lambda x, w: jnp.tile(x @ w, (5, 1)) @ w,
    "repeat": lambda x, w: jnp.repeat(x @ w, 3, axis=0) @ w,
    "gather": lambda x, w: (x @ w)[ROWS] @ w,
    "take_along_axis": lambda x, w: jnp.take_along_axis(x @ w, jnp.zeros((9, 8), int), 0) @ w,
    "ties of a maximum": lambda x, w: jnp.max(jax.lax.stop_gradient(0 * x) + x @ w, axis=0) @ w,
    "minimum": lambda x, w: jnp.min(x @ w, axis=0) @ w,
    "top_k": lambda x, w: lax.top_k(x @ w, 2)[0] @ w[:2],
    "sort": lambda x, w: jnp.sort(x @ w, axis=0) @ w,
    "set": lambda x, w: (x @ w).at[ROWS].set((x @ w)[:4]) @ w,
    "scalar": lambda x, w: (x[0, 0] * (x @ w)) @ w,
    "low scalar": lambda x, w: ((x @ w)[0, 0] * (x @ w)) @ w,
    "row": lambda x, w: (x[:1] + (x @ w)) @ w,
    "clip": lambda x, w: jnp.clip(x @ w, x[0, 0], x[1, 1] + 5) @ w,
    "diagonal": lambda x, w: jnp.diag(w @ w) @ w,
}


@pytest.mark.parametrize("name", REPEATING)
def test_cotangents_of_a_repeated_low_value_are_summed_in_float32(name):
    fast = autocast(REPEATING[name], "bf16-mixed")
    loss = lambda x, w: jnp.sum(jnp.sin(fast(x, w)))  # noqa: E731 - one expression
    assert low_sums(jax.grad(loss, (0, 1)), X, W) == []


LOOPS = {
    "elementwise": _loop(lambda xi, h, w: (xi * h) @ w),
    "product": lambda x, w: (lambda h: lax.map(lambda xi: xi @ h, x))(w @ w),
    "inner scan": _loop(lambda xi, h, w: lax.map(lambda xj: xj * xi * h, X) @ w),
    "remat": _loop(jax.checkpoint(lambda xi, h, w: (xi * h) @ w)),
    "cond": _loop(lambda xi, h, w: lax.cond(xi[0] > 0, lambda h: xi * h, lambda h: h, h) @ w),
}


@pytest.mark.parametrize("name", LOOPS)
def test_cotangents_of_what_a_loop_reads_are_summed_in_float32(name):
    """JAX adds them up from iteration to iteration, in the dtype of what is read."""
    fast = autocast(LOOPS[name], "bf16-mixed")
    loss = lambda x, w: jnp.sum(jnp.sin(fast(x, w)))  # noqa: E731 - one expression
    eqns = equations(jax.make_jaxpr(jax.grad(loss, (0, 1)))(X, W).jaxpr)
    assert not [e for e in eqns if e.primitive.name == "add_any" and e.invars[0].aval.dtype in HALF]


def test_sums_of_cotangents_keep_both_modes_and_second_order():
    """A loop once lost the second derivatives with respect to what every iteration reads."""

    def both(name):
        fun = lambda x, w: jnp.sum(jnp.tanh((REPEATING | LOOPS)[name](x, w) / 8))  # noqa: E731
        fast = autocast(fun, "bf16-mixed")
        return lambda *at: [jax.jvp(jax.grad(f, (0, 1)), at, (X, W))[1] for f in (fast, fun)]

    names = ("gather", "tile", "minimum", "elementwise", "inner scan")
    x = (X + jnp.arange(6.0)[:, None]) / 4  # far enough apart for a minimum
    for name, results in together({name: both(name) for name in names}, x, W).items():
        for got, want in zip(*results, strict=True):
            assert distance(got, want) < 2.0**-4, name


# -- layers in which such sums were once low ----------------------------------------------------


@pytest.mark.standard_promotion("linen and nnx promote their own scalars")
def test_bias_gradients_of_layers_are_summed_in_float32():
    words = jax.random.normal(KEY, (2, 5, 8))
    attention = nn.MultiHeadAttention(num_heads=2)
    params = attention.init(KEY, words)
    loss = autocast(lambda v, x: jnp.sum(attention.apply(v, x) * jnp.cos(x)), "bf16-mixed")
    assert low_sums(jax.grad(loss), params, words) == []

    rngs = nnx.Rngs(0)
    pair = nnx.Sequential(nnx.Linear(8, 4, rngs=rngs), nnx.Linear(4, 2, rngs=rngs))
    graph, state = nnx.split(pair)
    loss = autocast(lambda s, x: jnp.sum(nnx.merge(graph, s)(x) ** 2), "bf16-mixed")
    assert low_sums(jax.grad(loss), state, X) == []


def test_a_sort_beside_the_users_own_half_keeps_its_dtype():
    def fun(x, w):
        keys, moved = lax.sort([x.astype(jnp.float16), x @ w], num_keys=1)
        return moved @ w, keys

    fast = autocast(fun, Policy(jnp.float32, jnp.bfloat16, jnp.float32))
    jaxpr = jax.make_jaxpr(fast)(X, W).jaxpr
    (sort,) = [e for e in equations(jaxpr) if e.primitive.name == "sort"]
    assert [v.aval.dtype.name for v in sort.outvars] == ["float16", "bfloat16"]
    grad = jax.grad(lambda x: sum(jnp.sum(jnp.sin(y)) for y in fast(x, W)))
    eqns = equations(jax.make_jaxpr(grad)(X).jaxpr)
    sorted_again = next(e for e in eqns if e.primitive.name == "sort")
    assert sorted_again.outvars[0].aval.dtype == jnp.float16


def test_numpy_values_of_a_set_are_taken_as_they_are():
    fun = lambda x, w: (x @ w).at[np.array([0, 2])].set(np.float32(0.5)) @ w  # noqa: E731
    grad = jax.grad(lambda x: jnp.sum(autocast(fun, "16-mixed")(x, W)))(X)
    assert jnp.array_equal(grad[0], jnp.zeros(8))


@pytest.mark.parametrize("spelling", ["bd,bd->b", "bd,bd->", "bdc,bdc->bc"])
def test_a_product_that_is_a_sum_of_elements_is_no_product(spelling):
    """A squared norm of a float16 row of 300s is 720000; what a normalised row reads is no inf."""

    def normalised(x, w):
        y = (x @ w).reshape(6, 8, *[1] * (len(spelling.split(",")[0]) - 2))
        return jnp.einsum("bd...,de->be", y / jnp.sqrt(jnp.sum(jnp.einsum(spelling, y, y))), W)

    fast = autocast(normalised, "16-mixed")
    assert distance(fast(X, 300 * W), normalised(X, 300 * W)) < 2.0**-9
    # Low operands are read as they are.
    dots = [e for e in equations(jax.make_jaxpr(fast)(X, W).jaxpr) if "dot" in e.primitive.name]
    assert {v.aval.dtype.name for e in dots for v in e.invars[:2]} == {"float16"}


@pytest.mark.parametrize("summed", [jnp.vdot, lambda a, b: jnp.einsum("bv,bv->b", a, b).sum()])
def test_a_loss_that_is_written_as_a_product_is_summed_in_float32(summed):
    labels = jax.nn.one_hot(jnp.arange(6), 8)
    loss = lambda x, w, total: -total(labels, jax.nn.log_softmax(x @ w))  # noqa: E731
    got, want = (
        jax.value_and_grad(autocast(lambda x, w, t=t: loss(x, w, t), "bf16-mixed"), 1)(X, W)
        for t in (summed, lambda a, b: jnp.sum(a * b))
    )
    assert distance(got, want) < 1e-6


@pytest.mark.parametrize("keepdims", [True, False])
def test_a_loop_that_normalises_by_logsumexp_carries_float32(keepdims):
    """Sinkhorn's: the maximum that is added to a float32 logarithm is no residual stream."""

    def step(_, z):
        total = jax.nn.logsumexp(z, axis=1, keepdims=keepdims)
        return z - (total if keepdims else total[:, None])

    fun = lambda x, w: jnp.exp(lax.fori_loop(0, 2, step, x @ w))  # noqa: E731
    loops = [
        e
        for e in jax.make_jaxpr(autocast(fun, "bf16-mixed"))(X, W).eqns
        if e.primitive.name == "scan"
    ]
    assert [v.aval.dtype.name for e in loops for v in e.outvars][-1] == "float32"


@pytest.mark.parametrize(("policy", "most"), [("bf16-mixed", 256), ("16-mixed", 2048)])
def test_counts_are_read_low_while_they_fit(policy, most):
    """What dispatches to experts is one-hot rows, added up; 257 would be 256 in bfloat16."""

    def dispatched(x, chosen):
        return jnp.einsum("ne,nd->ed", jax.nn.one_hot(chosen, 4).sum(1), x)

    for count in (2, most, most + 1):
        jaxpr = jax.make_jaxpr(autocast(dispatched, policy))(X, jnp.zeros((6, count), int))
        (dot,) = (e for e in equations(jaxpr.jaxpr) if e.primitive.name == "dot_general")
        dtype = "float32" if count > most else "bfloat16" if "bf16" in policy else "float16"
        assert {v.aval.dtype.name for v in dot.invars} == {dtype}


def test_the_state_of_a_sum_holds_for_every_choice_of_its_terms():
    for values in ((0.0, 1.0), (-1.0, 1.0), (0.0, 3.0), (255.0,), (-1e9, 0.0)):
        for dims in ((2,), (3, 85), (3, 86), (1000,), (0,)):
            total, count = constants.total(values, dims), int(np.prod(dims))
            sums = np.linspace(min(values) * count, max(values) * count, count + 1) if count else []
            for dtype in HALF:
                with np.errstate(all="ignore"):
                    exact = np.array_equal(np.asarray(sums, dtype).astype(np.float64), sums)
                assert exact or not constants.fit(total, dtype), (values, dims, dtype)
    assert constants.fit(constants.total((0.0, 1.0), (8, 32)), HALF[0])
    for value in (0.5, np.inf, np.nan):
        assert constants.total((value,), (2,)) is None


def test_only_a_sum_of_two_is_rounded_as_it_is_added_up(monkeypatch):
    """Upsampling copies each pixel to a neighbour, and a sum of two is rounded once either way."""

    def loss(n):
        def fun(x, w):
            y = jnp.repeat(x @ w, n, axis=0) @ w
            return jnp.sum(jnp.tanh(y) ** 2)

        return jax.grad(autocast(fun, "bf16-mixed"), (0, 1))

    assert len(low_sums(loss(2), X, W)) == 1
    assert low_sums(loss(3), X, W) == []
    got = loss(2)(X, W)
    monkeypatch.setattr(sizes, "copies", lambda eqn: 3)
    assert low_sums(loss(2), X, W) == []
    for a, b in zip(got, loss(2)(X, W), strict=True):
        assert jnp.array_equal(a, b)


@pytest.mark.parametrize("spelling", ["bv,bv->", "bv,bv->b"])
def test_a_gradient_that_scales_by_a_product_is_rounded_in_neither_order(spelling):
    """What `vdot` multiplies its operands by, in its derivative, is a product by its primitive."""

    def loss(x, w):
        y = x @ w
        return jnp.sum(jnp.einsum(spelling, jax.nn.softmax(y), jax.nn.log_softmax(y)) ** 2)

    outside = jax.grad(autocast(loss, "bf16-mixed"), 1)(X, W)
    inside = autocast(jax.grad(loss, 1), "bf16-mixed")(X, W)
    assert distance(inside, outside) < 1e-6


def test_a_loss_reads_the_logits_that_it_gathers_from_as_they_are_stored():
    """Sure of its answers, it is less than what one logit is rounded by."""

    def loss(x, w, labels):
        logits = 30 * (x @ w) + w[0]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    x = jax.random.normal(KEY, (256, 8))
    labels = jnp.argmax(30 * (x @ W) + W[0], axis=-1)
    np.testing.assert_allclose(
        autocast(loss, "bf16-mixed")(x, W, labels), loss(x, W, labels), rtol=0.2
    )
