"""Pooling under autocast: JAX's derivative to the bit, and on a GPU without a scatter."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _differential import equations
from _hinted import hints, pooling
from jax import lax
from jax.sharding import PartitionSpec as P

from benchmarks.measure.elsewhere import lowered_for
from mpjax import autocast
from mpjax.numerics._own import is_identity
from mpjax.numerics._reference import in_reference

LOW = (jnp.bfloat16, jnp.float16)
DTYPES = (*LOW, jnp.float32)
# Shape, window, strides, padding.
WINDOWS = {
    "two by two": ((2, 8, 6, 3), (1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
    "a rest": ((2, 7, 9, 3), (1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
    "overlapping": ((2, 8, 9, 3), (1, 3, 3, 1), (1, 2, 2, 1), "SAME"),
    "channels first": ((2, 3, 9, 8), (1, 1, 3, 3), (1, 1, 2, 2), ((0, 0), (0, 0), (1, 1), (1, 1))),
    "every element": ((9, 8), (5, 4), (1, 1), "SAME"),
    "gaps": ((3, 17), (1, 2), (1, 5), "SAME"),
    "gaps beside overlaps": ((11, 13), (2, 3), (5, 1), ((1, 1), (2, 2))),
    "more padding than window": ((5, 6), (2, 2), (2, 3), ((3, 4), (2, 5))),
    "one dimension": ((12,), (3,), (3,), "SAME"),
    "three dimensions": ((6, 5, 7), (3, 3, 3), (2, 2, 2), "SAME"),
    "whole image": ((2, 7, 7), (1, 7, 7), (1, 7, 7), "VALID"),
    "batch too": ((4, 6), (2, 3), (2, 3), "VALID"),
}
IMAGES = ("normal", "relu", "constant", "non-finite", "smallest")


def image_of(kind, shape, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape)
    made = {
        "normal": x,
        "relu": np.maximum(x, 0),
        "constant": np.ones(shape),
        "non-finite": rng.choice([0.0, -0.0, 1.0, np.nan, np.inf, -np.inf], size=shape),
        "smallest": np.full(shape, -np.inf),
    }
    return jnp.asarray(made[kind], dtype)


def whole_numbers(shape, dtype=jnp.float32, seed=1):
    """Cotangents whose sums are exact in every dtype, in every order."""
    return jnp.asarray(np.random.default_rng(seed).integers(-3, 4, shape), dtype)


def pool_of(case, select=lax.max):
    _, window, strides, padding = WINDOWS[case]
    worst = -jnp.inf if select is lax.max else jnp.inf
    return lambda x: lax.reduce_window(
        x, np.asarray(worst, x.dtype), select, window, strides, padding
    )


def ours(pool, x):
    """Returns a pooling as autocast binds it, whatever the dtype of the image."""
    (eqn,) = jax.make_jaxpr(pool)(x).eqns
    return lambda x: pooling.bind(eqn, [x])[0]


def pullback(pool):
    return lambda ct, x: jax.vjp(pool, x)[1](ct)[0]


def assert_same(a, b, said=""):
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert left.dtype == right.dtype, said
        left, right = np.asarray(left, np.float64), np.asarray(right, np.float64)
        np.testing.assert_array_equal(left, right, said)


def primitives(fun, *args):
    return {eqn.primitive.name for eqn in equations(jax.make_jaxpr(fun)(*args))}


# -- values ----------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("select", [lax.max, lax.min])
def test_the_winner_is_that_of_jax(select):
    """On a GPU: elsewhere the derivative is JAX's own, by the law of hints."""
    pools = {case: pool_of(case, select) for case in WINDOWS}

    def images(kind):  # by window and dtype
        made = {
            (case, i): image_of(kind, WINDOWS[case][0], dtype)
            for case in WINDOWS
            for i, dtype in enumerate(DTYPES)
        }
        return made if select is lax.max else jax.tree.map(jnp.negative, made)

    def derivatives(cts, xs, own=lambda pool, x: pool):
        return {key: pullback(own(pools[key[0]], x))(cts[key], x) for key, x in xs.items()}

    def on_a_gpu(cts, xs):
        return derivatives(cts, xs, ours)

    cts = {
        key: whole_numbers(jax.eval_shape(pools[key[0]], x).shape, x.dtype)
        for key, x in images("constant").items()
    }
    eqns = list(equations(jax.make_jaxpr(on_a_gpu)(cts, images("constant"))))
    assert sum(eqn.primitive.name == "pooled_cotangent" for eqn in eqns) == len(cts)
    there = jax.jit(lowered_for("cuda", on_a_gpu, cts, images("constant")))
    here = jax.jit(derivatives)
    for kind in IMAGES:
        xs = images(kind)
        for (key, a), (_, b) in zip(there(cts, xs).items(), here(cts, xs).items(), strict=True):
            assert_same(a, b, f"{key}, {kind}")


def test_an_infinite_cotangent_goes_to_the_winner_alone():
    pool, x = pool_of("overlapping"), image_of("normal", WINDOWS["overlapping"][0])
    ct = jnp.full(jax.eval_shape(pool, x).shape, jnp.inf)
    run = lowered_for("cuda", pullback(ours(pool, x)), ct, x)
    assert_same(run(ct, x), pullback(pool)(ct, x))


