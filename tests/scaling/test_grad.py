"""Scaled value_and_grad: the true value, float32 gradients, means over shards."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _helpers import as_owned, count_casts, over_shards
from hypothesis import given, settings
from hypothesis import strategies as st

import mpjax
from mpjax.testing import assert_bitwise_equal

SCALE = 2.0**10
STATIC = mpjax.StaticLossScale(SCALE)
SCALES = [None, 8, 2.0**10, STATIC, mpjax.DynamicLossScale(2.0**10), mpjax.NoOpLossScale()]


def quadratic(w, x):
    return jnp.mean((x * w) ** 2)


# -- as jax.value_and_grad -----------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("loss_scale", SCALES, ids=repr)
@pytest.mark.parametrize(
    "argnums", [0, 1, -1, (0,), (0, 2), [1, 2], (-3, -1), np.int64(1)], ids=str
)
@pytest.mark.parametrize("has_aux", [False, True])
def test_value_and_gradients_are_those_of_jax(loss_scale, argnums, has_aux):
    def fun(a, b, c, *, power=1.0):
        value = jnp.sum(a["w"] * b) ** 2 + jnp.sum(c[0]) * power
        return (value, {"sum": a["w"].sum(), "text": "t", "none": None}) if has_aux else value

    args = {"w": jnp.arange(3.0)}, jnp.ones(3) * 2, [jnp.float32(4)]
    want = jax.value_and_grad(fun, argnums, has_aux)(*args, power=3.0)
    got = mpjax.value_and_grad(fun, argnums, has_aux, loss_scale=loss_scale)(*args, power=3.0)
    assert_bitwise_equal(got, want)  # small integers and powers of two: nothing rounds
    grads = mpjax.grad(fun, argnums, has_aux, loss_scale=loss_scale)(*args, power=3.0)
    assert_bitwise_equal(grads, jax.grad(fun, argnums, has_aux)(*args, power=3.0))


def test_gradients_of_integers_as_in_jax():
    def fun(p):
        return p["w"] * 2.0

    params = {"w": jnp.float32(3), "n": jnp.arange(2)}
    _, grads = mpjax.value_and_grad(fun, loss_scale=STATIC, allow_int=True)(params)
    assert float(grads["w"]) == 2
    assert grads["n"].dtype == jax.dtypes.float0
    with pytest.raises(TypeError, match="allow_int"):
        mpjax.value_and_grad(fun, loss_scale=STATIC)(params)


def test_holomorphic_as_in_jax():
    z = jnp.complex64(1 + 2j)
    got = mpjax.value_and_grad(lambda z: z * z, loss_scale=STATIC, holomorphic=True)(z)
    assert_bitwise_equal(got, jax.value_and_grad(lambda z: z * z, holomorphic=True)(z))
    with pytest.raises(TypeError, match=r"must be a complex scalar \(holomorphic=True\); got f32"):
        mpjax.value_and_grad(lambda z: z.real, loss_scale=1, holomorphic=True)(z)


def test_constant_loss_has_zero_gradient():
    value, grads = mpjax.value_and_grad(lambda w: 3.0, loss_scale=STATIC)(jnp.ones(2))
    assert float(value) == 3
    assert grads.tolist() == [0, 0]


@pytest.mark.parametrize("argnums", [3, -4, (0, 5)])
def test_wrong_argnums_are_an_error_as_in_jax(argnums):
    for transform in (jax.value_and_grad, functools.partial(mpjax.value_and_grad, loss_scale=1)):
        with pytest.raises((TypeError, ValueError), match="argnums"):
            transform(lambda a, b, c: a, argnums)(1.0, 2.0, 3.0)


def test_wrapper_looks_like_the_function():
    got = mpjax.value_and_grad(quadratic, loss_scale=1)
    assert got.__name__ == "quadratic"
    assert got.__wrapped__ is quadratic

    class Model:
        def __init__(self):
            self.weights = jnp.ones(2)

        def __call__(self, w):
            return jnp.sum(w * self.weights)

    wrapped = mpjax.grad(Model(), loss_scale=8)
    assert not hasattr(wrapped, "weights")
    assert wrapped(jnp.ones(2)).tolist() == [1, 1]
    partial = functools.partial(quadratic, x=jnp.ones(2))
    assert float(mpjax.grad(partial, loss_scale=8)(jnp.float32(3))) == 6


# -- law 5: the loss, and what float16 cannot hold -------------------------------------------------


@jax.custom_vjp
def clip_cotangent(x):
    return x


clip_cotangent.defvjp(lambda x: (x, None), lambda _, ct: (jnp.clip(ct, -60000, 60000),))


def test_law_05_float16_loss_of_3_times_65536_is_no_overflow():
    scale = mpjax.DynamicLossScale(65536.0)
    value, grads = mpjax.value_and_grad(lambda w: w, loss_scale=scale)(jnp.float16(3))
    assert (float(value), value.dtype) == (3.0, jnp.float16)
    assert (float(grads), grads.dtype) == (1.0, jnp.float32)


def test_law_05_float16_gradient_past_65504_is_reported():
    # The cotangent, 2¹⁵, fits; three times as much does not, whatever the loss is scaled in.
    value, grads = mpjax.value_and_grad(lambda w: w * 3, loss_scale=65536)(jnp.float16(1))
    assert float(value) == 3
    assert not mpjax.all_finite(grads)


@pytest.mark.parametrize("exponent", [-126, -30, -14, 0, 15, 16, 24, 126])
@pytest.mark.parametrize("unscale", [True, False])
@pytest.mark.parametrize("policy", [None, "16-mixed", "16-true"])
def test_law_05_cotangent_fits_a_float16_loss(exponent, unscale, policy):
    # 2**16 would enter as inf, which this rule would make 60000 of; 2**-30 as 0.
    scale = mpjax.StaticLossScale(2.0**exponent)

    def loss(w):
        return clip_cotangent(w.astype(jnp.float16))

    scale = scale if unscale else as_owned(scale)
    transform = functools.partial(mpjax.grad, loss_scale=scale, unscale=unscale, policy=policy)
    grads = transform(loss)(jnp.float32(1))
    assert float(grads) == (1.0 if unscale else 2.0**exponent)


def test_law_05_cotangent_fits_a_float16_loss_in_a_train_step():
    step = mpjax.make_train_step(
        lambda params, _: clip_cotangent(params["w"].astype(jnp.float16)),
        optax.sgd(0.5),
        "16-mixed",
        loss_scale=mpjax.StaticLossScale(2.0**17),
    )
    state, metrics = step(step.init({"w": jnp.float32(1)}), None)
    assert float(state.params["w"]) == 0.5
    assert metrics["loss"].dtype == jnp.float32


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("scale", [1001.0, 3.0, 1e4 / 3, 65535.0])
def test_law_06_scale_that_is_no_power_of_two_is_undone_by_what_was_applied(dtype, scale):
    # bfloat16 has no 1001: the cotangent is 1000, and dividing by 1001 would be off by 1e-3.
    def loss(w):
        return w.astype(dtype) * 0.5

    for transform in (jax.jit, lambda f: f):
        grads = transform(mpjax.grad(loss, loss_scale=scale))(jnp.float32(1))
        assert float(grads) == 0.5


@pytest.mark.parametrize("scale", [1.0, 2.0**15, 2.0**24])
@pytest.mark.parametrize("value", [1e37, 3e38, -2e37])
def test_law_05_reported_loss_is_the_true_one(scale, value):
    got, grads = mpjax.value_and_grad(lambda w: w * value, loss_scale=scale)(jnp.float32(1))
    assert float(got) == float(np.float32(value))
    assert bool(mpjax.all_finite(grads)) == (abs(value) * scale < 3.4e38)


def test_law_05_reported_loss_is_true_on_growth_and_overflow_steps():
    def loss(w, x):
        return jnp.sum(w * x)

    def step(ls, x):
        value, grads = mpjax.value_and_grad(loss, loss_scale=ls)(jnp.float32(2), x)
        return ls.adjust(mpjax.all_finite(grads)), (value, grads, ls.loss_scale)

    ls = mpjax.DynamicLossScale(2.0**23, growth_interval=1)
    xs = jnp.array([1.0, 1.0, jnp.inf, 1.0])
    _, (values, grads, scales) = jax.lax.scan(step, ls, xs)
    assert values.tolist() == [2, 2, jnp.inf, 2]
    assert scales.tolist() == [2.0**23, 2.0**24, 2.0**24, 2.0**23]
    assert grads.tolist()[:2] == [1, 1]  # unscaled with the scale that they were scaled with


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("loss_scale", SCALES, ids=repr)
@pytest.mark.parametrize("unscale", [True, False])
def test_law_05_gradients_are_float32(dtype, loss_scale, unscale):
    params = {"w": jnp.ones(2, dtype)}
    loss_scale = loss_scale if unscale else as_owned(loss_scale)
    grads = mpjax.grad(lambda p: p["w"].astype(jnp.float32).sum(), loss_scale=loss_scale)(params)
    assert grads["w"].dtype == jnp.float32


def test_law_05_gradients_of_8_bit_floats_are_unscaled_too():
    w = jnp.ones(2, jnp.float8_e4m3fn)
    grads = mpjax.grad(lambda w: w.astype(jnp.float32).sum(), loss_scale=8)(w)
    assert (grads.dtype, grads.tolist()) == (jnp.float32, [1, 1])


def test_law_05_float64_and_complex128_gradients_keep_their_dtype():
    with jax.enable_x64(True):
        third = jnp.float64(1) / 3

        def loss(p):
            return p["r"] * third + jnp.real(p["c"]) * third

        value, grads = mpjax.value_and_grad(loss, loss_scale=STATIC)(
            {"r": jnp.float64(1), "c": jnp.complex128(1)}
        )
        assert (value.dtype, grads["r"].dtype, grads["c"].dtype) == (
            jnp.float64,
            jnp.float64,
            jnp.complex128,
        )
        assert float(grads["r"]) == 1 / 3


X = np.array([0.5, 3.0, 1.1], np.float32)
plain = jax.jit(jax.value_and_grad(quadratic))
scaled = jax.jit(lambda ls, w, x: mpjax.value_and_grad(quadratic, loss_scale=ls)(w, x))


@settings(max_examples=50)
@given(st.integers(-20, 24), st.floats(2.0**-10, 2.0**10, width=32))
def test_law_05_power_of_two_scale_changes_no_bit(exponent, w):
    ls = mpjax.StaticLossScale(2.0**exponent)
    assert_bitwise_equal(scaled(ls, np.float32(w), X), plain(np.float32(w), X))


# -- law 6: judged unscaled, in float32 ------------------------------------------------------------


def test_law_06_overflow_of_the_unscaled_value_is_caught():
    # The scaled gradient is 1e10 × 2⁻¹⁰⁰ and finite; the true one has left float32.
    scale = mpjax.StaticLossScale(2.0**-100)
    scaled = jnp.float32(1e10)
    assert mpjax.all_finite(scaled)
    assert not mpjax.all_finite(scale.unscale(scaled))


@pytest.mark.parametrize("unscale", [True, False])
def test_law_06_float16_overflow_is_reported(unscale):
    def loss(w):
        return (w.astype(jnp.float16) * jnp.float16(6e4)).astype(jnp.float32)

    scale = mpjax.StaticLossScale(2.0**15)
    grads = mpjax.grad(loss, loss_scale=scale if unscale else as_owned(scale))(jnp.float32(1))
    assert not mpjax.all_finite(grads)


# -- overwritten collections -----------------------------------------------------------------------


@jax.custom_vjp
def record(x, history):
    return x


record.defvjp(
    lambda x, history: (x, (x, history)),
    lambda saved, ct: (ct, jnp.max(jnp.abs(saved[0]), keepdims=True).astype(saved[1].dtype)),
)


def with_history(params, x):
    history = params["_overwrite_with_gradient"]["amax"]
    return jnp.mean(record(params["w"] * x, history))


HISTORY_PARAMS = {"w": jnp.float32(1), "_overwrite_with_gradient": {"amax": jnp.zeros(1)}}


@pytest.mark.parametrize("policy", [None, "bf16-mixed"])
def test_law_01_overwritten_gradients_are_neither_cast_nor_unscaled(policy):
    fun = mpjax.grad(with_history, loss_scale=STATIC, policy=policy)
    grads = fun(HISTORY_PARAMS, jnp.array([1.0, -3.0]))
    amax = grads["_overwrite_with_gradient"]["amax"]
    assert (amax.tolist(), amax.dtype) == ([3.0], jnp.float32)


@pytest.mark.parametrize("check_vma", [True, False])
def test_law_01_overwritten_gradients_are_neither_summed_nor_averaged(devices, check_vma):
    mesh = jax.sharding.Mesh(np.array(devices), ("i",))
    fun = mpjax.grad(with_history, loss_scale=STATIC, axis_name="i")
    step = over_shards(fun, mesh, jax.P(), jax.P("i"), check_vma=check_vma)
    grads = step(HISTORY_PARAMS, jnp.arange(8.0))
    assert grads["_overwrite_with_gradient"]["amax"].tolist() == [7.0]
    assert float(grads["w"]) == 3.5


# -- policy= ---------------------------------------------------------------------------------------


def seen_dtypes(policy, argnums=0, **kwargs):
    seen = {}

    def loss(params, batch, *, extra=None):
        seen.update(w=params["w"].dtype, x=batch["x"].dtype, n=batch["n"].dtype)
        seen.update(extra=extra.dtype)
        return (params["w"] * batch["x"]).sum(), params["w"]

    params = {"w": jnp.ones(2)}
    batch = {"x": jnp.ones(2), "n": jnp.arange(2)}
    (value, aux), grads = mpjax.value_and_grad(
        loss, argnums, True, loss_scale=8, policy=policy, **kwargs
    )(params, batch, extra=jnp.ones(1))
    return seen, value, aux, grads


def test_a_true_policy_casts_every_floating_argument_and_the_value():
    seen, value, aux, grads = seen_dtypes("bf16-true")
    low = jnp.dtype(jnp.bfloat16)
    assert seen == {"w": low, "x": low, "n": jnp.int32, "extra": low}
    assert (value.dtype, float(value)) == (low, 2)
    assert aux.dtype == jnp.bfloat16
    assert grads["w"].dtype == jnp.float32


@pytest.mark.parametrize("policy", ["16-mixed", "bf16-mixed", "O2"])
def test_a_mixed_policy_is_autocast_as_in_a_train_step(policy):
    def loss(w, x):
        return jnp.mean(jnp.exp(x @ w))

    w, x = jnp.full((4, 4), 0.75), jnp.full((8, 4), 5.0)  # exp(15) is more than float16 holds
    value, grads = mpjax.value_and_grad(loss, loss_scale=1, policy=policy)(w, x)
    cast = mpjax.autocast(loss, policy)
    assert value == cast(w, x)
    assert value == pytest.approx(np.exp(15), 1e-6)
    assert jnp.array_equal(grads, jax.grad(cast)(w, x))


def test_a_mixed_policy_reads_16_bit_parameters_in_float32_wherever_they_stand():
    def loss(batch, w):
        return jnp.mean((w + 1e-3) * batch)

    w = jnp.ones(4, jnp.float16)
    value, grads = mpjax.value_and_grad(loss, 1, loss_scale=1, policy="O2")(jnp.ones(4), w)
    assert (float(value), grads.dtype) == (pytest.approx(1.001, 1e-6), jnp.float32)


def test_policy_none_casts_nothing_even_under_a_default():
    with mpjax.default_policy("bf16-mixed"):
        seen, value, _, _ = seen_dtypes(None)
    assert seen["w"] == value.dtype == jnp.float32


def test_policy_map_is_read_by_the_paths_of_the_parameters():
    policies = mpjax.PolicyMap("bf16-true", {"w": "float32"})

    def loss(params, batch):
        assert params["w"].dtype == jnp.float32
        assert params["v"].dtype == batch["w"].dtype == jnp.bfloat16
        return params["w"].sum()

    params = {"w": jnp.ones(2), "v": jnp.ones(2)}
    mpjax.grad(loss, loss_scale=1, policy=policies)(params, {"w": jnp.ones(2)})


def test_rule_of_a_policy_map_matches_in_one_of_several_arguments():
    policies = mpjax.PolicyMap("bf16-true", {"enc": "float32", "dec": "float32"})

    def loss(a, b):
        return a["enc"].sum()

    args = {"enc": jnp.ones(2)}, {"dec": jnp.ones(2)}
    mpjax.grad(loss, (0, 1), loss_scale=1, policy=policies)(*args)
    with pytest.warns(mpjax.PolicyWarning, match="rule 2 of 2, 'dec', matches none of the 1 paths"):
        mpjax.grad(loss, 0, loss_scale=1, policy=policies)(*args)


def test_law_03_parameter_used_many_times_is_cast_once():
    def loss(w):
        return (w * w * w + w).astype(jnp.float32).sum()

    fun = mpjax.value_and_grad(loss, loss_scale=8, policy="bf16-true")
    plain = mpjax.value_and_grad(loss, loss_scale=8)
    # One of the parameter, one of the value; both convert the gradient, the loss, and back.
    assert count_casts(fun, jnp.ones(2)) == 2 + count_casts(plain, jnp.ones(2, jnp.bfloat16))


# -- law 15: means over shards ---------------------------------------------------------------------


def mesh_of(devices, *shape):
    return jax.sharding.Mesh(np.array(devices).reshape(shape), ("a", "b")[: len(shape)])


SHARDED = [("a", (8,), jax.P("a")), (("a", "b"), (4, 2), jax.P(("a", "b")))]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(("axis_name", "shape", "spec"), SHARDED)
@pytest.mark.parametrize("loss_scale", [None, 2.0**10, mpjax.DynamicLossScale(8)], ids=repr)
def test_law_15_means_under_shard_map(devices, axis_name, shape, spec, loss_scale, check_vma):
    x = jnp.arange(16.0)
    fun = mpjax.value_and_grad(quadratic, loss_scale=loss_scale, axis_name=axis_name)
    step = over_shards(fun, mesh_of(devices, *shape), jax.P(), spec, check_vma=check_vma)
    for w in (jnp.float32(2), 2.0):
        value, grads = step(w, x)
        # Squares of small integers: sums and means of them are exact.
        assert float(value) == float(quadratic(jnp.float32(2), x))
        assert float(grads) == float(jax.grad(quadratic)(jnp.float32(2), x))


AVERAGED = [("a", 1), ("b", 1), (("a", "b"), 1), (("a", "b"), 0)]


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(("averaged", "argnum"), AVERAGED, ids=str)
@pytest.mark.parametrize("loss_scale", [None, mpjax.DynamicLossScale(8)], ids=repr)
def test_law_15_of_a_loss_that_is_a_mean_already(devices, averaged, argnum, loss_scale, check_vma):
    """An author who knows `pmap` returns the mean over the shards, or over some of them."""

    def loss(x, w):
        return jax.lax.pmean(jnp.mean((w * x) ** 2), averaged)

    x = jnp.arange(16.0)
    fun = mpjax.value_and_grad(loss, argnum, loss_scale=loss_scale, axis_name=("a", "b"))
    specs = (jax.P(("a", "b")), jax.P()) if argnum else (jax.P(), jax.P())
    step = over_shards(fun, mesh_of(devices, 4, 2), *specs, check_vma=check_vma)
    value, grads = step(x, jnp.float32(2))
    want = jax.value_and_grad(lambda x, w: jnp.mean((w * x) ** 2), argnum)(x, jnp.float32(2))
    assert_bitwise_equal((value, grads), want)


@pytest.mark.parametrize("transform", [jax.pmap, jax.vmap])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_law_15_means_under_pmap_and_vmap(transform, dtype):
    fun = mpjax.value_and_grad(quadratic, loss_scale=8, axis_name="i")
    value, grads = transform(fun, axis_name="i", in_axes=(None, 0))(
        jnp.asarray(2, dtype), jnp.arange(8, dtype=dtype)[:, None]
    )
    assert (value.dtype, grads.dtype) == (jnp.dtype(dtype), jnp.float32)
    assert value.tolist() == [70.0] * 8  # 4 × 140 / 8
    assert grads.tolist() == [70.0] * 8


def test_law_15_mean_over_one_of_two_axes(devices):
    fun = mpjax.grad(lambda w, x: (w * x).sum(), loss_scale=8, axis_name="a")
    specs = jax.P("b"), jax.P("a", "b")
    step = over_shards(fun, mesh_of(devices, 4, 2), *specs, out_specs=jax.P("b"))
    grads = step(jnp.ones(2), jnp.arange(8.0).reshape(4, 2))
    assert grads.tolist() == [3.0, 4.0]  # each column's mean


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("argnums", [1, -1, (1,), (0, 1)])
def test_law_15_means_of_whichever_argument_is_differentiated(devices, argnums, check_vma):
    def loss(x, w):
        return jnp.sum(x * w)

    fun = mpjax.grad(loss, argnums, loss_scale=8, axis_name="a")
    step = over_shards(fun, mesh_of(devices, 8), jax.P(), jax.P(), check_vma=check_vma)
    args = jnp.arange(2.0), jnp.ones(2)
    assert_bitwise_equal(step(*args), jax.grad(loss, argnums)(*args))


@pytest.mark.parametrize("check_vma", [True, False])
def test_law_15_one_shards_inf_is_seen_by_all(devices, check_vma):
    def step(ls, w, x):
        _, grads = mpjax.value_and_grad(quadratic, loss_scale=ls, axis_name="a")(w, x)
        finite = mpjax.all_finite(grads)
        return ls.adjust(finite), mpjax.select_tree(finite, grads, jnp.zeros_like(grads))

    specs = jax.P(), jax.P(), jax.P("a")
    sharded = over_shards(step, mesh_of(devices, 8), *specs, check_vma=check_vma)
    ls = mpjax.DynamicLossScale(8, growth_interval=1)
    ls, grads = sharded(ls, jnp.float32(1), jnp.ones(8).at[5].set(jnp.inf))
    assert (float(ls.loss_scale), float(grads)) == (4, 0)
    ls, grads = sharded(ls, jnp.float32(1), jnp.ones(8))
    assert (float(ls.loss_scale), float(grads)) == (8, 2)


def test_law_15_float16_values_are_averaged_in_float32():
    # The sum of eight times 60000 is past 65504.
    fun = mpjax.value_and_grad(lambda w: w, loss_scale=1, axis_name="i")
    value, _ = jax.vmap(fun, axis_name="i")(jnp.full(8, 60000, jnp.float16))
    assert value.tolist() == [60000] * 8


def test_law_15_plain_jit_with_shardings(devices):
    mesh = mesh_of(devices, 8)
    x = jax.device_put(jnp.arange(16.0), jax.NamedSharding(mesh, jax.P("a")))
    w = jax.device_put(jnp.float32(2), jax.NamedSharding(mesh, jax.P()))
    value, grads = jax.jit(mpjax.value_and_grad(quadratic, loss_scale=STATIC))(w, x)
    assert (float(value), float(grads)) == (310.0, 310.0)


# -- get_loss_scale --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "scaled"),
    [
        ("16-mixed", True),
        ("half", True),  # float16 on a CPU
        ("bf16-mixed", False),
        ("p=f16,c=f32,o=f16", False),
        (mpjax.PolicyMap("bf16-mixed", {"a": "16-mixed"}), True),
        (mpjax.PolicyMap("bf16-mixed", {"a": "float32"}), False),
        (None, False),
    ],
    ids=str,
)
def test_get_loss_scale_is_dynamic_for_float16_compute(policy, scaled):
    got = mpjax.get_loss_scale(policy)
    assert type(got) is (mpjax.DynamicLossScale if scaled else mpjax.NoOpLossScale)


def test_get_loss_scale_reads_the_default():
    with mpjax.default_policy("16-mixed"):
        assert isinstance(mpjax.get_loss_scale(), mpjax.DynamicLossScale)


@pytest.mark.parametrize("make", [float, np.float32, jnp.float32, jnp.asarray])
def test_any_scalar_is_a_static_scale(make):
    args = jnp.float32(3), jnp.ones(4)
    assert float(as_owned(make(8.0)).scale(jnp.float32(6))) == 48
    assert float(mpjax.grad(quadratic, loss_scale=make(8.0))(*args)) == 6
    traced = jax.jit(lambda s: mpjax.grad(quadratic, loss_scale=s)(*args))
    assert float(traced(make(8.0))) == 6
