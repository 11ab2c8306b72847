"""8-bit products by themselves: how exact they are, their derivatives, and what is not finite."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _hinted import hints
from _products import ArrayRole, product, scaled
from _samples import normal
from _small import distance as error

import mpjax

BF16 = jnp.dtype("bfloat16")
ROLES = (ArrayRole.INPUT, ArrayRole.WEIGHT, ArrayRole.RESULT)
FLOAT8 = mpjax.Float8CurrentScaling()
INT8 = mpjax.Int8CurrentScaling(wgrad="int8")
RECIPES = [FLOAT8, INT8, mpjax.MXFP8BlockScaling()]


def multiply(recipe, dims="mk,kn->mn", roles=ROLES, dtype="float32"):
    """Returns a product as a recipe has it, of arrays as an einsum names their axes."""
    how = product.quantized(recipe, BF16, roles)

    def fun(x, w):
        return _einsum(dims, x, w, how, jnp.dtype(dtype))

    return jax.jit(fun)


def _einsum(dims, x, w, how, out_dtype, amaxes=None):
    first, second, _ = dims.replace("->", ",").split(",")
    both = [c for c in first if c in second]
    batch = [c for c in both if c in dims.split("->")[1]]
    summed = [c for c in both if c not in batch]
    numbers = tuple(
        tuple(tuple(name.index(c) for c in chosen) for name in (first, second))
        for chosen in (summed, batch)
    )
    params = {
        "dimension_numbers": numbers,
        "precision": None,
        "preferred_element_type": None,
        "out_sharding": None,
    }
    forms = [
        (a, a) if r is ArrayRole.WEIGHT else (a, a.astype(BF16))
        for a, r in zip((x, w), how.roles, strict=False)
    ]
    return product.product(
        "dot_general", params, *forms, [], how=how, out_dtype=out_dtype, amaxes=amaxes
    )


@functools.cache
def derivative(recipe):
    """Returns a compiled function of two operands and a cotangent: the product and gradients."""
    fun = multiply(recipe)

    def all_three(x, w, ct):
        out, pullback = jax.vjp(fun, x, w)
        return out, *pullback(ct)

    return jax.jit(all_three)


X, W, CT = normal(0, 64, 512), normal(1, 512, 128), normal(2, 64, 128)


@pytest.mark.parametrize(
    ("recipe", "fprop", "gradients"),
    [
        (mpjax.Int8CurrentScaling(wgrad="int8"), 0.0108, 0.0108),
        (FLOAT8, 0.0378, 0.0595),
        (mpjax.Float8CurrentScaling(granularity="channel"), 0.0378, 0.0595),
        (mpjax.Float8CurrentScaling(dgrad="e4m3", wgrad="e4m3"), 0.0378, 0.0378),
        (mpjax.MXFP8BlockScaling(), 0.039, 0.039),
        (mpjax.Float8BlockScaling(), 0.039, 0.039),
    ],
    ids=str,
)
def test_product_of_gaussians_512_deep_is_as_exact_as_its_dtype(recipe, fprop, gradients):
    x, w, ct = normal(0, 512, 512), normal(1, 512, 512), normal(2, 512, 512)
    out, dx, dw = derivative(recipe)(x, w, ct)
    x, w, ct = map(np.float64, (x, w, ct))
    assert error(out, x @ w) <= fprop
    assert error(dx, ct @ w.T) <= gradients
    assert error(dw, x.T @ ct) <= gradients
    assert error(out, x @ w) > 0.008  # it was quantised


@pytest.mark.parametrize("operand", [0, 1])
def test_each_128_values_that_are_added_up_have_a_scale_of_their_own(operand):
    """Weights too, which Transformer Engine scales in squares of 128 x 128."""
    small = np.full((128, 128), 1.0, np.float32)
    small[0] = 2.0**-30  # in one block with the others it would become 0
    pair = [np.ones((128, 128), np.float32)] * 2
    pair[operand] = small if operand == 0 else small.T
    out = multiply(mpjax.Float8BlockScaling())(*pair)
    line = out[0] if operand == 0 else out[:, 0]
    assert (np.asarray(line) == 128 * 2.0**-30).all()


def test_what_a_recipe_leaves_is_multiplied_in_the_low_dtype():
    out, pullback = jax.vjp(multiply(mpjax.Int8CurrentScaling(dgrad=None)), X, W)
    dx, dw = pullback(CT)
    assert error(out, np.float64(X) @ np.float64(W)) > 0.008
    low = [np.float64(a.astype(BF16)) for a in (X, W, CT)]
    assert error(dx, low[2] @ low[1].T) < 1e-5  # sums in float32
    assert error(dw, low[0].T @ low[2]) < 1e-5


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_law_what_is_not_finite_is_seen_in_every_product_it_is_in(recipe, bad):
    # More elements than XLA:CPU's maximum finds a NaN among.
    x, w, ct = X.at[3, 5].set(bad), W.at[7, 9].set(bad), CT.at[11, 13].set(bad)
    run = derivative(recipe)
    out, _, dw = run(x, W, CT)
    assert not np.isfinite(out[3]).any()
    assert not np.isfinite(dw[5]).any()
    out, dx, _ = run(X, w, CT)
    assert not np.isfinite(out[:, 9]).any()
    assert not np.isfinite(dx[:, 7]).any()
    _, dx, dw = run(X, W, ct)
    assert not np.isfinite(dx[11]).any()
    assert not np.isfinite(dw[:, 13]).any()


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_rows_that_share_no_scale_do_not_share_a_nan(recipe):
    out, *_ = derivative(recipe)(X.at[3, 5].set(np.nan), W, CT)
    alone = np.isfinite(out).sum(axis=1)
    expected = 0 if recipe.granularity == "tensor" else W.shape[1]
    assert alone[0] == expected
    assert alone[3] == 0


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_zeros_give_zeros_and_magnitudes_do_not_matter(recipe):
    run = derivative(recipe)
    assert not run(jnp.zeros_like(X), W, CT)[0].any()
    assert not run(X, W, jnp.zeros_like(CT))[2].any()
    expected = np.float64(X) @ np.float64(W)
    for scale in (2.0**-60, 2.0**60):
        assert error(run(X * scale, W, CT)[0] / scale, expected) < 0.04


@pytest.mark.parametrize("recipe", [FLOAT8, INT8], ids=str)
def test_power_of_two_before_is_the_same_after(recipe):
    """So a loss scale changes no gradient."""
    run = derivative(recipe)
    for plain, large in zip(run(X, W, CT)[1:], run(X, W, CT * 2.0**15)[1:], strict=True):
        np.testing.assert_array_equal(plain * 2.0**15, large)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("recipe", [FLOAT8, INT8], ids=str)
@pytest.mark.parametrize(
    ("dims", "x", "w"),
    [
        ("btk,kn->btn", (2, 32, 64), (64, 48)),
        ("btk,khd->bthd", (2, 32, 64), (64, 4, 16)),
        ("bthd,hdk->btk", (2, 32, 4, 16), (4, 16, 64)),
        ("etk,ekn->etn", (3, 32, 64), (3, 64, 48)),
        ("tk,nk->tn", (32, 64), (48, 64)),
    ],
)
def test_axes_may_stand_anywhere(recipe, dims, x, w):
    x, w = normal(0, *x), normal(1, *w)
    out, pullback = jax.vjp(multiply(recipe, dims), x, w)
    exact, exact_pullback = jax.vjp(functools.partial(jnp.einsum, dims, precision="highest"), x, w)
    ct = normal(2, *out.shape)
    assert error(out, exact) < 0.045
    for found, expected in zip(pullback(ct), exact_pullback(ct), strict=True):
        assert error(found, expected) < 0.07


def test_weight_may_be_the_first_operand():
    fun = multiply(FLOAT8, "nk,km->nm", (ArrayRole.WEIGHT, ArrayRole.INPUT, ArrayRole.RESULT))
    out, pullback = jax.vjp(fun, W.T, X.T)
    dw, dx = pullback(CT.T)
    other, other_pullback = jax.vjp(multiply(FLOAT8), X, W)
    np.testing.assert_allclose(out, other.T, rtol=1e-6, atol=1e-4)
    for found, expected in zip((dx, dw), other_pullback(CT), strict=True):
        np.testing.assert_allclose(found, expected.T, rtol=1e-5, atol=1e-4)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("recipe", [FLOAT8, INT8], ids=str)
@pytest.mark.parametrize("shared", [True, False], ids=["one weight", "a weight each"])
def test_example_under_vmap_is_as_it_is_alone(recipe, shared):
    """Its scale, its NaN and its gradient."""
    x, w = normal(0, 8, 32), normal(1, 32, 16)
    fun = multiply(recipe)
    both = jax.jit(lambda x, w: (fun(x, w), jax.grad(lambda x: fun(x, w).sum())(x)))
    xs = jnp.stack([x, x * 100, x.at[0, 0].set(np.nan)])
    ws = jnp.stack([w, w * 3, w])
    outs, grads = jax.jit(jax.vmap(both, (0, None if shared else 0)))(xs, w if shared else ws)
    for i in range(2):
        out, grad = both(xs[i], w if shared else ws[i])
        np.testing.assert_allclose(outs[i], out, rtol=1e-5, atol=1e-3)
        np.testing.assert_allclose(grads[i], grad, rtol=1e-5, atol=1e-3)
    assert np.isnan(outs[2, 0]).all()


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_forward_mode_is_the_derivative_of_the_product_with_tangents_in_8_bits(recipe):
    tx, tw = normal(3, *X.shape), normal(4, *W.shape)
    _, tangent = jax.jvp(multiply(recipe), (X, W), (tx, tw))
    x, w, tx, tw = map(np.float64, (X, W, tx, tw))
    assert error(tangent, tx @ w + x @ tw) < 0.045


@pytest.mark.parametrize("recipe", [FLOAT8, INT8], ids=str)
def test_second_derivatives_are_those_of_the_product(recipe):
    """A derivative that passed through a cast to 8 bits would be lost, or unscaled."""
    x, w = normal(0, 32, 64) * 1e-3, normal(1, 64, 32)

    def penalty(multiplied):
        def norm(x, w):
            return jnp.sum(jax.grad(lambda x: jnp.sum(jnp.sin(multiplied(x, w))))(x) ** 2)

        return jax.grad(norm, (0, 1))(x, w)

    found = penalty(multiply(recipe))
    expected = penalty(functools.partial(jnp.matmul, precision="highest"))
    assert all(error(a, b) < 0.16 for a, b in zip(found, expected, strict=True))


def test_low_result_is_rounded_once():
    out = multiply(FLOAT8, dtype="bfloat16")(X, W)
    np.testing.assert_array_equal(out, multiply(FLOAT8)(X, W).astype(BF16))


def test_gradient_that_adds_nothing_up_is_of_16_bit_values():
    """A weight that one vector meets: each of its gradient's elements is one product, no sum."""
    _, pullback = jax.vjp(multiply(FLOAT8, "k,kn->n"), X[0], W)
    _, found = pullback(CT[0])
    expected = np.outer(np.float64(X[0]), np.float64(CT[0]))
    np.testing.assert_allclose(found, expected, rtol=2**-7)  # both factors are rounded


