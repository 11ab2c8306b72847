"""Exponents are counted exactly, and what a format would lose of them is what casting loses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.numerics import exponents
from mpjax.numerics._formats import EXPONENTS, FORMATS, Histogram
from mpjax.numerics._histogram import histogram

pytestmark = pytest.mark.no_leak_check("it traces everything anew: twice the time, same programs")

RNG = np.random.default_rng(0)


def spread_out(size, low, high):
    signs = RNG.choice([-1.0, 1.0], size)
    return (signs * 2.0 ** RNG.uniform(low, high, size)).astype(np.float32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_counts_are_numpys_frexp(dtype):
    x = spread_out(5000, -140, 120)
    with np.errstate(all="ignore"):
        x = x.astype(jnp.dtype(dtype))
    x[:3] = np.array([np.nan, np.inf, -np.inf]).astype(x.dtype)
    found = Histogram.of_row(jax.jit(histogram)(x))
    wide = x.astype(np.float64)
    kept = wide[np.isfinite(wide) & (wide != 0)]
    want, _ = np.histogram(np.frexp(kept)[1] - 1, np.append(EXPONENTS, EXPONENTS[-1] + 1) - 0.5)
    assert found.counts.tolist() == want.tolist()
    assert (found.inf, found.nan) == (np.isinf(wide).sum(), 1)
    assert found.zeros == (wide == 0).sum()
    assert found.size == x.size


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("scale", [1.0, 2.0**12, 2.0**-6])
def test_what_would_be_lost_is_what_casting_loses(dtype, scale):
    x = spread_out(20_000, -60, 20)
    lost = Histogram.of_row(histogram(x)).lost(dtype, scale)
    with np.errstate(all="ignore"):
        cast = (x * np.float32(scale)).astype(jnp.dtype(dtype)).astype(np.float32)
    # A share of one exponent in eighty lies beside an edge: below the largest, above the smallest.
    assert lost.underflows == pytest.approx(100 * (cast == 0).mean(), abs=0.2)
    assert lost.overflows == pytest.approx(100 * (~np.isfinite(cast)).mean(), abs=1.3)


def loss(params, x):
    for i, w in enumerate(params):
        with jax.named_scope(f"layer_{i}"):
            x = jnp.tanh(x @ w)
    return jnp.mean(x**2) * 1e-6


PARAMS = [jnp.asarray(spread_out(64, -6, 0).reshape(8, 8)) for _ in range(2)]
X = spread_out(128, -3, 1).reshape(16, 8)


def test_weights_activations_and_gradients_are_told_apart_by_module():
    report = exponents(loss, "float32")(PARAMS, X)
    kinds = {(s.module, s.kind) for s in report.spreads}
    assert {("params/0", "weight"), ("layer_1", "activation"), ("layer_0", "gradient")} <= kinds
    assert report.of("weight").size == 128
    grads = jax.grad(loss)(PARAMS, X)
    want = Histogram.of_row(histogram(jnp.stack(grads)))
    assert report.of("wgrad").counts.tolist() == want.counts.tolist()
    named = report.to_dict()["spreads"][0]
    assert {"zeros%", "dynamic_range", "float16_underflows%", "float8_e5m2_overflows%"} <= set(
        named
    )
    with pytest.raises(ValueError, match=r"no 'wgrad' in module 'x'(.|\n)*'params/0'"):
        report.of("wgrad", "x")


def test_gradients_are_counted_unscaled_and_the_scale_saves_them():
    plain = exponents(loss, "float32")(PARAMS, X)
    scaled = exponents(loss, "float32", loss_scale=2.0**10)(PARAMS, X)
    assert plain.of("wgrad").counts.tolist() == scaled.of("wgrad").counts.tolist()
    assert plain.of("gradient").highest == scaled.of("gradient").highest
    scale = plain.suggested_loss_scale
    assert plain.lost("gradient", "float16").underflows > 10
    assert plain.lost("gradient", "float16", scale).underflows < 5
    assert plain.lost("gradient", "float16", scale).overflows == 0


def test_it_prints_on_a_screen_and_draws():
    report = exponents(loss, "16-mixed")(PARAMS, X)
    assert len(str(report).splitlines()) < 40
    assert "loss scale for float16 gradients" in str(report)
    assert "<table>" in report._repr_html_()
    figure = report.plot()
    labels = [line.get_label() for line in figure.axes[0].lines[:4]]
    kinds = ["weight", "activation", "gradient", "wgrad"]
    lost = [report.lost(kind, "float16").underflows for kind in kinds]
    want = [f"{k}: {share:.1f}% are 0 in float16" for k, share in zip(kinds, lost, strict=True)]
    assert labels == want
    assert report.plot(figure.add_subplot()) is figure
    plain, scaled = report.plot(kinds=("wgrad",), loss_scale=2.0**15).axes[0].lines[:2]
    assert scaled.get_label().startswith("wgrad × 32768: ")
    assert list(scaled.get_xdata()) == [x + 15 for x in plain.get_xdata()]
    with pytest.raises(ValueError, match="no kind 'wgrads'"):
        report.plot(kinds=("wgrads",))


def test_left_of_a_drawn_line_is_what_the_format_makes_zero():
    report = exponents(lambda params, x: 16 * loss(params, x), "float32")(PARAMS, X)
    names = ("float16", "float8_e5m2")
    axes = report.plot(kinds=("gradient",), formats=names).axes[0]
    curve, *ends = axes.lines
    x, y = curve.get_xdata() + 0.5, curve.get_ydata()  # a bin's right edge, and its share
    left = [float(y[x <= end.get_xdata()[0]].sum()) for end in ends]
    want = [report.lost("gradient", name).underflows for name in names]
    assert left == pytest.approx(want)
    assert 1 < want[0] < 99
    assert [text.get_text() for text in axes.texts][1] == "e5m2: 0 left of this"
    with pytest.raises(ValueError, match=r"plot\(formats\): no format 'fp8'(.|\n)*'float8_e5m2'"):
        report.plot(formats=("fp8",))
    with pytest.raises(ValueError, match=r"no format 'half'(.|\n)*'float16'"):
        report.lost("gradient", "half")


def test_a_loop_is_counted_as_often_as_it_runs():
    def looped(w, x):
        def body(c, _):
            with jax.named_scope("inside"):
                return jnp.tanh(c @ w), None

        return jnp.sum(jax.lax.scan(body, x, None, length=5)[0])

    report = exponents(looped, "float32")(PARAMS[0], X)
    assert report.of("activation", "inside").size % (5 * X.size) == 0


def test_modules_of_nnx_have_names_under_every_policy():
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 4, rngs=rngs))
    for policy in ("bf16-mixed", "float32", "bfloat16"):
        found = exponents(lambda model, x: jnp.mean(model(x) ** 2), policy)(model, jnp.ones((4, 8)))
        names = {s.module for s in found.spreads if s.kind == "activation"}
        assert {"Sequential/layers/0", "Sequential/layers/1"} <= names
    assert type(model.layers[0]) is nnx.Linear  # the user's own is left as it was