@pytest.mark.parametrize("dtype", LOW)
def test_what_overlapping_windows_give_is_added_up_in_float32(dtype):
    # One element wins 25 windows. The first gives it 2048 (float16) or 256 (bfloat16), to which a
    # one is lost in a low sum.
    big = 1 / jnp.finfo(dtype).eps * 2
    x = jnp.zeros((9, 9), dtype).at[4, 4].set(1)
    pool = lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (5, 5), (1, 1), "SAME")  # noqa: E731
    ct = jnp.ones((9, 9), dtype).at[6, 6].set(big.astype(dtype))
    run = lowered_for("cuda", pullback(ours(pool, x)), ct, x)
    assert run(ct, x)[4, 4] == float(big) + 24


def test_float64_stays_float64():
    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(0).standard_normal((8, 9)))
        pool = lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (3, 3), (2, 2), "SAME")  # noqa: E731
        ct = 1 + whole_numbers(jax.eval_shape(pool, x).shape, x.dtype) * 2.0**-40
        run = lowered_for("cuda", pullback(ours(pool, x)), ct, x)
        assert_same(run(ct, x), pullback(pool)(ct, x))


# -- transformations -------------------------------------------------------------------------------

SHAPE = WINDOWS["overlapping"][0]
X = image_of("relu", SHAPE)
POOL = pool_of("overlapping")
T = whole_numbers(SHAPE, seed=2)
CT = whole_numbers(jax.eval_shape(POOL, X).shape)
XS = jnp.stack([X, image_of("normal", SHAPE)])


def stacked(pool, x):
    def body(carry, x):
        return carry + pool(x).sum(), pool(x)

    return lax.scan(body, 0.0, x)


TRANSFORMED = {
    "vjp": lambda pool: jax.vjp(pool, X)[1](CT),
    "jvp": lambda pool: jax.jvp(pool, (X,), (T,)),
    "linearize": lambda pool: jax.linearize(pool, X)[1](T),
    "vmap": lambda pool: jax.vmap(pool)(XS),
    "vmap of grad": lambda pool: jax.vmap(pullback(pool), (None, 0))(CT, XS),
    "vmap over cotangents": lambda pool: jax.vmap(pullback(pool), (3, None), 2)(
        jnp.stack([CT, 2 * CT], 3), X
    ),
    "vmap over tangents": lambda pool: jax.vmap(lambda t: jax.jvp(pool, (X,), (t,))[1])(XS),
    "second order": lambda pool: jax.jvp(jax.grad(lambda x: (CT * pool(x) ** 2).sum()), (X,), (T,)),
    "reverse of reverse": lambda pool: jax.grad(
        lambda x: (T * jax.grad(lambda x: (CT * pool(x) ** 2).sum())(x)).sum()
    )(X),
    "reverse of forward": lambda pool: jax.grad(
        lambda x: (CT * jax.jvp(pool, (x,), (x * x,))[1]).sum()
    )(X),
    "transpose of the cotangent": lambda pool: jax.linear_transpose(
        lambda ct: pullback(pool)(ct, X), CT
    )(T),
    "checkpoint": lambda pool: jax.vjp(jax.checkpoint(pool), X)[1](CT),
    "scan": lambda pool: jax.grad(lambda x: stacked(pool, x)[0])(XS),
}


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_transformed_it_is_as_jax_has_it(platform):
    def run(pool):
        return {name: transformed(pool) for name, transformed in TRANSFORMED.items()}

    low = jax.jit(lowered_for(platform, lambda: run(autocast(POOL, "bf16-mixed"))))()
    for name, want in jax.jit(lambda: run(POOL))().items():
        assert_same(low[name], want, name)


def mesh(kind=jax.sharding.AxisType.Auto):
    return jax.make_mesh((2,), ("data",), (kind,), devices=jax.devices()[:2])


@pytest.mark.no_leak_check("the gradient of a shard_map under jit leaks in JAX itself")
@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map_and_lowered_for_a_gpu(check_vma):
    specs = {"mesh": mesh(), "in_specs": (P("data"), P("data")), "out_specs": P("data")}

    def run(pool):
        return jax.jit(jax.shard_map(pullback(pool), check_vma=check_vma, **specs))

    fun = run(autocast(POOL, "bf16-mixed"))
    assert_same(fun(CT, X), run(POOL)(CT, X))
    text = fun.trace(CT, X).lower(lowering_platforms=("cuda",)).as_text()
    assert "select_and_scatter" not in text


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_sharded_over_examples_and_lowered_for_a_gpu(kind):
    made = mesh(getattr(jax.sharding.AxisType, kind))
    with jax.set_mesh(made) if kind == "Explicit" else contextlib.nullcontext():
        sharding = jax.sharding.NamedSharding(made, P("data"))
        ct, x = jax.device_put((CT, X), sharding)
        fun = jax.jit(pullback(autocast(POOL, "bf16-mixed")))
        found = fun(ct, x)
        text = fun.trace(ct, x).lower(lowering_platforms=("cuda",)).as_text()
    assert_same(jax.device_get(found), pullback(POOL)(CT, X))
    assert found.sharding.is_equivalent_to(sharding, found.ndim)
    assert "select_and_scatter" not in text


