"""Each backend gets the program that it runs well, and every one the same values."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _hinted import hints
from _products import backends
from _samples import normal
from jax import lax

from mpjax import SupportWarning, autocast

HALVES = {"bf16-mixed": "bf16", "16-mixed": "f16"}
KEY = jax.random.key(0)
no_tpu_warning = pytest.mark.filterwarnings("ignore:autocast:mpjax.SupportWarning")  # of float16


def gelu_layer(w, x):
    return jnp.sum(jax.nn.gelu(x @ w) ** 2)


def convolved(kernel, strides, padding):
    def fun(w, x):
        dims = ("NHWC", "HWIO", "NHWC")
        y = lax.conv_general_dilated(x * 2, w, strides, padding, dimension_numbers=dims)
        return jnp.sum(jnp.tanh(y))

    return fun, normal(1, kernel, kernel, 8, 4), normal(2, 2, 6, 6, 8)


def results(fun, platform, *args):
    """The dtypes of the results of all products in the text of `fun` for a platform."""
    lowered = jax.jit(fun).trace(*args).lower(lowering_platforms=(platform,))
    lines = lowered.as_text().splitlines()
    found = [line for line in lines if "stablehlo.dot_general" in line or "convolution(" in line]
    return [
        (re.search(r"stablehlo\.(\w+)", line)[1], re.search(r"-> tensor<[\dx]*x(\w+)>", line)[1])
        for line in found
    ]


@no_tpu_warning
@pytest.mark.parametrize("policy", HALVES)
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_a_product_is_asked_for_a_low_result_and_a_float32_weight_gradient(policy, platform):
    fun, low = autocast(gelu_layer, policy), HALVES[policy]
    w, x = normal(1, 8, 16), normal(2, 4, 8)
    forward = [("dot_general", low)]
    assert results(fun, platform, w, x) == forward
    assert results(jax.grad(fun), platform, w, x) == [*forward, ("dot_general", "f32")]


def test_a_named_algorithm_keeps_its_float32_result():
    def fun(w, x):
        return jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w))

    named = autocast(fun, "bf16-mixed", dot_precision="bf16")
    assert set(results(jax.grad(named), "cuda", normal(1, 8, 8), normal(2, 4, 8))) == {
        ("dot_general", "f32")
    }


def twice_convolved(w, x):
    y = lax.conv(jnp.tanh(lax.conv(x, w, (1, 1), "SAME")), w, (1, 1), "SAME")
    return jnp.sum(jnp.tanh(y))


IMAGES = normal(1, 4, 4, 3, 3), normal(2, 2, 4, 6, 6)


@no_tpu_warning
@pytest.mark.parametrize("policy", HALVES)
@pytest.mark.parametrize(
    ("platform", "inside", "low", "wide"),
    [
        ("cuda", False, 5, 0),  # two forward, one back to the first result, two kernel gradients
        ("cuda", True, 5, 2),
        ("tpu", False, 3, 2),
    ],
)
def test_a_convolution_gives_what_a_platform_stores(policy, platform, inside, low, wide):
    if inside:
        fun = autocast(jax.grad(twice_convolved), policy)
    else:
        fun = jax.grad(autocast(twice_convolved, policy))
    found = results(fun, platform, *IMAGES)
    assert found.count(("convolution", HALVES[policy])) == low
    assert found.count(("convolution", "f32")) == wide


@pytest.mark.parametrize("rules", [{}, "widest", {"add": "full"}], ids=str)
@pytest.mark.parametrize("added", ["bias", "position 257"])
def test_a_gpu_adds_to_a_convolution_in_float32_what_was_asked_for_in_float32(rules, added):
    def fun(w, x):
        bias = jnp.arange(4.0)[:, None, None] if added == "bias" else 257.0
        return lax.conv(lax.conv(x, w, (1, 1), "SAME") + bias + x[:, :1], w, (1, 1), "SAME")

    w, x = jnp.tile(IMAGES[0], (1, 2, 1, 1))[:, :4], normal(2, 2, 4, 6, 6)
    traced = jax.jit(autocast(fun, "bf16-mixed", rules=rules)).trace(w, x)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    sums = re.findall(r"stablehlo.add .*x(bf16|f32)>", text)
    wide = rules or added != "bias"
    assert (set(sums) == {"f32"}) if wide else ("bf16" in sums)


@pytest.mark.parametrize("policy", HALVES)
@pytest.mark.parametrize("strides", [(1, 1), (2, 1)])
def test_the_gradient_of_a_pointwise_kernel_is_a_product(policy, strides):
    fun, w, x = convolved(1, strides, "VALID")
    fast = autocast(fun, policy)
    assert ("dot_general", "f32") in results(jax.grad(fast), "cuda", w, x)
    eps = float(jnp.finfo(jnp.bfloat16 if policy == "bf16-mixed" else jnp.float16).eps)
    for got, wanted in zip(jax.grad(fast, (0, 1))(w, x), jax.grad(fun, (0, 1))(w, x), strict=True):
        # Each of the 8 products of a place is rounded twice; so is tanh, and its slope.
        np.testing.assert_allclose(got, wanted, atol=8 * eps * float(jnp.abs(wanted).max()))


def test_a_weight_gradient_keeps_the_bits_of_its_sum():
    for size in (1, 3):
        fun, w, x = convolved(size, (1, 1), "SAME")
        grads = jax.grad(autocast(fun, "bf16-mixed"))(w, x)
        rounded = grads.astype(jnp.bfloat16).astype(jnp.float32)
        assert float(jnp.mean(grads != rounded)) > 0.9


def test_a_gradients_convolution_in_a_branch_is_one_that_the_cpu_has_a_fast_routine_for():
    fun, w, x = convolved(3, (1, 1), "SAME")
    grad = jax.grad(autocast(fun, "16-mixed"), argnums=(0, 1))

    def branched(p, w, x):
        return lax.cond(p, grad, lambda w, x: (w, x), w, x)

    text = jax.jit(branched).lower(True, w, x).compile().as_text()
    found = re.findall(r" convolution\(.*dim_labels=(\S+?)[,\s]", text)
    assert len(found) == 3
    assert set(found) == {"b01f_01io->b01f"}


CONVOLUTIONS = {
    "mixed": ((6, 2, 4, 5), (3, 6, 2, 4), ("HNCW", "HOWI", "CWNH"), {"window_strides": (2, 1)}),
    "three axes": ((2, 4, 3, 4, 5), (6, 4, 2, 2, 2), ("NCDHW", "OIDHW", "NCDHW"), {}),
    "groups": ((2, 4, 6, 6), (8, 2, 3, 3), ("NCHW", "OIHW", "NCHW"), {"feature_group_count": 2}),
    "batch groups": (
        (4, 3, 6, 6),
        (8, 3, 3, 3),
        ("NCHW", "OIHW", "NCHW"),
        {"batch_group_count": 2},
    ),
    "dilated": ((2, 4, 5, 5), (4, 6, 3, 3), ("NCHW", "IOHW", "NHWC"), {"lhs_dilation": (2, 2)}),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_law_a_convolution_in_the_usual_order_is_the_same_one(name):
    image, kernel, dims, options = CONVOLUTIONS[name]
    x, y = normal(1, *image), normal(2, *kernel)
    numbers = lax.conv_dimension_numbers(image, kernel, dims)
    ones = (1,) * (len(image) - 2)
    options = {"window_strides": ones, "padding": [(1, 0)] * len(ones)} | options
    options["dimension_numbers"] = numbers

    @jax.jit
    def both(x, y):
        return backends.in_usual_order(x, y, options), lax.conv_general_dilated(x, y, **options)

    got, want = both(x, y)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("order", ["NHWC HWIO NHWC", "NCHW OIHW NCHW", "HNWC IOHW CWNH"])
def test_pointwise_convolutions_of_any_layout(order):
    image, kernel, out = order.split()
    x = normal(1, *({"N": 2, "H": 5, "W": 4, "C": 3}[c] for c in image))
    w = normal(2, *({"H": 1, "W": 1, "I": 3, "O": 7}[c] for c in kernel))

    def fun(w, x):
        return lax.conv_general_dilated(
            x, w, (2, 1), "VALID", dimension_numbers=(image, kernel, out)
        )

    wanted = jax.vjp(fun, w, x)[1](jnp.ones_like(fun(w, x)))
    got = jax.vjp(autocast(fun, "bf16-mixed"), w, x)[1](jnp.ones_like(fun(w, x)))
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=2**-7 * float(jnp.abs(b).max()))


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_nothing_parts_what_is_stored_low_from_what_is_computed_with_it(platform):
    fun = autocast(lambda w, x: jax.nn.gelu(x @ w).T @ w, "bf16-mixed")
    lowered = jax.jit(fun).trace(normal(1, 8, 8), normal(2, 8, 8))
    assert "optimization_barrier" not in lowered.lower(lowering_platforms=(platform,)).as_text()


def test_a_cpu_without_bfloat16_products_multiplies_in_float32(monkeypatch):
    def fun(w, x):
        return jnp.sum(jnp.tanh(x @ w) @ w.T)

    args = normal(1, 64, 64), normal(2, 32, 64)
    fast = jax.value_and_grad(autocast(fun, "bf16-mixed"), (0, 1))
    found = jax.jit(fast)(*args)
    monkeypatch.setattr(backends, "cpu_multiplies_bfloat16", lambda: False)
    jax.clear_caches()
    again = jax.jit(fast).trace(*args).lower()
    text = again.as_text()
    # Those on bfloat16 are the two forward ones that XLA drops.
    assert len(re.findall(r"dot_general .*xbf16>, tensor<[\dx]*xbf16>\)", text)) == 2
    assert len(re.findall(r"dot_general .*xf32>, tensor<[\dx]*xf32>\)", text)) == 6
    for a, b in zip(jax.tree.leaves(again.compile()(*args)), jax.tree.leaves(found), strict=True):
        # The same products, added up in another order: 64 roundings to float32, seen in bfloat16.
        np.testing.assert_allclose(a, b, atol=2**-8 * float(jnp.abs(b).max()))
    jax.clear_caches()


def test_only_outside_of_loops_is_an_activation_kept_apart_from_its_recomputation():
    w, x = normal(1, 128, 128), normal(2, 64, 128)

    def looped(w, x):
        return jnp.sum(lax.scan(lambda c, _: (jax.nn.gelu(c @ w) * c, None), x @ w, None, 4)[0])

    def plain(w, x):
        return jnp.sum(jax.nn.gelu(x @ w) @ w)

    def normalised_inside(w, x):
        return jnp.sum(jax.nn.log_softmax(x @ w)[:, 0])

    for fun, barriers in ((looped, 0), (plain, 1), (normalised_inside, 0)):
        traced = jax.jit(jax.grad(autocast(fun, "bf16-mixed"))).trace(w, x)
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
        held = re.findall(r"stablehlo.optimization_barrier (.*) : (.*)", text)
        # The product's result, low; not the cotangent, which XLA may make where it is read.
        assert [types for _, types in held] == ["tensor<64x128xbf16>"] * barriers


def test_a_cpu_reads_the_transposed_operands_of_gradients_in_order(monkeypatch):
    monkeypatch.setattr(backends, "cpu_multiplies_bfloat16", lambda: True)  # whatever CPU this is

    def fun(w, x):
        return jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w))

    grad = jax.jit(jax.grad(autocast(fun, "bf16-mixed"), argnums=(0, 1)))
    args = normal(1, 16, 16), normal(2, 4, 16)
    text = grad.lower(*args).as_text()
    assert text.count("@LayoutConstraint") >= 6
    compiled = grad.lower(*args).compile().as_text()
    operands = re.findall(r"= f32\[16,16\]\S* convert\(%(?:copy|transpose)", compiled)
    assert not operands  # else XLA widened what it transposes
    exported = jax.export.export(grad, platforms=["cpu"])(*args)  # which allows no constraint
    assert "LayoutConstraint" not in exported.mlir_module()


@pytest.mark.parametrize(("platform", "count"), [("cpu", 1), ("cuda", 0), ("tpu", 0)])
def test_only_a_cpu_moves_what_the_product_of_a_weight_gradient_reads(platform, count):
    def fun(w, x):
        return jnp.sum(jnp.tanh(x @ w))

    grad = jax.jit(jax.grad(autocast(fun, "bf16-mixed")))
    text = grad.trace(normal(1, 8, 16), normal(2, 4, 8)).lower(lowering_platforms=(platform,))
    moved = [line for line in text.as_text().splitlines() if "stablehlo.transpose" in line]
    assert len(moved) == count
    assert all("<4x8xbf16>" in line for line in moved)  # the activations, and not the gradient


def normalised(x, shape):
    """Group normalisation of images, to statistics of `shape`'s last two axes and the places."""
    y = x.reshape(*x.shape[:-1], *shape)
    mean = jnp.mean(y, axis=(1, 2, 4), keepdims=True)
    spread = jnp.mean(y**2, axis=(1, 2, 4), keepdims=True) - mean**2
    return ((y - mean) * lax.rsqrt(spread + 1e-5)).reshape(x.shape)


