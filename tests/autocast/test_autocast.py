"""autocast as its user sees it: types, nesting, overrides, leaves, and what it says to slips."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _differential import equations
from _samples import normal
from jax import lax

import mpjax
from mpjax import Policy, PolicyMap, PolicyWarning, autocast, explain, full_precision

HALVES = ["bf16-mixed", "16-mixed"]
SMALL = normal(0, 3, 3)


def square(x):
    return x @ x


def products(fun, *args):
    """The dtypes of the operands and of the result of each product of a function."""
    found = []
    for eqn in equations(jax.make_jaxpr(fun)(*args).jaxpr):
        if eqn.primitive.name in ("dot_general", "conv_general_dilated"):
            dtypes = [v.aval.dtype.name for v in (*eqn.invars, *eqn.outvars)]
            found.append(tuple(dtypes))
    return found


def mlp(params, x):
    h = jnp.tanh(x @ params["w1"] + params["b1"])
    return h @ params["w2"]


def mlp_params():
    return {"w1": normal(1, 8, 16), "b1": normal(2, 16), "w2": normal(3, 16, 4)}


# -- types -------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", HALVES)
def test_products_read_low_operands_and_give_what_is_stored(policy):
    name = autocast_dtype(policy).__name__
    found = products(autocast(mlp, policy), mlp_params(), normal(1, 4, 8))
    assert found == [(name, name, name), (name, name, "float32")]


@pytest.mark.parametrize("policy", HALVES)
def test_a_product_that_is_stored_low_adds_up_in_float32(policy):
    x, w = jnp.ones((1, 4096)), jnp.concatenate([jnp.full((4095, 8), 0.25), jnp.full((1, 8), 4.0)])
    y = autocast(lambda x, w, v: (x @ w) @ v, policy)(x, w, jnp.eye(8))
    rounded = (4095 * 0.25 + 4.0) * jnp.ones((1, 8))
    assert jnp.array_equal(y, rounded.astype(autocast_dtype(policy)).astype(jnp.float32))


def autocast_dtype(policy):
    return {"bf16-mixed": jnp.bfloat16, "16-mixed": jnp.float16}[policy]


def test_output_types_are_those_of_the_function():
    def fun(x, flag, key, n, *, scale):
        out = {"y": x @ x.T, "n": n + 1, "none": None, "key": key, "const": 3, "f": 2.5}
        return out if flag else (x * scale, jnp.arange(3), x > 0, x.sum())

    def types(fun, flag):  # `flag` decides in Python: it must reach `fun` as it is
        args = normal(1, 4, 4), jax.random.key(3), jnp.int32(5)
        return jax.eval_shape(lambda x, key, n: fun(x, flag, key, n, scale=2.0), *args)

    for flag in (True, False):
        assert types(autocast(fun, "bf16-mixed"), flag) == types(fun, flag)


def test_output_dtype_of_the_policy():
    policy = Policy(jnp.float32, jnp.bfloat16, jnp.bfloat16)
    y, n = autocast(lambda x: (x @ x, jnp.arange(3)), policy)(normal(1, 4, 4))
    assert (y.dtype, n.dtype) == (jnp.bfloat16, jnp.int32)


def test_a_function_without_arguments():
    ones = jnp.ones((2, 2))
    assert autocast(lambda: ones @ ones, "bf16-mixed")().dtype == jnp.float32


def test_as_a_decorator():
    @autocast("bf16-mixed")
    def fun(x):
        """Doc."""
        return x @ x

    assert fun.__name__ == "fun"
    assert fun.__doc__ == "Doc."
    assert products(fun, normal(1, 3, 3)) == [("bfloat16", "bfloat16", "float32")]


# -- what is left alone --------------------------------------------------------------------------


@pytest.mark.parametrize("given", [lax.Precision.HIGHEST, lax.DotAlgorithmPreset.F32_F32_F32])
@pytest.mark.parametrize(
    ("asked", "got"),
    [
        ("tf32", lax.DotAlgorithmPreset.TF32_TF32_F32),
        (lax.Precision.DEFAULT, (lax.Precision.DEFAULT,) * 2),
    ],
)
def test_a_precision_written_at_a_product_outlives_the_one_asked_of_autocast(given, asked, got):
    def fun(x):
        return jnp.dot(x, x, precision=given) @ x  # the second is left at the default

    fast = autocast(fun, "32-true", dot_precision=asked)
    eqns = equations(jax.make_jaxpr(fast)(SMALL).jaxpr)
    first, second = (e for e in eqns if e.primitive.name == "dot_general")
    assert first.params["precision"] in (given, (given, given))
    assert second.params["precision"] == got
    assert second.invars[0].aval.dtype == jnp.float32


# -- gradients ---------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", HALVES)
def test_weight_gradients_use_the_mantissa_of_float32(policy):
    grads = jax.grad(lambda p, x: autocast(mlp, policy)(p, x).sum())(mlp_params(), normal(1, 32, 8))
    dtype = {"bf16-mixed": jnp.bfloat16, "16-mixed": jnp.float16}[policy]
    for name in ("w1", "w2"):
        assert grads[name].dtype == jnp.float32
        rounded = grads[name].astype(dtype).astype(jnp.float32)
        assert float(jnp.mean(rounded == grads[name])) < 0.1


def test_a_bias_gradient_is_summed_in_float32():
    def loss(b, x, w):
        return (x @ w + b).sum()

    n = 70000
    args = (jnp.zeros(2), jnp.ones((n, 1)), jnp.ones((1, 2)))
    grad = jax.grad(autocast(loss, "16-mixed"))(*args)
    np.testing.assert_array_equal(grad, jnp.full(2, float(n)))


# -- overrides ---------------------------------------------------------------------------------


def test_rules_keep_an_operation_full():
    fun = autocast(mlp, "bf16-mixed", rules={"dot_general": "full"})
    args = (mlp_params(), normal(1, 4, 8))
    assert jnp.array_equal(fun(*args), mlp(*args))


# -- leaves ------------------------------------------------------------------------------------


def test_leaves_that_are_no_arrays_reach_the_function_as_they_are():
    def fun(x, flag, *, name, act, sizes, shape, scale):
        assert flag is True
        assert type(scale) is float  # it would lose its weak type as an array
        assert name == "a"
        assert isinstance(sizes, np.ndarray)  # integers of NumPy's may be static
        return act(x.reshape(shape) @ x) if sizes[0] == 3 else None

    fast = autocast(fun, "bf16-mixed")
    given = {"name": "a", "act": jnp.tanh, "sizes": np.array([3]), "shape": (3, 3), "scale": 2.5}
    assert fast(SMALL, True, **given).dtype == jnp.float32
    grad = jax.grad(lambda x: fast(x, True, **given).sum())(SMALL)
    assert grad.dtype == jnp.float32


def test_numpy_arrays_are_arrays():
    """NumPy would multiply them itself, in float32 or float64."""
    x = np.asarray(SMALL)
    want = autocast(square, "bf16-mixed")(SMALL)
    for given in (x, x.astype(np.float64)):
        assert jnp.array_equal(autocast(square, "bf16-mixed")(given), want)


def test_none_and_empty_results():
    for result in (None, (), {}, {"a": None}):
        fast = autocast(lambda x, r=result: (x @ x, r), "bf16-mixed")
        assert fast(SMALL)[1] == result


# -- policies ----------------------------------------------------------------------------------


def test_the_default_policy_is_read_when_the_function_is_traced():
    fast = autocast(square)
    with pytest.warns(PolicyWarning, match="no default is set"):
        assert jnp.array_equal(fast(SMALL), square(SMALL))
    with mpjax.default_policy("bf16-mixed"):
        assert not jnp.array_equal(fast(SMALL), square(SMALL))


def test_a_policy_map_for_a_function_without_modules():
    policies = PolicyMap("bf16-mixed", {"encoder": "float32"})
    with pytest.warns(PolicyWarning, match=r"(?s)names no modules.*jax\.named_scope"):
        autocast(square, policies)(SMALL)
    autocast(square, PolicyMap("bf16-mixed", {}))(SMALL)  # nothing to match, nothing to say


# -- rules and algorithms ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "function", "says"),
    [
        ("gelu", jax.nn.gelu, r"(?s)calls no 'gelu'.*inlines.*full_precision"),
        ("swish", jax.nn.swish, r"(?s)calls no 'swish'.*rules={\"silu\": "),
        ("sigmoid", jax.nn.sigmoid, r"(?s)calls no 'sigmoid'.*rules={\"logistic\": "),
    ],
)
def test_a_rule_for_an_activation_that_is_not_called_warns(name, function, says):
    """JAX inlines some of its activations: the rule would do nothing, and say nothing."""

    def fun(x):
        return function(x @ x) @ x

    for call in (
        autocast(fun, "bf16-mixed", rules={name: "full"}),
        explain(fun, "bf16-mixed", rules={name: "full"}),
    ):
        with pytest.warns(PolicyWarning, match=says):
            call(SMALL)


# -- regions -----------------------------------------------------------------------------------


def test_full_precision_outside_any_trace_changes_nothing():
    with full_precision():
        eager = square(SMALL)
        inside = autocast(square, "bf16-mixed")(SMALL)  # the inner policy decides
    assert jnp.array_equal(eager, square(SMALL))
    assert jnp.array_equal(inside, autocast(square, "bf16-mixed")(SMALL))
    assert jnp.array_equal(full_precision()(square)(SMALL), square(SMALL))
