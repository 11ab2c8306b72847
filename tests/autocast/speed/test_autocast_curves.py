"""Activations whose derivative a GPU takes at inputs that it takes for others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _directions import barriers, check_as_exact_without
from _hinted import curves, hints
from _planned import Planned
from _samples import normal
from jax import lax

from benchmarks.measure.elsewhere import lowered_for
from mpjax import autocast

pytestmark = pytest.mark.no_leak_check("it collects garbage after each trace: half of the time")
SHAPES = {"x": (64, 32), "w": (32, 64), "out": (64, 32)}
SPECS = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in SHAPES.values()]
ARGS = [normal(i, *shape, scale=1 / 3) for i, shape in enumerate(SHAPES.values())]
SHIFT = np.linspace(-1, 1, 64, dtype=np.float32)


def norm(y):
    y = y - jnp.mean(y, -1, keepdims=True)
    return y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-5) * (1 + SHIFT) + SHIFT


def over_groups(y):
    y = y.reshape(8, 8, 64)
    y = y - jnp.mean(y, (1, 2), keepdims=True)
    y = y * lax.rsqrt(jnp.mean(y * y, (1, 2), keepdims=True) + 1e-5) * (1 + SHIFT) + SHIFT
    return y.reshape(64, 64)


def normed(activation, of=norm):
    """A layer: a product, a norm, an activation, a product."""
    return lambda x, w, out: activation(of(x @ w)) @ out


def gated(activation, gate, shift=SHIFT):
    """A layer with a gate that is cut out of one product, as a gated convolution's is."""

    def fun(x, w, out):
        a, b = jnp.split(x @ w + shift, 2, -1)
        return (activation(a) * gate(b)) @ out[:32]

    return fun


def same(x):
    return x


def exact_gelu(x):
    return jax.nn.gelu(x, approximate=False)


def found(fun):
    """Returns the curves in the groups of a plan."""
    planned = Planned(fun, *SPECS)
    return [
        curve
        for group in planned.groups
        if group.marks.checkpoint
        for curve in curves.curves(
            group.eqns, group.inputs, [v for v, *_ in group.outputs]
        ).values()
        if curve is not None
    ]


@pytest.mark.parametrize("of", [norm, over_groups])
@pytest.mark.parametrize("activation", [jnp.tanh, jax.nn.gelu, exact_gelu, jax.nn.mish, lax.erf])
def test_a_costly_activation_of_a_norm_is_found(activation, of):
    (curve,) = found(normed(activation, of))
    assert [v.aval.shape for v in curve.inputs] == [(64, 64)]
    makers = {eqn.primitive.name for eqn in curve.before}
    assert {"sub", "mul", "add"} <= makers
    assert makers.isdisjoint({"rsqrt", "reduce_sum"})  # statistics are not taken again


@pytest.mark.parametrize(
    ("fun", "count"),
    [
        (gated(jnp.tanh, jax.nn.sigmoid), 2),  # with one of them apart, XLA would store the other
        (gated(jax.nn.gelu, same), 1),
        (gated(exact_gelu, same, shift=0.0), 1),
        (gated(same, jnp.tanh), 1),
    ],
)
def test_the_costly_halves_of_a_gate_are_found(fun, count):
    some = found(fun)
    assert len(some) == count
    for curve in some:
        assert curve.result.aval.shape == (64, 32)
        assert "split" in {eqn.primitive.name for eqn in curve.before}


def of_two_products(x, w, out):
    return (jnp.tanh(x @ w[:, :32]) * (x @ w[:, 32:])) @ out[:32]


def read_inside(x, w, out):
    """An activation of a norm, of which something is read before it ends."""
    y = jnp.tanh(norm(x @ w))
    return jnp.square(y) @ out + jnp.sum(y, -1, keepdims=True)


def of_a_curved_value(x, w, out):
    return jnp.tanh(norm(jnp.exp(norm(x @ w)))) @ out


