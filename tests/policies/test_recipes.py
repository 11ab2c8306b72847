"""Recipes and quantised policies: names, values, what is refused and what is said then."""

import pickle
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import mpjax
from mpjax._policies.recipes import RECIPES, get_recipe

NAMES = [
    ("int8_from_mixed_bfloat16", "bf16-mixed", mpjax.Int8CurrentScaling()),
    ("int8_from_float32", "float32", mpjax.Int8CurrentScaling()),
    ("float8_from_mixed_bfloat16", "bf16-mixed", mpjax.Float8CurrentScaling()),
    ("float8_from_bfloat16", "bfloat16", mpjax.Float8CurrentScaling()),
    ("float8_from_mixed_float16", "16-mixed", mpjax.Float8CurrentScaling()),
    ("float8_from_bf16-mixed", "bf16-mixed", mpjax.Float8CurrentScaling()),
    ("p=f32,c=bf16,o=f32,q=MXFP8BlockScaling", "bf16-mixed", mpjax.MXFP8BlockScaling()),
    ("q=int8", "bf16-mixed", mpjax.Int8CurrentScaling()),
    ("Float8_From_Mixed_BFloat16", "bf16-mixed", mpjax.Float8CurrentScaling()),
]
VARIED = [
    mpjax.Float8CurrentScaling(),
    mpjax.Float8CurrentScaling(wgrad=None),
    mpjax.Float8CurrentScaling(granularity="channel", margin=1, dgrad="e4m3"),
    mpjax.Int8CurrentScaling(wgrad="int8", dgrad=None),
    mpjax.Float8BlockScaling(),
    mpjax.MXFP8BlockScaling(dgrad=None),
]


@pytest.mark.parametrize(("name", "base", "recipe"), NAMES)
def test_name_means_a_base_and_a_recipe(name, base, recipe):
    policy = mpjax.get_policy(name)
    assert policy == mpjax.QuantizedPolicy(base, recipe)
    assert policy.base == mpjax.get_policy(base)
    assert policy.recipe == recipe


@pytest.mark.parametrize("recipe", VARIED, ids=str)
@pytest.mark.parametrize("base", ["bf16-mixed", "float32", "half"])
def test_printed_policy_is_read_back_as_an_equal_one(base, recipe):
    policy = mpjax.QuantizedPolicy(base, recipe)
    copies = [
        mpjax.get_policy(str(policy)),
        mpjax.QuantizedPolicy.from_dict(policy.to_dict()),
        mpjax.get_policy(policy.to_dict()),
        pickle.loads(pickle.dumps(policy)),
        eval(repr(policy), {**vars(mpjax)}),  # the expression that makes it
    ]
    for copy in copies:
        assert copy == policy
        assert hash(copy) == hash(policy)


def test_policy_is_not_its_base_nor_that_of_another_recipe():
    policies = [mpjax.QuantizedPolicy("bf16-mixed", recipe) for recipe in VARIED]
    policies.append(mpjax.get_policy("bf16-mixed"))
    assert len(set(policies)) == len(policies)
    for i, one in enumerate(policies):
        assert [one == other for other in policies].index(True) == i


def test_casts_are_those_of_the_base():
    policy = mpjax.get_policy("float8_from_mixed_bfloat16")
    assert policy.cast_to_compute({"w": jnp.ones(2)})["w"].dtype == jnp.bfloat16
    assert policy.cast_to_param({"w": jnp.ones(2)})["w"].dtype == jnp.float32
    assert policy.with_output_dtype("bf16") == mpjax.QuantizedPolicy("p=f32,c=bf16,o=bf16")


def test_policy_is_static_under_jit():
    policy = mpjax.get_policy("int8_from_mixed_bfloat16")
    assert jax.tree.leaves(policy) == []
    assert jax.jit(lambda p, x: p.cast_to_compute(x))(policy, jnp.ones(2)).dtype == jnp.bfloat16


