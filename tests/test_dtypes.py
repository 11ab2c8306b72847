"""Any spelling of a dtype becomes one dtype, or an error that says what to type."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax import half_dtype
from mpjax._base.dtypes import (
    canonical_dtype,
    describe,
    normal_powers_of_two,
    require_x64,
    short_name,
)

FLOAT32 = np.dtype("float32")


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("f16", "float16"),
        ("fp16", "float16"),
        ("float16", "float16"),
        ("bf16", "bfloat16"),
        ("bfloat16", "bfloat16"),
        ("f32", "float32"),
        ("fp32", "float32"),
        ("full", "float32"),
        ("single", "float32"),
        ("f64", "float64"),
        ("double", "float64"),
        (jnp.float16, "float16"),
        (jnp.bfloat16, "bfloat16"),
        (np.float32, "float32"),
        (np.dtype("float64"), "float64"),
        (np.dtype(">f4"), "float32"),
        (float, "float64"),
    ],
)
def test_every_spelling_gives_one_dtype(spec, name):
    got = canonical_dtype(spec, "here")
    assert got == jnp.dtype(name)
    assert hash(got) == hash(jnp.dtype(name))


def test_half_is_the_dtype_of_the_backend():
    assert canonical_dtype("half", "here") == half_dtype() == jnp.float16


@pytest.mark.parametrize(
    "spec", ["float31", "f4", "e", "O4", "float", "f4,f4", "", None, 3, b"f32", object(), True]
)
def test_what_names_no_dtype_is_an_error(spec):
    with pytest.raises(ValueError, match=r"here: unknown dtype .*\n  Accepted: float16, bfloat16"):
        canonical_dtype(spec, "here")


def test_array_is_not_taken_for_its_dtype():
    with pytest.raises(ValueError, match="unknown dtype"):
        canonical_dtype(jnp.ones(2), "here")


def test_near_miss_is_suggested():
    with pytest.raises(ValueError, match=r"Did you mean 'bfloat16'\?"):
        canonical_dtype("bfloat_16", "here")


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("int8", "integers and booleans keep their dtype"),
        (jnp.int32, "integers and booleans keep their dtype"),
        (bool, "integers and booleans keep their dtype"),
        ("complex64", "complex values keep their dtype"),
        (jnp.complex128, "complex values keep their dtype"),
        ("float8_e4m3fn", "need a scale per tensor"),
        (jnp.float8_e5m2, "need a scale per tensor"),
        (jnp.float4_e2m1fn, "need a scale per tensor"),
    ],
)
def test_dtype_that_no_policy_can_have_says_why(spec, reason):
    with pytest.raises(TypeError, match=rf"here: \w+ is no dtype to compute in\.\n.*{reason}"):
        canonical_dtype(spec, "here")


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (jnp.ones((8, 128), jnp.bfloat16), "bf16[8,128]"),
        (np.float32(1), "f32[]"),
        (np.zeros(3, np.int8), "i8[3]"),
        (np.zeros((), np.uint32), "u32[]"),
        (np.zeros(1, bool), "bool[1]"),
        (jnp.zeros(1, jnp.complex64), "c64[1]"),
        (jnp.zeros(1, jnp.float8_e4m3fn), "f8_e4m3fn[1]"),
        (jax.ShapeDtypeStruct((2,), jnp.float16), "f16[2]"),
        (1.5, "float"),
        ("text", "str"),
        (None, "NoneType"),
    ],
)
def test_types_are_described_as_jax_prints_them(x, text):
    assert describe(x) == text


def test_prng_key_is_described():
    assert describe(jax.random.key(0)) == "key<fry>[]"


def test_short_names():
    names = [short_name(d) for d in ("float16", "bfloat16", "float32", "float64", "int4", "uint8")]
    assert names == ["f16", "bf16", "f32", "f64", "i4", "u8"]


def test_float64_needs_64_bit_types():
    with pytest.raises(ValueError, match=r"64-bit types are off.*\n.*\n  Type jax.config.update"):
        require_x64(np.dtype("float64"), "here")
    require_x64(FLOAT32, "here")
    with jax.enable_x64(True):
        require_x64(np.dtype("float64"), "here")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_normal_powers_of_two_are_the_ends_of_the_normal_range(dtype):
    dtype = jnp.dtype(dtype)
    least, largest = normal_powers_of_two(dtype)
    assert largest <= float(jnp.finfo(dtype).max) < 2 * largest
    assert float(jnp.finfo(dtype).smallest_normal) == least
