"""Each assertion passes what it should, and fails with words that say where."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax import testing


def test_dtypes_are_those_of_the_policy():
    tree = {"w": jnp.ones(2), "n": jnp.arange(2), "b": jnp.ones(2, jnp.bfloat16)}
    with pytest.raises(AssertionError, match=r"1 leaves(.|\n)*'b' is bf16\[2\], and not f32"):
        testing.assert_dtypes(tree, "bf16-mixed")
    testing.assert_dtypes(tree, mpjax.PolicyMap("float32", {"b": "bfloat16"}))
    testing.assert_dtypes({"b": tree["b"]}, "bf16-mixed", role="compute")


@pytest.mark.parametrize(
    ("a", "b"), [(0.0, -0.0), (1.0, np.nextafter(np.float32(1), 2)), (np.nan, 1.0)]
)
def test_bits_that_differ_are_told(a, b):
    tree = {"x": [jnp.float32([1, a]), jax.random.key(0)]}
    testing.assert_bitwise_equal(tree, tree)
    with pytest.raises(AssertionError, match=r"'x/0', f32\[2\]: 1 of 2 elements differ"):
        testing.assert_bitwise_equal(tree, {"x": [jnp.float32([1, b]), jax.random.key(0)]})
    with pytest.raises(AssertionError):
        testing.assert_bitwise_equal(tree, {"x": [tree["x"][0]]})


def test_equal_bits_of_another_shape_or_dtype_are_told():
    with pytest.raises(AssertionError, match=r"'' is f32\[4\], and not f32\[2,2\]"):
        testing.assert_bitwise_equal(jnp.ones(4), jnp.ones((2, 2)))
    with pytest.raises(AssertionError, match=r"'' is f32\[1\], and not i32\[1\]"):
        testing.assert_bitwise_equal(jnp.zeros(1), jnp.zeros(1, jnp.int32))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e5m2"])
def test_one_rounding_is_one(dtype):
    rng = np.random.default_rng(0)
    x = (rng.normal(size=4000) * 10.0 ** rng.uniform(-9, 3, 4000)).astype(np.float32)
    testing.assert_within_rounding(x.astype(jnp.dtype(dtype)), x, dtype)
    with pytest.raises(AssertionError, match="roundings apart"):
        testing.assert_within_rounding(x.astype(jnp.dtype(dtype)), x, dtype, roundings=0.9)


def test_roundings_are_counted_and_placed():
    one = np.float32([1, 1])
    with pytest.raises(AssertionError, match=r"'' at \(1,\): 1.0156\d* and 1, 3.9\d* roundings"):
        testing.assert_within_rounding(one + np.float32([0, 2**-6]), one, "bfloat16", roundings=3)
    testing.assert_within_rounding(one + np.float32([0, 2**-6]), one, "bfloat16", roundings=4)
    testing.assert_within_rounding(np.float32([np.nan, np.inf]), np.float32([np.nan, np.inf]), "f2")
    with pytest.raises(AssertionError, match="inf roundings"):
        testing.assert_within_rounding(np.float32(np.nan), np.float32(1), "float16")


@pytest.mark.standard_promotion("promotion is what is looked for")
def test_promotions_fail_with_their_table():
    x = jnp.ones(3, jnp.bfloat16)
    testing.assert_no_promotions(lambda x: x * 2, x)
    with pytest.raises(AssertionError, match=r"test_testing.py:\d+ +multiply +bf16 +f32"):
        testing.assert_no_promotions(lambda x: x * np.float32(2), x)


def loss(w, x):
    return jnp.sum(jnp.tanh(x @ w) ** 2)


def test_products_are_read_in_gradients_too():
    w, x = jnp.ones((4, 4)), jnp.ones((2, 4))
    fast = jax.grad(mpjax.autocast(loss, "bf16-mixed"))
    testing.assert_products(fast, w, x, dtype="bfloat16", least=2)
    with pytest.raises(AssertionError, match=r"2 of 2 products(.|\n)*general reads f32 and f32"):
        testing.assert_products(jax.grad(loss), w, x, dtype="bfloat16")
    with pytest.raises(AssertionError, match="0 products, and at least 1 were expected"):
        testing.assert_products(lambda x: x + 1, x, dtype="bfloat16")


def test_dtypes_are_named_as_in_policies_and_as_in_jax():
    w, x = jnp.ones((4, 4)), jnp.ones((2, 4))
    fast = mpjax.autocast(loss, "bf16-mixed")
    for name in ("bf16", "bfloat16", jnp.bfloat16):
        testing.assert_products(fast, w, x, dtype=name)
        testing.assert_within_rounding(jnp.ones(2, jnp.bfloat16), jnp.ones(2), name)


def test_a_second_compilation_fails():
    with testing.assert_one_compilation(loss) as fun:
        fun(fun(jnp.ones((4, 4)), jnp.ones((2, 4))) * jnp.ones((4, 4)), jnp.ones((2, 4)))

    def twice():
        with testing.assert_one_compilation(lambda x: x + 1) as fun:
            fun(jnp.ones(3))
            fun(jnp.ones(3, jnp.bfloat16))

    with pytest.raises(AssertionError, match=r"traced 2 times(.|\n)*f32\[3\](.|\n)*bf16\[3\]"):
        twice()
