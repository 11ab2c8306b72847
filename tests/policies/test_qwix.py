"""qwix beside 8-bit products: the same where it is right, and what it gets wrong as cases."""

import importlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _samples import normal

import mpjax
from mpjax._autocast import product
from mpjax._policies.qwix_rules import fields

POLICIES = mpjax.PolicyMap(
    "int8_from_mixed_bfloat16",
    {
        "decoder/norm*": "bf16-mixed",
        "re:head": "float8_from_mixed_bfloat16",
        "*/mlp/kernel": mpjax.QuantizedPolicy(recipe=mpjax.MXFP8BlockScaling()),
    },
)
HYBRID = mpjax.get_policy("float8_from_mixed_bfloat16")


def test_fields_say_dtypes_scales_and_gradients():
    assert fields(mpjax.get_policy("bf16-mixed")) == {}
    assert fields(mpjax.get_policy("int8_from_float32")) == {
        "weight_qtype": "int8",
        "act_qtype": "int8",  # wgrad stays 16-bit, and qwix has one dtype for both gradients
    }
    assert fields(HYBRID) == {
        "weight_qtype": "float8_e4m3fn",
        "act_qtype": "float8_e4m3fn",
        "bwd_qtype": "float8_e5m2",
        "disable_channelwise_axes": True,
    }
    blocks = fields(mpjax.QuantizedPolicy(recipe=mpjax.MXFP8BlockScaling()))
    assert (blocks["tile_size"], blocks["bwd_qtype"]) == (32, "float8_e4m3fn")
    margin = fields(mpjax.QuantizedPolicy(recipe=mpjax.Float8CurrentScaling(margin=1)))
    assert margin["act_calibration_method"] == "absmax,2"


def test_without_qwix_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "qwix", None)
    with pytest.raises(ImportError, match="Type pip install qwix"):
        POLICIES.to_qwix_rules()


@pytest.fixture(scope="module")
def qwix():
    return importlib.import_module("qwix")  # it imports much, which few tests here need


def test_rules_match_the_modules_that_the_map_matches(qwix):
    import re

    rules = POLICIES.to_qwix_rules()
    assert all(isinstance(rule, qwix.QtRule) for rule in rules)
    paths = ("decoder/norm_0", "head", "decoder/head", "decoder/mlp", "mlp", "decoder/attn/query")
    for path in paths:
        chosen = next(rule for rule in rules if re.fullmatch(rule.module_path, path))
        mine = fields(POLICIES.policy_for(f"{path}/kernel" if path.endswith("mlp") else path))
        assert chosen.weight_qtype == mine.get("weight_qtype"), path


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_dtypes_values_and_scales_are_those_of_qwix(qwix, dtype):
    for axes, channelwise in (((0,), (1,)), ((0, 1), ())):
        x = normal(3, 64, 32)
        ours = product.scaled.quantize(x, jnp.dtype(dtype), axes)
        theirs = qwix.quantize(x, dtype, channelwise_axes=channelwise)
        assert ours.values.dtype == theirs.qvalue.dtype
        np.testing.assert_allclose(ours.scale, theirs.scale, rtol=0.005)  # theirs: 127.5 for int8
        plain = ours.values.astype(jnp.float32) * ours.scale
        bound = {"int8": 0.012, "float8_e4m3fn": 0.03, "float8_e5m2": 0.06}[dtype]
        assert jnp.linalg.norm(plain - qwix.dequantize(theirs)) < bound * jnp.linalg.norm(x)


def multiply(recipe, x, w):
    roles = (product.ArrayRole.INPUT, product.ArrayRole.WEIGHT, product.ArrayRole.RESULT)
    how = product.quantized(recipe, jnp.dtype("bfloat16"), roles)
    params = {
        "dimension_numbers": (((1,), (0,)), ((), ())),
        "precision": None,
        "preferred_element_type": None,
        "out_sharding": None,
    }
    low = x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x
    out = jnp.dtype("float32")
    return product.product("dot_general", params, (x, low), (w, w), [], how=how, out_dtype=out)


INT8 = mpjax.Int8CurrentScaling()


def test_small_float16_values_keep_their_scale_where_theirs_is_one(qwix):
    """Their threshold for an empty channel is that of float16's square root: all becomes zero."""
    x = (normal(0, 64, 64) * 1e-3).astype(jnp.float16)
    theirs = qwix.dequantize(qwix.quantize(x, "int8", channelwise_axes=(0,)))
    ours = product.scaled.quantize(x, jnp.dtype("int8"), (1,))
    plain = ours.values.astype(jnp.float32) * ours.scale
    exact = x.astype(jnp.float32)
    assert jnp.linalg.norm(plain - exact) < 0.01 * jnp.linalg.norm(exact)
    assert jnp.linalg.norm(theirs.astype(jnp.float32) - exact) > 0.5 * jnp.linalg.norm(exact)


def test_scales_are_float32_where_theirs_have_the_dtype_of_the_array(qwix):
    x = normal(0, 64, 64).astype(jnp.bfloat16)
    assert product.scaled.quantize(x, jnp.dtype("int8"), (1,)).scale.dtype == jnp.float32
    assert qwix.quantize(x, "int8", channelwise_axes=(0,)).scale.dtype == jnp.bfloat16


@pytest.mark.standard_promotion("qwix multiplies int32 sums with float32 scales")
def test_nan_in_int8_is_seen_where_theirs_is_finite(qwix):
    """Loss scaling would not see that a step overflowed."""
    x, w = normal(0, 64, 4096).at[3, 5].set(jnp.nan), normal(1, 4096, 64)
    assert not jnp.isfinite(multiply(INT8, x, w)[3]).any()
    quantized = (qwix.quantize(a, "int8", channelwise_axes=(i,)) for i, a in enumerate((x, w)))
    theirs = qwix.dot_general(*quantized, (((1,), (0,)), ((), ())))
    assert jnp.isfinite(theirs[3]).any()


def test_forward_mode_works():
    x, w = normal(0, 64, 64), normal(1, 64, 64)
    out, tangent = jax.jvp(lambda w: multiply(INT8, x, w), (w,), (w,))
    assert jnp.linalg.norm(out - tangent) < 0.02 * jnp.linalg.norm(out)
