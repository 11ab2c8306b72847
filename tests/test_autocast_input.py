"""What autocast is given: leaves that are no arrays, and bad input, with what its message says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax import PolicyMap, PolicyWarning, autocast, explain, full_precision

X = jax.random.normal(jax.random.key(0), (3, 3))


def square(x):
    return x @ x


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
    assert fast(X, True, **given).dtype == jnp.float32
    grad = jax.grad(lambda x: fast(x, True, **given).sum())(X)
    assert grad.dtype == jnp.float32


def test_numpy_arrays_are_arrays():
    """NumPy would multiply them itself, in float32 or float64."""
    x = np.asarray(X)
    want = autocast(square, "bf16-mixed")(X)
    for given in (x, x.astype(np.float64)):
        assert jnp.array_equal(autocast(square, "bf16-mixed")(given), want)


def test_none_and_empty_results():
    for result in (None, (), {}, {"a": None}):
        fast = autocast(lambda x, r=result: (x @ x, r), "bf16-mixed")
        assert fast(X)[1] == result


# -- results -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("result", "where", "kind"),
    [
        ("text", r"result\['a'\]\[0\]", "str"),
        (jnp.tanh, r"result\['a'\]\[0\]", r"\w+"),
        (object(), r"result\['a'\]\[0\]", "object"),
    ],
)
def test_a_result_that_is_no_array_is_named_with_its_path(result, where, kind):
    def fun(x):
        return {"a": [result], "b": x @ x}

    with pytest.raises(TypeError, match=rf"autocast\(fun\): {where} is not an array; got {kind}"):
        autocast(fun, "bf16-mixed")(X)


# -- policies ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("int8", "type 'int8_from_mixed_bfloat16'"),
        ("p=f32,c=int8,o=f32", "type 'int8_from_mixed_bfloat16'"),
        ("float8_e4m3fn", "type 'float8_from_mixed_bfloat16'"),
        ("p=f32,c=float8_e5m2,o=f32", "type 'float8_from_mixed_bfloat16'"),
    ],
)
def test_eight_bits_need_another_function(name, instead):
    with pytest.raises(TypeError, match=rf"(?s)no dtype to compute in.*{instead}"):
        autocast(square, name)
    with pytest.raises(TypeError, match=rf"(?s)no dtype to compute in.*{instead}"):
        autocast(name)


def test_a_policy_is_checked_before_anything_is_called():
    with pytest.raises(ValueError, match=r"(?s)unknown policy 'bf16_mxied'.*'bf16-mixed'"):
        autocast(square, "bf16_mxied")
    with pytest.raises(ValueError, match="two things"):
        autocast("bf16")
    with pytest.raises(ValueError, match="unknown policy '3'"):
        autocast(3)


def test_arguments_the_wrong_way_round():
    with pytest.raises(TypeError, match=r"Type autocast\(fun, 'bf16-mixed'\)"):
        autocast("bf16-mixed", square)
    with pytest.raises(TypeError, match="got 3 where a function is decorated"):
        autocast("bf16-mixed")(3)


def test_the_default_policy_is_read_when_the_function_is_traced():
    fast = autocast(square)
    assert jnp.array_equal(fast(X), square(X))
    with mpjax.default_policy("bf16-mixed"):
        assert not jnp.array_equal(fast(X), square(X))


def test_a_rule_that_matches_no_module_path():
    def fun(x):
        with jax.named_scope("encoder"):
            return x @ x

    policies = PolicyMap("bf16-mixed", {"Encoder": "float32"})
    with pytest.warns(PolicyWarning, match=r"(?s)'Encoder'.*Nearest: 'encoder'"):
        autocast(fun, policies)(X)


def test_a_policy_map_for_a_function_without_modules():
    policies = PolicyMap("bf16-mixed", {"encoder": "float32"})
    with pytest.warns(PolicyWarning, match=r"(?s)names no modules.*jax\.named_scope"):
        autocast(square, policies)(X)
    autocast(square, PolicyMap("bf16-mixed", {}))(X)  # nothing to match, nothing to say


# -- rules and algorithms ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "error", "says"),
    [
        ({"tahn": "full"}, ValueError, r"(?s)unknown primitive 'tahn'.*Nearest: .*'tanh'"),
        ({"gellu": "full"}, ValueError, r"(?s)unknown primitive 'gellu'.*Nearest: .*'gelu'"),
        ({"tanh": "ful"}, ValueError, r"unknown class 'ful' for 'tanh'"),
        ({"tanh": ["full"]}, ValueError, r"unknown class \['full'\] for 'tanh'"),
        ({"tanh": "lower"}, ValueError, r"(?s)cannot be 'lower'.*'dot_general'"),
        ({"gelu": "lower"}, ValueError, r"(?s)'gelu' cannot be 'lower'.*\"follow\""),
        ({"my_layer": "full"}, ValueError, r"(?s)unknown.*'my_layer'.*full_precision\(\):` in it"),
        ({"scan": "full"}, ValueError, r"(?s)'scan' holds a program.*inside it"),
        ({"random_bits": "full"}, ValueError, r"(?s)'random_bits' has no class.*traced with"),
        ({jnp.tanh: "full"}, ValueError, r'(?s)got .*tanh.* as a name.*rules={"tanh": "full"}'),
        ("wide", ValueError, r"(?s)unknown set of rules 'wide'.*'widest'"),
        (["tanh"], TypeError, r"(?s)got \['tanh'\].*a dict"),
    ],
)
def test_bad_rules_are_refused_at_once(rules, error, says):
    for call in (
        lambda: autocast(square, "bf16-mixed", rules=rules),
        lambda: autocast(rules=rules),
    ):
        with pytest.raises(error, match=says):
            call()
    with pytest.raises(error, match=says):
        explain(square, "bf16-mixed", rules=rules)


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
            call(X)


def test_bad_algorithms_are_refused():
    for spec in ("tf31", 3, ["tf32"]):
        with pytest.raises(ValueError, match=r"(?s)unknown algorithm.*'tf32'"):
            autocast(square, "float32", dot_precision=spec)
    with pytest.raises(ValueError, match=r"(?s)TF32_TF32_F32 reads float32.*\"float32\""):
        autocast(square, "bf16-mixed", dot_precision="tf32")(X)


# -- regions -----------------------------------------------------------------------------------


def test_full_precision_without_parentheses():
    with pytest.raises(TypeError, match=r"Type @full_precision\(\) with parentheses"):
        full_precision(square)


def test_full_precision_outside_any_trace_changes_nothing():
    with full_precision():
        eager = square(X)
        inside = autocast(square, "bf16-mixed")(X)  # the inner policy decides
    assert jnp.array_equal(eager, square(X))
    assert jnp.array_equal(inside, autocast(square, "bf16-mixed")(X))
    assert jnp.array_equal(full_precision()(square)(X), square(X))
