"""Functions that only choose and compare run on low values, with their own rules."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _hinted import hints
from _samples import normal
from jax import lax

from benchmarks.measure import targets
from benchmarks.measure.elsewhere import lowered_for
from mpjax import autocast


@jax.custom_jvp
def step_through(x):
    return jnp.where(x > 0, 1.0, 0.0)


@step_through.defjvp
def _step_through_jvp(primals, tangents):
    (t,) = tangents
    return step_through(*primals), (3 * t + t / 512) - 3 * t  # in bfloat16: 0


def layer(activation):
    return lambda w, b, x: activation(x @ w + b)


ARGS = (normal(1, 64, 128), normal(2, 128), normal(3, 32, 64))


@pytest.mark.parametrize("policy", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("activation", [jax.nn.relu, jax.nn.relu6])
def test_an_exact_function_rounds_nothing(policy, activation):
    def read_low(between):  # the product with the identity reads what stands between as it is
        return lambda w, b, x: layer(between)(w, b, x) @ jnp.eye(128)

    before = autocast(read_low(lambda x: x), policy)(*ARGS)
    after = autocast(read_low(activation), policy)(*ARGS)
    np.testing.assert_array_equal(after, activation(before))


@pytest.mark.parametrize(("policy", "dtype"), [("bf16-mixed", "bfloat16"), ("16-mixed", "float16")])
def test_activations_of_a_low_value_are_rounded_once(policy, dtype):
    """Within 1.25 roundings of the exact function of the value that is held."""
    x = jnp.linspace(-3, 3, 4096).reshape(-1, 8).astype(dtype).astype(jnp.float32)
    names = "celu elu gelu hard_sigmoid hard_silu leaky_relu log_sigmoid mish selu sigmoid silu"
    found = [getattr(jax.nn, name) for name in (*names.split(), "soft_sign", "softplus", "tanh")]
    between = lambda x: [lax.sort(f(x @ jnp.eye(8)), dimension=0) for f in found]  # noqa: E731 - stored
    got, want = jax.jit(autocast(between, policy))(x), [jnp.sort(f(x), axis=0) for f in found]
    eps, tiny = float(jnp.finfo(dtype).eps) / 2, 2.0**-14  # the smallest normal float16
    for f, a, b in zip(found, got, want, strict=True):
        error = float(jnp.max(jnp.abs(a - b) / jnp.maximum(jnp.abs(b), tiny)))
        assert error < 1.25 * eps, (f.__name__, error / eps)


def test_relu_after_a_biased_product_keeps_one_low_value():
    fun = autocast(lambda w, b, x: jnp.sum((layer(jax.nn.relu)(w, b, x) @ w.T) ** 2), "bf16-mixed")
    eqns = jax.make_jaxpr(fun)(*ARGS).eqns
    again = [e for e in eqns if e.primitive.name in ("remat2", "checkpoint")]
    assert not [v for e in again for v in e.invars if v.aval.shape == (32, 128)]
    _, pullback = jax.vjp(fun, *ARGS)
    kept = [x.dtype for x in jax.tree.leaves(pullback) if x.shape == (32, 128)]
    assert bool in kept  # a mask, and not what relu would be computed again from
    assert jnp.float32 not in kept


@pytest.mark.parametrize("mode", [jax.jacfwd, jax.jacrev])
def test_a_rule_of_the_users_own_is_kept_in_float32(mode):
    fun = autocast(lambda b: step_through(ARGS[2] @ ARGS[0] + b) @ jnp.eye(128), "bf16-mixed")
    found = mode(lambda t: fun(t * jnp.ones(128)))(0.0)
    np.testing.assert_allclose(found, 1 / 512, rtol=2**-8)  # rounded once, to bfloat16


@pytest.mark.parametrize("mode", [jax.jacfwd, jax.jacrev])
def test_a_rule_of_the_users_own_is_the_derivative_of_an_exact_function_too(mode):
    @jax.custom_jvp
    def straight_through(x):
        return lax.max(x, 0.0)

    straight_through.defjvp(lambda x, t: (straight_through(*x), 3 * t[0]))
    fun = autocast(lambda b: straight_through(ARGS[2] @ ARGS[0] + b) @ jnp.eye(128), "bf16-mixed")
    np.testing.assert_array_equal(mode(lambda t: fun(t * jnp.ones(128)))(0.0), 3)


def test_relu_has_no_slope_at_zero():
    fun = autocast(lambda b: jnp.sum(jax.nn.relu(jnp.zeros((8, 64)) @ ARGS[0] + b)), "bf16-mixed")
    np.testing.assert_array_equal(jax.grad(fun)(jnp.zeros(128)), 0)


@pytest.mark.parametrize("policy", ["bf16-mixed", "16-mixed"])
def test_a_function_that_holds_a_constant_out_of_range_is_not_exact(policy):
    """`nan_to_num` chooses float32's largest number for inf: an infinity in 16 bits."""
    fun = autocast(lambda x: jnp.nan_to_num(x @ jnp.eye(2)) @ jnp.eye(2), policy)
    np.testing.assert_array_equal(fun(jnp.array([[jnp.nan, 1.0]])), [[0.0, 0.0]])


