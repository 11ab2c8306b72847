"""What autocast is given: leaves that are no arrays, and bad input, with what its message says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _samples import normal

import mpjax
from mpjax import PolicyMap, PolicyWarning, autocast, explain, full_precision

X = normal(0, 3, 3)


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


# -- policies ----------------------------------------------------------------------------------


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


# -- regions -----------------------------------------------------------------------------------


def test_full_precision_outside_any_trace_changes_nothing():
    with full_precision():
        eager = square(X)
        inside = autocast(square, "bf16-mixed")(X)  # the inner policy decides
    assert jnp.array_equal(eager, square(X))
    assert jnp.array_equal(inside, autocast(square, "bf16-mixed")(X))
    assert jnp.array_equal(full_precision()(square)(X), square(X))