def images(w, b, x, fun):
    y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return fun(y + jnp.reshape(b, (1, 1, 1, -1)))


BARRIER = r"optimization_barrier %\w+ : tensor<(\w+)>"
WIDENED_BY_BITS = r"bitcast_convert %\w+ : \(tensor<(\w+bf16)>\) -> tensor<\w+ui16>"


def stored(fun, platform, *args, ways=(BARRIER, WIDENED_BY_BITS)):
    """The types that the text of `fun` for a platform keeps from being widened again."""
    text = jax.jit(fun).trace(*args).lower(lowering_platforms=(platform,)).as_text()
    return [found for way in ways for found in re.findall(way, text)]


GAIN = np.linspace(1, 2, 8, dtype=np.float32)
KERNEL, BIAS, PHOTOS = normal(1, 3, 3, 4, 8), normal(1, 8), normal(3, 16, 8, 8, 4)


def of_rows(y):
    y = y - jnp.mean(y, -1, keepdims=True)
    return y * lax.rsqrt(jnp.mean(y**2, -1, keepdims=True) + 1e-5) * GAIN


def centred(y):
    return (y - jnp.mean(y, axis=-1, keepdims=True)) * 2


def softmax(y):
    return jnp.exp(y - jnp.max(y, -1, keepdims=True))