# -- a TPU chooses in float32 ----------------------------------------------------------------------

WITH_EDGES = ARGS[2].at[0].set(jnp.resize(jnp.array([0.0, -0.0, jnp.inf, jnp.nan, 1e-30]), 64))
CHOICES = {
    "relu": jax.nn.relu,
    "relu6": jax.nn.relu6,
    "the larger one": lambda y: jnp.maximum(y, y[:, ::-1]),
    "clip": lambda y: jnp.clip(y, -1.0, 1.0),
    "relu of each row": jax.vmap(jax.nn.relu),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("policy", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.filterwarnings("ignore:autocast:mpjax.SupportWarning")  # float16 on a TPU
def test_what_a_tpu_chooses_is_what_others_choose(choice, policy):
    def fun(w, b, x):
        y = autocast(lambda w, b, x: layer(CHOICES[choice])(w, b, x) @ w.T, policy)(w, b, x)
        return jnp.sum(jnp.where(jnp.isfinite(y), y, 0.0)), y

    args = *ARGS[:2], WITH_EDGES
    step = jax.value_and_grad(fun, has_aux=True)
    there = lowered_for("tpu", step, *args)(*args)
    with hints.without("chosen_wide"):
        jax.clear_caches()
        here = lowered_for("tpu", step, *args)(*args)
    for a, b in zip(jax.tree.leaves(there), jax.tree.leaves(here), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("platform", "dtype"), [("tpu", "f32"), ("cuda", "bf16"), ("cpu", "bf16")])
def test_only_a_tpu_widens_what_it_chooses_from(platform, dtype):
    fun = autocast(lambda w, b, x: jnp.sum(layer(jax.nn.relu)(w, b, x) @ w.T), "bf16-mixed")
    text = jax.jit(fun).trace(*ARGS).lower(lowering_platforms=(platform,)).as_text()
    *_, last = (line for line in text.splitlines() if "stablehlo.maximum" in line)
    assert last.endswith(f"tensor<32x128x{dtype}>")


@pytest.mark.tpu_compiler
def test_a_tpu_transposes_nothing_between_a_norm_and_a_sum_over_segments():
    shapes = (16, 128), (128,), (49152, 16), (128, 128)
    args = [*(jax.ShapeDtypeStruct(shape, "float32") for shape in shapes)]
    args = targets.get_target("v5e").specs([*args, jax.ShapeDtypeStruct((49152,), "int32")])

    def transposed():
        def loss(w, b, x, v, segments):
            y = layer(jax.nn.relu)(w, b, x) @ v
            y = jax.nn.standardize(y, axis=-1)
            return jnp.mean((jax.ops.segment_sum(y, segments, 8192) @ v) ** 2)

        step = jax.jit(jax.value_and_grad(autocast(loss, "bf16-mixed"), (0, 1, 3)))
        text = step.lower(*args).compile().as_text()
        return len(re.findall(r"= \w+\[49152,128\]\{0,1", text))

    assert not transposed()
    with hints.without("chosen_wide"):
        assert transposed()
