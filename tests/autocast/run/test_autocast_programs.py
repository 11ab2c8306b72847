"""autocast on programs that JAX lets one write: solvers, collectives, rules, kernels, effects."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _differential import equations
from _small import BF16, W, X, distance, loss, mesh_of_four, together
from jax import lax
from jax.experimental import checkify, io_callback
from jax.experimental import pallas as pl
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mpjax import autocast, explain, full_precision, numerics
from mpjax.testing import assert_products


def check(fun, *args, roundings=16, policy="bf16-mixed"):
    """Values and gradients of `autocast(fun)` against those of `fun`."""
    check_all({"": fun}, *args, roundings=roundings, policy=policy)


def check_all(funs, *args, roundings=16, policy="bf16-mixed"):
    """Checks functions of the same arrays, by name, in one compilation."""
    places = tuple(range(len(args)))

    def both(fun):
        pair = autocast(fun, policy), fun
        return lambda *xs: [(f(*xs), jax.grad(loss(f), places)(*xs)) for f in pair]

    for name, fun in funs.items():
        fast = autocast(fun, policy)
        assert jax.eval_shape(fast, *args) == jax.eval_shape(fun, *args), name
    found = together({name: both(fun) for name, fun in funs.items()}, *args)
    for name, ((got, got_grads), (want, want_grads)) in found.items():
        assert distance(got, want) < roundings * BF16, name
        assert distance(got_grads, want_grads) < roundings * BF16, name


# -- solvers -----------------------------------------------------------------------------------


def _positive(w):
    return 2 * jnp.eye(16) + 0.1 * w @ w.T


def _implicit(x, w):
    """A fixed point with a rule of its own, as solver libraries write it."""

    @jax.custom_vjp
    def fixed_point(x, w):
        return lax.while_loop(
            lambda s: s[1] < 12, lambda s: (x + jnp.tanh(s[0] @ w) / 8, s[1] + 1), (x, 0)
        )[0]

    def backward(res, ct):
        y, w = res
        _, pullback = jax.vjp(lambda y, w: jnp.tanh(y @ w) / 8, y, w)
        total = lax.fori_loop(0, 8, lambda _, u: ct + pullback(u)[0], ct)
        return total, pullback(total)[1]

    fixed_point.defvjp(lambda x, w: ((y := fixed_point(x, w)), (y, w)), backward)
    return fixed_point(x[0], w) @ w


SOLVERS = {
    "implicit": _implicit,
    "cg": lambda x, w: jax.scipy.sparse.linalg.cg(lambda v: _positive(w) @ v, x[0], maxiter=20)[0],
    "cholesky": lambda x, w: jnp.linalg.cholesky(_positive(w)) @ x.T,
    "triangular": lambda x, w: jax.scipy.linalg.solve_triangular(_positive(w), w @ x.T),
    "eigenvalues": lambda x, w: jnp.linalg.eigvalsh(_positive(w)) * (x @ w),
    "singular values": lambda x, w: jnp.linalg.svd(x @ w, compute_uv=False),
}


def test_solvers_give_what_they_give_in_float32():
    check_all(SOLVERS, X, W)


# -- loops and scans ---------------------------------------------------------------------------

LOOPS = {
    "associative products": lambda x, w: lax.associative_scan(jnp.matmul, jnp.stack([w] * 3)) @ x.T,
    "associative sums": lambda x, w: lax.associative_scan(jnp.add, x @ w),
    "batched map": lambda x, w: lax.map(lambda xi: jnp.tanh(xi @ w), x, batch_size=3),
    "sort": lambda x, w: jnp.sort(jnp.round(4 * x)) @ w,
    "top_k": lambda x, w: lax.top_k(x, 4)[0] @ w[:4],
    "grouped product": lambda x, w: lax.ragged_dot(x, jnp.stack([w, -w]), jnp.array([3, 5])) @ w,
    "named axis": lambda x, w: jax.vmap(lambda xi: lax.psum(xi @ w, "i") @ w, axis_name="i")(x),
    "vmap of vmap": lambda x, w: jax.vmap(lambda a: jax.vmap(lambda b: jnp.vdot(a, w @ b))(x))(x),
    "closure_convert": lambda x, w: (lambda f, c: f(x, *c))(
        *jax.closure_convert(lambda y: jnp.tanh(y @ w), x)
    ),
    "platform": lambda x, w: lax.platform_dependent(x, cpu=lambda x: x @ w, default=jnp.tanh) @ w,
    "fourier": lambda x, w: jnp.fft.irfft(2 * jnp.fft.rfft(x @ w)) @ w,
}


def test_loops_and_calls_give_what_they_give_in_float32():
    check_all(LOOPS, X / 4, W)


def test_a_function_that_returns_nothing():
    @jax.jit
    def looks(x):
        jnp.tanh(x)

    def fun(x, w):
        looks(x @ w)
        return jnp.tanh(x @ w)

    check(fun, X, W)


@jax.custom_jvp
def _bounded(y):
    return 1.0


_bounded.defjvp(lambda primals, tangents: (1.0, jnp.zeros(())))


@jax.custom_vjp
def _ruled(y):
    return 1.0


_ruled.defvjp(lambda y: (1.0, y), lambda y, ct: (jnp.zeros_like(y),))

RETURN_CONSTANTS = {
    "jit": jax.jit(lambda y: 2.0),
    "jit of integers": lambda y: jax.jit(lambda i: 2.0)(jnp.argmax(y)),
    "jit, a size": jax.jit(lambda y: jnp.float32(y.size) / 256),
    "jit, a decision": lambda y: jnp.where(jax.jit(lambda y: True)(y), 2.0, 1.0),
    "jit, an array": lambda y: jax.jit(lambda y: jnp.ones(3))(y).sum(),
    "jit, beside a value": lambda y: jax.jit(lambda y: (2.0, jnp.tanh(y)))(y)[0],
    "jit, twice": lambda y: sum(jax.jit(lambda y: (2.0, 2.0))(y)),
    "jit in a jit": jax.jit(lambda y: jax.jit(lambda y: 2.0)(y)),
    "jit of a norm": lambda y: jax.jit(lambda y: 2.0)(jax.nn.standardize(y)),
    "vmap": lambda y: jax.vmap(jax.jit(lambda y: 2.0))(y).mean(),
    "checkpoint": jax.checkpoint(lambda y: 2.0),
    "custom_jvp": _bounded,
    "custom_vjp": _ruled,
    "scan, a carry": lambda y: lax.scan(lambda c, row: (2.0, None), y.sum(), y)[0],
    "scan, stacked": lambda y: lax.scan(lambda c, row: (c, 2.0), (), y)[1].mean(),
    "fori": lambda y: lax.fori_loop(0, 3, lambda i, c: 2.0, y.sum()),
    "cond": lambda y: lax.cond(y.sum() > 0, lambda y: 1.0, lambda y: 2.0, y),
}


@pytest.mark.parametrize("policy", ["bf16-mixed", "16-mixed"])
def test_a_call_that_returns_a_constant(policy):
    funs = {
        f"{name}, {where}": fun
        for name, constant in RETURN_CONSTANTS.items()
        for where, fun in {
            "of an input": lambda x, w, constant=constant: (x @ w) * constant(x),
            "of a product": lambda x, w, constant=constant: (x @ w) * constant(x @ w),
            "in a loop": lambda x, w, constant=constant: lax.scan(
                lambda c, _: (jnp.tanh(c @ w) * constant(c), None), x, None, length=2
            )[0],
        }.items()
    }
    check_all(funs, X, W, policy=policy)


def test_every_tool_reads_calls_that_return_constants():
    for name, constant in RETURN_CONSTANTS.items():

        def fun(w, x, constant=constant):
            return jnp.sum((x @ w) * constant(x @ w))

        rows = explain(fun, "bf16-mixed")(W, X).rows
        assert any(row.operation == "dot_general" for row in rows), name
        numerics.find_promotions(fun)(W, X)
        for tool in (numerics.diagnose, numerics.exponents, numerics.compare):
            tool(fun, "16-mixed")(W, X)


def test_sums_that_nothing_reads():
    def fun(b, x, w):
        unread = jnp.ones((4, 8)) + b  # noqa: F841 - what a model computes and does not return
        return jnp.sum(x @ w)

    args = jnp.ones(8), jnp.ones((4, 4)), jnp.ones((4, 8))
    loss, grads = jax.value_and_grad(autocast(fun, "bf16-mixed"), 1)(*args)
    assert loss == 128
    np.testing.assert_array_equal(grads, 8)


def test_a_loop_until_convergence():
    def fun(x, w):
        far = lambda s: jnp.max(jnp.abs(s[0] - s[1])) > 1e-2  # noqa: E731 - one expression
        return lax.while_loop(far, lambda s: (0.5 * jnp.tanh(s[0] @ w), s[0]), (x, x + 1))

    got, want = (jax.jit(f)(X, W) for f in (autocast(fun, "bf16-mixed"), fun))
    assert float(jnp.max(jnp.abs(got[0] - want[0]))) < 0.05
    assert jax.tree.map(jax.typeof, got) == jax.tree.map(jax.typeof, want)


@pytest.mark.parametrize("key", [jax.random.key(0), jax.random.PRNGKey(0)], ids=["key", "raw"])
def test_a_loop_carries_a_key_beside_a_state(key):
    def fun(x, w):
        def step(carry, _):
            x, key = carry
            key, noise = jax.random.split(key)
            x = x + 1e-3 * jnp.tanh(x @ w) + 0.03 * jax.random.normal(noise, x.shape, jnp.float32)
            return (x, key), None

        return lax.scan(step, (x, key), None, length=20)[0][0]

    check(fun, X, W, roundings=1)


def test_loops_that_vmap_joined_end_each_by_itself():
    def fun(x, key, w):
        def step(state):
            x, key, y = state
            x = x + 0.5 * jnp.abs(jax.random.normal(key, (), jnp.float32))
            return x, jax.random.split(key, 2)[1], jnp.tanh(y @ w)

        return lax.while_loop(lambda state: state[0] < 3, step, (x, key, X[0]))

    xs, keys = jnp.arange(4.0), jax.random.split(jax.random.key(0), 4)
    for axes in ((0, 0, None), (0, None, None)):
        many = (xs, keys if axes[1] == 0 else keys[0], W)
        fast = autocast(jax.vmap(fun, axes), "bf16-mixed")
        got, want = fast(*many), jax.vmap(autocast(fun, "bf16-mixed"), axes)(*many)
        assert jax.tree.map(jax.typeof, got) == jax.tree.map(jax.typeof, want)
        np.testing.assert_array_equal(got[0], want[0])
        np.testing.assert_array_equal(*(jax.random.key_data(key) for key in (got[1], want[1])))
        assert distance(got[2], want[2]) < 2 * BF16
    twice = jax.vmap(jax.vmap(fun, (0, None, None)), (0, 0, None))
    grid = (xs[:, None] + jnp.zeros(2), keys, W)
    got, want = (f(*grid)[2] for f in (autocast(twice, "bf16-mixed"), twice))
    assert distance(got, want) < 8 * BF16


# -- rules -------------------------------------------------------------------------------------


def test_nondiff_arguments_of_a_forward_rule():
    @functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
    def scaled(act, n, x, w):
        return n * act(x @ w)

    @scaled.defjvp
    def rule(act, n, primals, tangents):
        return scaled(act, n, *primals), 7 * (tangents[0] @ primals[1])

    fun = lambda x: scaled(jnp.tanh, 2.0, x, W) @ W  # noqa: E731 - one expression
    fast = autocast(fun, "bf16-mixed")
    for mode in (lambda f: jax.jvp(f, (X,), (X,))[1], lambda f: jax.grad(loss(f))(X)):
        assert distance(mode(fast), mode(fun)) < 8 * BF16


def test_symbolic_zeros_reach_a_backward_rule():
    seen = []

    @jax.custom_vjp
    def both(x, w):
        return x @ w, jnp.sum(x)

    def forward(x, w):
        seen.append((x.perturbed, w.perturbed))
        return both(x.value, w.value), (x.value, w.value)

    def backward(res, cts):
        seen.append(isinstance(cts[1], jax.custom_derivatives.SymbolicZero))
        return 5 * cts[0] @ res[1].T, res[0].T @ cts[0]

    both.defvjp(forward, backward, symbolic_zeros=True)
    fun = lambda x: jnp.sum(jnp.tanh(both(x, W)[0]))  # noqa: E731 - one expression
    got = jax.grad(autocast(fun, "bf16-mixed"))(X)
    assert seen[-2:] == [(True, False), True]
    assert distance(got, jax.grad(fun)(X)) < 8 * BF16


def test_a_backward_rule_in_a_large_group():
    @jax.custom_vjp
    def clipped(x):
        return 1.5 * x

    clipped.defvjp(lambda x: (clipped(x), None), lambda _, ct: (jnp.clip(1.5 * ct, -0.5, 0.5),))
    x, w = jnp.tile(X, (64, 4)), jnp.tile(W, (4, 4)) / 4
    check(lambda x, w: clipped(jnp.tanh(x @ w) * 2) @ w, x, w)


def test_a_region_inside_a_rule_stays_float32():
    @jax.custom_vjp
    def product(x, w):
        with full_precision():
            return x @ w

    def backward(res, ct):
        with full_precision():
            return ct @ res[1].T, res[0].T @ ct

    product.defvjp(lambda x, w: (product(x, w), (x, w)), backward)
    fun = autocast(lambda x, w: product(x, w).sum(), "bf16-mixed")
    assert_products(jax.grad(fun, (0, 1)), X, W, dtype="float32", least=3)


# -- devices -----------------------------------------------------------------------------------


def _collective(x, w):
    y = x @ w
    ring = [(i, (i + 1) % 4) for i in range(4)]
    return (
        lax.psum(y, "d"),
        lax.pmean(jnp.tanh(y), "d"),
        lax.all_gather(y, "d", tiled=True) @ w,
        lax.psum_scatter(jnp.tile(y, (2, 1)), "d", tiled=True),
        lax.ppermute(y, "d", ring) @ w,
        lax.all_to_all(y.reshape(2, 4, 4), "d", 1, 1),
        y * lax.axis_index("d").astype(jnp.float32),
    )


@pytest.mark.no_leak_check("the gradient of a shard_map under jit leaks in JAX itself")
@pytest.mark.parametrize("check_vma", [True, False])
def test_collectives(check_vma):
    sharded, replicated = P("d"), P()
    outs = (replicated, replicated, *[sharded] * 5)

    def around(body):
        specs = {"in_specs": (sharded, replicated), "out_specs": outs}
        return jax.shard_map(body, mesh=mesh_of_four(), check_vma=check_vma, **specs)

    check(around(_collective), X, W)
    outside = around(autocast(_collective, "bf16-mixed"))
    assert distance(jax.jit(outside)(X, W), around(_collective)(X, W)) < 8 * BF16
    eqns = list(equations(jax.make_jaxpr(outside)(X, W).jaxpr))
    sums = [e for e in eqns if e.primitive.name.startswith(("psum", "reduce_scatter"))]
    moves = [e for e in eqns if e.primitive.name in ("all_gather", "ppermute")]
    assert len(sums) >= 3
    assert {e.invars[0].aval.dtype.name for e in sums} == {"float32"}
    assert {e.invars[0].aval.dtype.name for e in moves} == {"bfloat16"}


def test_sharding_constraints_are_kept():
    where = NamedSharding(mesh_of_four(), P("d"))
    fun = autocast(lambda x, w: lax.with_sharding_constraint(x @ w, where) @ w, "bf16-mixed")
    eqns = equations(jax.make_jaxpr(fun)(X, W).jaxpr)
    (constraint,) = [e for e in eqns if e.primitive.name == "sharding_constraint"]
    assert constraint.params["sharding"] == where


# -- kernels, calls to the host ----------------------------------------------------------------


def _doubled(x_ref, out_ref):
    out_ref[...] = 2 * x_ref[...]


def test_what_autocast_does_not_know_gets_the_dtypes_it_was_traced_with():
    def fun(x, w):
        y = x @ w
        like = jax.ShapeDtypeStruct(y.shape, y.dtype)
        y = pl.pallas_call(_doubled, out_shape=like, interpret=True)(y)
        y = jax.pure_callback(lambda a: np.asarray(a) / 2, like, y, vmap_method="sequential")
        return y @ w

    fast = autocast(fun, "bf16-mixed")
    eqns = list(equations(jax.make_jaxpr(fast)(X, W).jaxpr))
    for name in ("pallas_call", "pure_callback"):
        (eqn,) = [e for e in eqns if e.primitive.name == name]
        assert eqn.invars[0].aval.dtype == jnp.float32
    assert distance(jax.jit(fast)(X, W), fun(X, W)) < 4 * BF16


def test_only_the_branches_of_its_platform_are_lowered():
    def fun(x, w):
        y = x @ w
        for_tpus = pl.pallas_call(_doubled, out_shape=jax.ShapeDtypeStruct(y.shape, y.dtype))
        return lax.platform_dependent(y, tpu=for_tpus, default=lambda y: 2 * y) @ w

    assert distance(jax.jit(autocast(fun, "bf16-mixed"))(X, W), jax.jit(fun)(X, W)) < 4 * BF16


def test_effects_keep_their_order_and_the_dtypes_of_values():
    seen = []

    def fun(x, w):
        y = x @ w
        io_callback(lambda a: seen.append((1, a.dtype.name)), None, y, ordered=True)
        z = jnp.tanh(y)
        io_callback(lambda a: seen.append((2, a.dtype.name)), None, z, ordered=True)

        def body(c, _):
            io_callback(lambda a: seen.append((3, a.dtype.name)), None, c, ordered=True)
            return c @ w, None

        return lax.scan(body, z, None, length=2)[0]

    for wrap in (lambda f: f, jax.jit):
        seen.clear()
        jax.block_until_ready(wrap(autocast(fun, "bf16-mixed"))(X, W))
        jax.effects_barrier()
        assert seen == [(i, "float32") for i in (1, 2, 3, 3)]


def test_checkify_inside_and_outside():
    def fun(x, w):
        y = x @ w
        checkify.check(jnp.all(y < 1), "too large: {y}", y=jnp.max(y))
        return jnp.log(jnp.abs(y) + 1) @ w

    fast = autocast(fun, "bf16-mixed")
    for checked in (checkify.checkify(fast), autocast(checkify.checkify(fun), "bf16-mixed")):
        error, out = checked(X, W)
        assert "too large" in error.get()
        assert distance(out, jnp.log(jnp.abs(X @ W) + 1) @ W) < 8 * BF16


@pytest.mark.parametrize("bend", [jnp.tanh, jax.nn.relu], ids=["tanh", "relu"])
def test_programs_are_exported_for_every_platform(bend):
    fun = autocast(lambda x, w: jnp.sum(bend(x @ w) @ w), "bf16-mixed")
    exported = jax.export.export(
        jax.jit(jax.value_and_grad(fun)), platforms=["cpu", "cuda", "tpu"]
    )(X, W)
    assert exported.platforms == ("cpu", "cuda", "tpu")


# -- transposition -------------------------------------------------------------------------------


def test_linear_functions_are_transposed():
    fast = autocast(lambda x: jnp.tile(x @ W, (2, 1)), "bf16-mixed")
    (got,) = jax.linear_transpose(fast, X)(jnp.ones((16, 16)))
    assert distance(got, 2 * jnp.ones((8, 16)) @ W.T) < 2 * BF16