BF16 = "bf16-mixed"
# What follows a biased convolution, and how many of its cotangents a GPU stores low: widened by
# their bits, which parts no kernel, or behind a barrier (None: other barriers are there, too).
COTANGENTS = {
    "of a norm over places": (BF16, lambda y: lax.logistic(normalised(y, (2, 4))), 1, 0),
    "of that in float16": ("16-mixed", lambda y: lax.logistic(normalised(y, (2, 4))), 0, 1),
    "of rows less their mean": (BF16, lambda y: lax.logistic(centred(y)), 0, 1),
    "of a norm of rows": (BF16, lambda y: jax.nn.silu(of_rows(y)), 1, 0),
    "of that before another curve": (BF16, lambda y: lax.erfc(of_rows(y)), 1, 0),
    "of that before a choice": (BF16, lambda y: jax.nn.relu(of_rows(y)), 0, None),
    "of a softmax, which is no norm": (BF16, softmax, 0, None),
}


@pytest.mark.parametrize("name", COTANGENTS)
def test_cotangents_beside_statistics_are_stored_low(name):
    policy, between, by_bits, behind = COTANGENTS[name]

    def loss(w, b, x):
        return jnp.sum(images(w, b, x, between) ** 2)

    fun = jax.grad(autocast(loss, policy), (0, 1))
    of_bits, of_barriers = (
        stored(fun, "cuda", KERNEL, BIAS, PHOTOS, ways=(way,)) for way in (WIDENED_BY_BITS, BARRIER)
    )
    low = f"16x8x8x8x{HALVES[policy]}"
    assert of_bits.count(low) == by_bits
    assert behind is None or of_barriers.count(low) == behind
    assert "16x8x8x8xf32" not in (*of_bits, *of_barriers)