def test_keras_configs_are_read():
    config = {"mode": "float8", "source_name": "mixed_bfloat16", "amax_history_length": 1024}
    for spec in (config, {"class_name": "QuantizedFloat8DTypePolicy", "config": config}):
        assert mpjax.get_policy(spec) == mpjax.get_policy("float8_from_mixed_bfloat16")


@pytest.mark.parametrize("length", [1, 512, 1024])
def test_a_history_that_was_chosen_in_keras_is_kept(length):
    name = "float8_from_mixed_bfloat16"
    made = SimpleNamespace(name=name, variable_dtype="float32", amax_history_length=length)
    config = {"mode": "float8", "source_name": "mixed_bfloat16", "amax_history_length": length}
    delayed = mpjax.QuantizedPolicy("bf16-mixed", mpjax.DelayedScaling(amax_history_len=length))
    want = mpjax.get_policy(name) if length == 1024 else delayed  # 1024 is Keras's default
    for spec in (made, config, {"class_name": "QuantizedFloat8DTypePolicy", "config": config}):
        assert mpjax.get_policy(spec) == want


def test_recipe_names_its_dtypes():
    assert mpjax.Float8CurrentScaling().dtypes == ("float8_e4m3fn", "float8_e5m2")
    assert mpjax.Int8CurrentScaling().dtypes == ("int8",)
    assert mpjax.Int8CurrentScaling().products == {
        "fprop": ("int8", "int8"),
        "dgrad": ("int8", "int8"),
        "wgrad": None,
    }


def test_full_and_scalar_names_of_dtypes_are_understood():
    expected = mpjax.Float8CurrentScaling(fprop="e4m3", dgrad=("e5m2", "e4m3"))
    assert mpjax.Float8CurrentScaling(fprop=jnp.float8_e4m3fn) == expected
    assert mpjax.Float8CurrentScaling(dgrad=["float8_e5m2", "float8_e4m3fn"]) == expected
    assert all(get_recipe(kind) == kind() == get_recipe(name) for name, kind in RECIPES.items())


def test_support_is_judged_by_the_dtypes_of_each_product():
    report = mpjax.check_support("float8_from_mixed_bfloat16", "h100")
    assert report.ok
    found = {f.dtype: f.roles for f in report.findings if f.dtype.startswith("float8")}
    assert found == {
        "float8_e4m3fn": ("fprop", "dgrad", "wgrad"),
        "float8_e5m2": ("dgrad", "wgrad"),
    }
    with pytest.warns(mpjax.SupportWarning, match="Type 'int8_from_mixed_bfloat16', or 'bf16"):
        mpjax.check_support("float8_from_mixed_bfloat16", "a100")
    policies = mpjax.PolicyMap("bf16-mixed", {"mlp*": "float8_from_mixed_bfloat16"})
    with pytest.warns(mpjax.SupportWarning, match=r"'mlp\*': fprop, dgrad, wgrad float8_e4m3fn"):
        mpjax.check_support(policies, "a100")
    assert mpjax.check_support("int8_from_mixed_bfloat16", "h100").status == "native"


def test_blocks_are_slow_where_no_unit_takes_their_scales():
    """An H100 takes float8, and XLA multiplies what has a scale for each block in 16 bits there."""
    blocks = {name: mpjax.get_policy(f"q={name}") for name in ("MXFP8BlockScaling", "float8")}
    with pytest.warns(mpjax.SupportWarning, match="each block(.|\n)*'float8_from_mixed_bfloat16'"):
        assert not mpjax.check_support(blocks["MXFP8BlockScaling"], "h100").ok
    assert mpjax.check_support(blocks["float8"], "h100").ok
    assert mpjax.check_support(blocks["MXFP8BlockScaling"], "sm_100").status == "native"
    with pytest.warns(mpjax.SupportWarning, match="no unit takes a scale for each block"):
        mpjax.check_support("q=Float8BlockScaling", "sm_100")
    assert mpjax.check_support(blocks["MXFP8BlockScaling"], "sm_120").status == "unknown"