def test_sum_that_int32_cannot_hold_is_of_16_bit_values():
    long = 140_000
    x, w = jnp.ones((2, long)), jnp.ones((long, 2))
    out = multiply(mpjax.Int8CurrentScaling())(x, w)
    np.testing.assert_array_equal(out, np.full((2, 2), long))
    exact = 127**2 * (long - 10_000)  # what is short enough is exact up to the last product
    assert exact < 2**31
    short = multiply(mpjax.Int8CurrentScaling())(x[:, 10_000:], w[10_000:])
    np.testing.assert_array_equal(short, np.full((2, 2), long - 10_000))


@pytest.mark.parametrize(
    ("dtype", "top"), [("int8", 127), ("float8_e4m3fn", 448), ("float8_e5m2", 57344)]
)
def test_largest_value_is_the_largest_there_is(dtype, top):
    x = jnp.array([[1.0, -8.0, 0.5]])
    found = scaled.quantize(x, jnp.dtype(dtype), (0, 1))
    assert float(found.values[0, 1]) == -top
    np.testing.assert_allclose(found.values.astype(jnp.float32) * found.scale, x, rtol=0.01)
    wider = scaled.quantize(x, jnp.dtype(dtype), (0, 1), margin=1)
    np.testing.assert_array_equal(wider.scale, found.scale * 2)