def test_a_bias_behind_such_a_norm_is_summed_by_the_kernel_that_makes_its_cotangent():
    w, b, x = normal(1, 32, 8), normal(1, 8), normal(3, 256, 32)

    def loss(w, b, x, activation):
        return jnp.sum(activation(x @ w + b) @ jnp.ones((8, 8)))

    def barriers(activation):
        fun = autocast(lambda *args: loss(*args, activation), "bf16-mixed")
        with hints.without("curves_apart"):
            return stored(jax.grad(fun, (0, 1)), "cuda", w, b, x, ways=(BARRIER,))

    alone = barriers(jax.nn.silu).count("256x8xbf16")
    assert barriers(lambda y: jax.nn.silu(of_rows(y))).count("256x8xbf16") == alone - 1
    assert barriers(of_rows).count("256x8xbf16") == alone


def read(y):
    """A loss behind one more product: behind the last one nothing is stored low."""
    return jnp.sum((y @ normal(9, y.shape[-1], 4)) ** 2)


def test_a_tpu_rounds_the_cotangent_that_a_norm_sums_and_reads_again():
    def loss(w, b, x):
        return read(images(w, b, x, lambda y: jnp.tanh(normalised(y, (2, 4)))))

    def roundings():
        jax.clear_caches()
        traced = jax.jit(jax.grad(autocast(loss, "bf16-mixed"))).trace(KERNEL, BIAS, PHOTOS)
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
        assert "optimization_barrier" not in text
        to_low = r"(%\w+) = stablehlo.convert %\w+ : \(tensor<16x8x8x8xf32>\) -> .*bf16>\n"
        return len(re.findall(to_low + r" *%\w+ = stablehlo.convert \1 : .*f32>\n", text))

    with hints.without("stored_cotangent"):
        before = roundings()
    assert roundings() == before + 1