@pytest.mark.parametrize(
    "fun",
    [
        normed(jax.nn.silu),  # XLA computes an exponential twice
        normed(jax.nn.relu),
        normed(jnp.tanh, of=same),  # nothing ties it to the forward pass
        normed(jnp.tanh, of=jax.nn.softmax),
        gated(jax.nn.silu, same),
        gated(same, jax.nn.sigmoid),
        of_two_products,
        read_inside,
        of_a_curved_value,  # it is no affine function of the inputs
    ],
)
def test_other_activations_are_not(fun):
    assert found(fun) == []


def held(fun, platform):
    """Returns how often barriers hold an input in the gradient's program, cotangents aside."""
    with hints.without("stored_cotangent"):
        return barriers(fun, platform, SPECS).count("64x64xbf16")


@pytest.mark.parametrize("fun", [normed(jnp.tanh), gated(jnp.tanh, same)])
def test_a_gpu_alone_takes_an_input_for_another(fun):
    def more(platform):
        with hints.without("curves_apart"):
            before = held(fun, platform)
        return held(fun, platform) > before

    assert more("cuda")
    assert more("rocm")
    assert not more("tpu")
    assert not more("cpu")


def test_in_a_loop_no_input_is_taken_for_another():
    def fun(x, w, out):
        return lax.scan(lambda y, _: (normed(jnp.tanh)(y, w, out), None), x, None, 2)[0]

    assert held(fun, "cuda") == 0


def cut_after(x, w, out):
    """What a TPU is to compute of parts: an activation of which only parts are read."""
    y = jnp.tanh(norm(x @ w))
    return (y[:, :32] * y[:, 32:]) @ out[:32]


def picked_from(x, w, out):
    """Capped logits of which a loss picks one in each row, before it goes on to a product."""
    y = jnp.tanh(norm(x @ w))
    at = jnp.arange(64, dtype=jnp.int32)[:, None]
    return y @ out + jnp.take_along_axis(y, at, 1)


@pytest.mark.parametrize("fun", [cut_after, picked_from])
def test_what_is_computed_in_part_is_no_curve(fun):
    found = held(fun, "cuda")
    with hints.without("curves_apart"):
        assert held(fun, "cuda") == found


def curves_computed(platform):
    """How many times the program of a gate's gradient for a platform computes `tanh`."""
    jax.clear_caches()
    fun = autocast(gated(jnp.tanh, jax.nn.sigmoid), "bf16-mixed")
    grads = jax.grad(lambda *args: jnp.sum(fun(*args) ** 2), (0, 1, 2))
    lowered = jax.jit(lowered_for(platform, lambda args: grads(*args), ARGS)).lower(ARGS)
    return lowered.compile().as_text().count(" tanh(")


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_elsewhere_than_on_a_gpu_nothing_is_computed_twice(platform):
    with hints.without("curves_apart"):
        without = curves_computed(platform)
    assert curves_computed(platform) == without + (platform == "cuda")


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("fun", "platform"),
    [
        (normed(exact_gelu), "cuda"),
        (normed(jnp.tanh, over_groups), "cuda"),
        (gated(jnp.tanh, jax.nn.sigmoid), "cuda"),
        (gated(jnp.tanh, same), "cpu"),
    ],
)
def test_values_and_derivatives_of_every_order_are_as_exact_as_without(fun, platform):
    check_as_exact_without("curves_apart", fun, ARGS, platform)


@jax.custom_vjp
def thrice(x):
    """`tanh`, with a rule of its author's: three times its derivative."""
    return jnp.tanh(x)


thrice.defvjp(lambda x: (jnp.tanh(x), jnp.tanh(x)), lambda y, ct: (3 * ct * (1 - y * y),))


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize("fun", [normed(thrice), gated(thrice, same)])
def test_a_rule_of_the_authors_is_kept(fun, platform):
    def grads(fun):
        return jax.grad(lambda *args: jnp.sum(fun(*args) ** 2), (0, 1, 2))

    assert len(found(fun)) == 1
    low = grads(autocast(fun, "bf16-mixed"))
    got = jax.jit(lowered_for(platform, lambda args: low(*args), ARGS))(ARGS)
    for a, b in zip(got, jax.jit(grads(fun))(*ARGS), strict=True):
        assert float(jnp.linalg.norm(a - b)) < 2.0**-6 * float(jnp.linalg.norm(b))