# -- operands that are kept in 8 bits for the products of the gradient ----------------------------

DELAYED = mpjax.DelayedScaling(amax_history_len=4)
KEEPING = [FLOAT8, DELAYED, INT8]


def total(recipe, keeps):
    """Returns a scalar of a product, and of it in the body of a loop, for a recipe."""
    how = product.quantized(recipe, BF16, ROLES, keeps=keeps)
    amaxes = jnp.array([4.0, 5.0, 0.3]) if recipe.has_history else None

    def looped(x, w):
        def step(x, w):
            return jnp.tanh(_einsum("mk,kn->mn", x, w, how, jnp.dtype("float32"), amaxes)), None

        return jnp.sum(jax.lax.scan(step, x, jnp.stack([w, 2 * w]))[0] ** 2)

    return looped


WAYS = {
    "grad": lambda f: jax.grad(f, (0, 1)),
    "grad of grad": lambda f: jax.grad(lambda x, w: jnp.sum(jax.grad(f)(x, w) ** 2), (0, 1)),
    "jvp of grad": lambda f: lambda x, w: jax.jvp(jax.grad(f, (0, 1)), (x, w), (w, x)),
    "vmap of grad": lambda f: (
        lambda x, w: jax.vmap(jax.grad(f, (0, 1)))(jnp.stack([x, 3 * x]), jnp.stack([w, w]))
    ),
    "one weight": lambda f: (
        lambda x, w: jax.vmap(jax.grad(f, (0, 1)), (0, None))(jnp.stack([x, 3 * x]), w)
    ),
    "grad of vmap": lambda f: jax.grad(
        lambda x, w: jnp.sum(jax.vmap(f, (0, None))(jnp.stack([x, 3 * x]), w)), (0, 1)
    ),
    "one input": lambda f: jax.grad(
        lambda x, w: jnp.sum(jax.vmap(f, (None, 0))(x, jnp.stack([w, 3 * w]))), (0, 1)
    ),
    "last axis": lambda f: jax.grad(
        lambda x, w: jnp.sum(
            jax.vmap(f, (2, 1))(jnp.stack([x, 3 * x], axis=2), jnp.stack([w, w], axis=1))
        ),
        (0, 1),
    ),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f), (0, 1)),
    "twice mapped": lambda f: (
        lambda x, w: jax.vmap(
            lambda a: jax.vmap(lambda b: jax.grad(f, (0, 1))(a * x, b * w))(jnp.arange(1.0, 3.0))
        )(jnp.arange(1.0, 3.0))
    ),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("recipe", KEEPING, ids=lambda r: type(r).__name__)