def test_what_is_read_again_is_kept_in_place_of_its_terms():
    def loss(w, b, x):
        shortcut = images(w, b, 2 * x, lambda y: y)
        return read(images(w, b, x, lambda y: jnp.tanh(normalised(y + shortcut, (2, 4)))))

    _, vjp = jax.vjp(autocast(loss, "bf16-mixed"), KERNEL, BIAS, PHOTOS)
    kept = [x.dtype for x in jax.tree.leaves(vjp) if getattr(x, "size", 0) == 16 * 8 * 8 * 8]
    assert kept == [jnp.bfloat16]


def test_cotangents_that_are_summed_in_unlike_shapes_are_stored_low():
    def loss(w, b, t, x):
        y = images(w, b, x, lambda y: y + t[:, None, None, :])
        return read(lax.logistic(normalised(y, (2, 4))))

    times = normal(5, 16, 8)
    fun = jax.grad(autocast(loss, "bf16-mixed"), (0, 1, 2))
    found = stored(fun, "cuda", KERNEL, BIAS, times, PHOTOS)
    # The sum, the cotangent of what is bent, and that of the times before it is summed.
    assert found.count("16x8x8x8xbf16") == 2
    assert "16x8xbf16" not in found
    wanted = jax.grad(loss, (0, 1, 2))(KERNEL, BIAS, times, PHOTOS)
    for a, b in zip(fun(KERNEL, BIAS, times, PHOTOS), wanted, strict=True):
        # Three roundings each way of 16 * 64 terms that cancel to a third.
        np.testing.assert_allclose(a, b, atol=2**-5 * float(jnp.abs(b).max()))