# -- programs --------------------------------------------------------------------------------------


def convolved(w, x):
    y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return jnp.sum(POOL(jax.nn.relu(y)) ** 2)


W = jnp.asarray(np.random.default_rng(3).standard_normal((3, 3, 3, 3)), jnp.float32)


def text_for(platform):
    step = jax.jit(jax.grad(autocast(convolved, "bf16-mixed")))
    return step.trace(W, X).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
def test_a_gpu_has_winners_of_one_byte_and_no_scatter(platform):
    text = text_for(platform)
    assert "select_and_scatter" not in text
    assert "xui8>" in text
    with hints.without("pooled"):
        jax.clear_caches()
        assert "select_and_scatter" in text_for(platform)


def test_no_more_is_kept_for_the_backward_pass():
    def kept():
        jax.clear_caches()
        loss = autocast(lambda x: POOL(x @ W[0, 0]).sum(), "bf16-mixed")
        return sum(x.nbytes for x in jax.tree.leaves(jax.vjp(loss, X)[1]))

    with hints.without("pooled"):
        before = kept()
    assert kept() <= before


# -- what is JAX's own -----------------------------------------------------------------------------

_A = np.float32(-np.inf)
FOREIGN = {
    "dilated window": (X, {"window_dilation": (1, 2, 2, 1)}, (1, 2, 2, 1)),
    "dilated image": (X, {"base_dilation": (1, 2, 1, 1)}, (1, 2, 2, 1)),
    "negative padding": (X, {"padding": ((0, 0), (-1, 0), (0, 0), (0, 0))}, (1, 2, 2, 1)),
    "large window": (jnp.ones((2, 9, 9, 1)), {"window_strides": (1, 9, 9, 1)}, (1, 9, 9, 1)),
    "many windows": (X, {"padding": "SAME"}, (1, 6, 6, 1)),
    "far windows": (jnp.ones((2, 40)), {"window_strides": (1, 300)}, (1, 2)),
    "no window": (jnp.ones((2, 3)), {}, (1, 4)),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_is_not_supported_is_the_pooling_of_jax(name):
    x, how, window = FOREIGN[name]
    how = {"window_strides": (1,) * x.ndim, "padding": "VALID"} | how
    pool = lambda x: lax.reduce_window(x, _A, lax.max, window, **how)  # noqa: E731
    fun = autocast(pool, "bf16-mixed")
    assert "reduce_window_max" in primitives(fun, x)
    assert "custom_jvp_call" not in primitives(fun, x)
    assert_same(fun(x), pool(x))
    assert_same(jax.jvp(fun, (x,), (x,)), jax.jvp(pool, (x,), (x,)))


def test_whole_numbers_are_pooled_as_they_are():
    x = jnp.arange(8)
    least = np.int32(np.iinfo(np.int32).min)
    pool = lambda x: lax.reduce_window(x, least, lax.max, (2,), (2,), "VALID")  # noqa: E731
    assert_same(autocast(pool, "bf16-mixed")(x), pool(x))
    still = np.zeros(x.shape, jax.dtypes.float0)
    found, tangent = jax.jvp(ours(pool, x), (x,), (still,))
    assert_same(found, pool(x))
    assert tangent.dtype == jax.dtypes.float0


# -- tools that read programs ----------------------------------------------------------------------


def test_the_derivative_is_computed_again_in_a_wider_dtype():
    pool, x = pool_of("every element"), image_of("normal", (9, 8), jnp.bfloat16)
    ct = whole_numbers((9, 8), jnp.bfloat16)
    program = jax.make_jaxpr(pullback(ours(pool, x)))(ct, x)
    (eqn,) = [e for e in program.eqns if e.primitive.name == "pooled_cotangent"]
    assert not is_identity(eqn)
    exact = ct.astype(jnp.float32) + 2.0**-12
    (found,) = in_reference(eqn, [exact, x.astype(jnp.float32)], [ct], jnp.float32)
    assert_same(found, pullback(pool)(exact, x.astype(jnp.float32)))


@pytest.mark.parametrize("window", [(1, 2, 2, 1), (2, 2, 2, 1)], ids=["examples", "windows"])
def test_a_program_with_an_open_dimension_is_exported(window):
    def loss(x):
        pooled = lax.reduce_window(jnp.sin(x), -jnp.inf, lax.max, window, window, "VALID")
        return jnp.sum(pooled @ jnp.ones((3, 3)))

    grad = jax.jit(jax.grad(autocast(loss, "bf16-mixed")))
    (open_,) = jax.export.symbolic_shape("b")
    images = jax.random.normal(jax.random.key(0), (6, 4, 4, 3), jnp.float32)
    spec = jax.ShapeDtypeStruct((open_, 4, 4, 3), jnp.float32)
    program = jax.export.export(grad, platforms=("cpu", "cuda"))(spec)
    np.testing.assert_array_equal(program.call(images), grad(images))