def test_law_derivatives_do_not_depend_on_what_is_kept(recipe, way):
    x, w = normal(0, 32, 32), normal(1, 32, 32) / 6
    kept, plain = (jax.jit(WAYS[way](total(recipe, keeps)))(x, w) for keeps in (True, False))
    jax.tree.map(np.testing.assert_array_equal, kept, plain)


def quantised(fun, *args):
    """Returns how many arrays of matrices a program makes in each 8-bit dtype, loop bodies once."""
    text = jax.jit(fun).lower(*args).as_text()
    return {name: len(re.findall(rf"convert .* tensor<\w+xf{name}>", text)) for name in NAMES}


NAMES = ("8E4M3FN", "8E5M2")


def test_backward_loop_reads_the_operands_that_the_forward_loop_quantised():
    x, w = normal(0, 32, 32), normal(1, 32, 32)
    grad = jax.grad(total(FLOAT8, keeps=True), (0, 1))
    assert quantised(grad, x, w) == {"8E4M3FN": 2, "8E5M2": 2}  # XLA finds the cotangent's two
    again = jax.grad(total(FLOAT8, keeps=False), (0, 1))
    assert quantised(again, x, w) == {"8E4M3FN": 4, "8E5M2": 2}


def test_autocast_keeps_operands_in_8_bits_in_loops_alone():
    def looped(params, x):
        return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["w"])[0])

    def unrolled(params, x):
        for w in params["w"]:
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    policy = mpjax.PolicyMap("bf16-mixed", {"w": "float8_from_mixed_bfloat16"})
    params, x = {"w": jnp.ones((4, 64, 64))}, jnp.ones((64, 64))
    for fun, kept in ((looped, "kept=(True, True)"), (unrolled, "kept=(False, False)")):
        text = str(jax.make_jaxpr(mpjax.autocast(fun, policy))(params, x))
        assert kept in text
        assert text.count(kept) == text.count("kept=(")


def test_a_scale_of_each_row_is_not_kept_where_rows_are_added_up():
    x, w = normal(0, 32, 32), normal(1, 32, 32)
    assert "kept=(False, False)" in str(jax.make_jaxpr(total(INT8, keeps=True))(x, w))
    wgrad = mpjax.Float8CurrentScaling(wgrad=None)
    assert "kept=(False, True)" in str(jax.make_jaxpr(total(wgrad, keeps=True))(x, w))


def lowered(fun, *args):
    """Returns the program of a function for a platform, which is not run here."""

    def text(platform):
        jax.clear_caches()
        return jax.jit(fun).trace(*args).lower(lowering_platforms=(platform,)).as_text()

    return text


def test_gpu_quantises_what_is_stored_in_bfloat16():
    text = lowered(multiply(FLOAT8), X, W)
    by_bits = re.compile(r"bitcast_convert .* -> tensor<64x512xui16>")
    assert len(by_bits.findall(text("cuda"))) == 1  # the input's: a weight is read as it is
    assert not by_bits.search(text("cpu"))
    with hints.without("read_low"):
        assert not by_bits.search(text("cuda"))


@pytest.mark.parametrize(
    ("dims", "rows"), [("abk,kn->abn", (4, 16)), ("abck,kn->abcn", (2, 2, 16))]
)
def test_gpu_scales_rows_as_those_of_a_matrix(dims, rows):
    text = lowered(multiply(INT8, dims), X.reshape(*rows, 512), W)
    wide = re.compile(r"broadcast_in_dim .* -> tensor<64x128xf32>")
    assert len(wide.findall(text("cuda"))) == 2
    assert not wide.search(text("cpu"))
    with hints.without("spread_scales"):
        assert not wide.search(text("cuda"))