def test_a_cotangent_behind_relu_is_stored_where_a_shortcut_reads_it_too():
    def loss(w, b, x, shortcut):
        def fun(y):
            y = normalised(y, (2, 4))
            return jax.nn.relu(y + shortcut(x))

        return read(images(w, b, x, fun))

    def wide(x):
        return jnp.concatenate([x, x], axis=-1)

    for shortcut, count in ((lambda x: 0.0, 0), (wide, 1)):
        fun = autocast(lambda w, b, x, s=shortcut: loss(w, b, x, s), "bf16-mixed")
        found = stored(jax.grad(fun, (0, 1, 2)), "cuda", KERNEL, BIAS, PHOTOS)
        assert found.count("16x8x8x8xbf16") == count


def test_what_a_norm_reads_of_two_convolutions_is_joined_as_it_is_stored():
    def loss(w, b, x):
        skipped = images(w, b, x, lambda y: y)[..., :4]
        y = images(w, b, x, lambda y: jnp.concatenate([y, skipped], axis=-1))
        return read(lax.logistic(normalised(y, (2, 6))))

    fun = autocast(loss, "bf16-mixed")
    text = str(jax.make_jaxpr(fun)(KERNEL, BIAS, PHOTOS))
    assert "bf16[16,8,8,12] = concatenate" in text
    cotangents = stored(jax.grad(fun), "cuda", KERNEL, BIAS, PHOTOS)
    assert cotangents.count("16x8x8x12xbf16") == 2  # of what is joined, and of what is bent


def test_the_image_gradient_of_a_pointwise_kernel_is_a_convolution_on_a_gpu():
    fun, w, x = convolved(1, (1, 1), "VALID")
    found = results(jax.grad(autocast(fun, "bf16-mixed"), (0, 1)), "cuda", w, x)
    assert found.count(("dot_general", "f32")) == 1
    assert found.count(("convolution", "bf16")) == 2
    elsewhere = results(jax.grad(autocast(fun, "bf16-mixed"), (0, 1)), "tpu", w, x)
    assert [name for name, _ in elsewhere if name == "convolution"] == ["convolution"]
    assert elsewhere.count(("dot_general", "f32")) == 2


@pytest.mark.parametrize(
    ("policy", "platform", "count"),
    [("16-mixed", "tpu", 1), ("bf16-mixed", "tpu", 0), ("16-mixed", "cuda", 0)],
)
def test_float16_products_warn_where_a_program_is_made_for_a_tpu(policy, platform, count):
    def fun(w, v, x):
        return jnp.sum(x @ w @ v)

    traced = jax.jit(jax.value_and_grad(autocast(fun, policy))).trace(
        normal(1, 16, 4), normal(1, 4, 2), normal(2, 8, 16)
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")  # one of equal warnings is shown
        traced.lower(lowering_platforms=(platform,))
    assert [w.category for w in caught] == [SupportWarning] * count
    assert all(re.match(r"(?s)autocast: .*TPU.*Type 'bf16-mixed'", str(w.message)) for w in caught)


def test_a_sum_that_gates_read_is_kept_instead_of_its_terms():
    def cell(params, xs):
        def step(hidden, x):
            i, g = jnp.split(x + hidden @ params, 2, axis=-1)
            hidden = jax.nn.sigmoid(i) * jnp.tanh(g)
            return hidden, hidden

        return read(lax.scan(step, jnp.ones((32, 64)), xs @ params)[1])

    args = normal(1, 64, 128) / 8, normal(2, 5, 32, 64)
    fast = autocast(cell, "bf16-mixed")
    _, vjp = jax.vjp(fast, *args)
    kept = [x for x in jax.tree.leaves(vjp) if getattr(x, "shape", ()) == (5, 32, 128)]
    assert [x.dtype for x in kept] == [jnp.bfloat16]
    wanted = jax.grad(cell)(*args)
    # 5 steps of two products, each of whose terms is rounded once.
    np.testing.assert_allclose(
        jax.grad(fast)(*args), wanted, atol=10 * 2**-8 * float(jnp.abs(wanted).max())
    )
