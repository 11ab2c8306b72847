"""PolicyMap: the first rule that matches a path gives its policy; one that matches none warns."""

import copy
import json
import pickle
import warnings
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import pytest
from _helpers import Traced, count_casts
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import mpjax

F32, MIXED = mpjax.get_policy("float32"), mpjax.get_policy("bf16-mixed")
TREE = {
    "encoder": {
        "norm1": {"scale": jnp.ones(2), "bias": jnp.ones(2)},
        "dense": [{"kernel": jnp.ones(2)}, {"kernel": jnp.ones(2)}],
    },
    "head": {"kernel": jnp.ones(2), "steps": jnp.arange(2)},
}


def dtypes(tree):
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): str(x.dtype)
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    }


@pytest.mark.parametrize(
    ("pattern", "paths", "others"),
    [
        ("encoder/norm*", ["encoder/norm1", "encoder/norm1/scale"], ["encoder/dense", "norm1"]),
        ("*norm*", ["encoder/norm1/scale", "norm", "a/b/norm/c"], ["encoder/dense"]),
        ("encoder", ["encoder", "encoder/norm1/scale"], ["encoder2/x", "my/encoder", ""]),
        ("*/kernel", ["a/kernel", "a/b/kernel", "a/kernel/value", "kernel"], ["a/kernels"]),
        ("dense/0", ["dense/0", "dense/0/kernel"], ["dense/1/kernel", "dense/00"]),
        ("dense/[01]", ["dense/0/kernel", "dense/1"], ["dense/2"]),
        ("layer_?", ["layer_1/w"], ["layer_10/w"]),
        ("*", ["", "a", "a/b"], []),
        ("a.b", ["a.b/c"], ["axb"]),
        ("re:.*/head/.*", ["x/head/w", "head/w", "x/head"], ["x/header/w", "ahead/w"]),
        ("re:encoder/(norm|dense).*", ["encoder/norm1/scale"], ["my/encoder/norm1"]),
        ("re:encoder", ["encoder"], ["encoder/norm1"]),  # the whole path: modules are not covered
        ("Norm", [], ["norm", "encoder/Norm"]),
    ],
)
def test_patterns(pattern, paths, others):
    policies = mpjax.PolicyMap("bf16-mixed", {pattern: "float32"})
    assert [policies.policy_for(path) for path in paths] == [F32] * len(paths)
    assert [policies.policy_for(path) for path in others] == [MIXED] * len(others)


def test_first_match_wins():
    rules = {"encoder/norm1/bias": "float16", "encoder/norm*": "float32", "encoder/*": "bfloat16"}
    policies = mpjax.PolicyMap("bf16-mixed", rules)
    assert str(policies.policy_for("encoder/norm1/bias")) == "p=f16,c=f16,o=f16"
    assert str(policies.policy_for("encoder/norm1/scale")) == "p=f32,c=f32,o=f32"
    assert str(policies.policy_for("encoder/dense/kernel")) == "p=bf16,c=bf16,o=bf16"
    assert policies.policy_for("head") == MIXED
    turned = mpjax.PolicyMap("bf16-mixed", list(rules.items())[::-1])
    assert str(turned.policy_for("encoder/norm1/bias")) == "p=bf16,c=bf16,o=bf16"


def test_casts_by_path():
    policies = mpjax.PolicyMap("bf16-mixed", {"encoder/norm*": "float32", "*dense/1": "16-mixed"})
    assert dtypes(policies.cast_to_compute(TREE)) == {
        "encoder/dense/0/kernel": "bfloat16",
        "encoder/dense/1/kernel": "float16",
        "encoder/norm1/bias": "float32",
        "encoder/norm1/scale": "float32",
        "head/kernel": "bfloat16",
        "head/steps": "int32",
    }
    assert count_casts(policies.cast_to_compute, TREE) == 3
    assert set(dtypes(policies.cast_to_param(TREE)).values()) == {"float32", "int32"}
    outputs = policies.with_output_dtype("float16").cast_to_output(TREE)
    assert set(dtypes(outputs).values()) == {"float16", "int32"}


def test_casts_nnx_by_the_paths_that_users_write():
    module = nnx.Sequential(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.LayerNorm(2, rngs=nnx.Rngs(0)))
    policies = mpjax.PolicyMap("bfloat16", {"re:layers/1/(scale|bias)": "float32"})
    for tree in (nnx.state(module), module):
        got = policies.cast_to_compute(tree)
        assert type(got) is type(tree)
        assert (
            sorted(str(x.dtype) for x in jax.tree.leaves(got)) == ["bfloat16"] * 2 + ["float32"] * 2
        )


# -- rules that match nothing --------------------------------------------------------------------


def test_unmatched_lists_rules_that_match_nothing():
    policies = mpjax.PolicyMap("bf16-mixed", {"encoder": "f32", "Head*": "f32", "re:x": "f32"})
    assert policies.unmatched(TREE) == ["Head*", "re:x"]
    assert mpjax.PolicyMap("bf16-mixed").unmatched(TREE) == []


@pytest.mark.parametrize("method", ["cast_to_param", "cast_to_compute"])
def test_rule_that_matches_nothing_warns_and_names_the_nearest(method):
    policies = mpjax.PolicyMap("bf16-mixed", {"encoder": "f32", "encoder/Norm1/scale": "f32"})
    text = (
        r"PolicyMap: rule 2 of 2, 'encoder/Norm1/scale', matches none of the 6 paths\."
        r"\n  Nearest: 'encoder/norm1/scale'.* \(case matters\)"
    )
    with pytest.warns(mpjax.PolicyWarning, match=text) as caught:
        getattr(policies, method)(TREE)
    assert caught[0].filename == __file__  # the user's line


def test_no_warning_for_a_part_of_the_tree_or_an_empty_one():
    policies = mpjax.PolicyMap("bf16-mixed", {"encoder": "float32"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        policies.cast_to_compute({"head": jnp.ones(2)}, warn=False)
        policies.cast_to_compute({})
        policies.cast_to_output({"logits": jnp.ones(2)})


# -- as Policy: equality, hashing, no retrace ------------------------------------------------------


def same_map(default="bf16-mixed", pattern="norm", policy="float32"):
    return mpjax.PolicyMap(default, {pattern: policy})


def test_equal_maps_hash_equal_and_do_not_retrace():
    ways = [
        same_map(),
        mpjax.PolicyMap(MIXED, [("norm", jnp.float32)]),
        mpjax.PolicyMap("mixed_bfloat16", (("norm", "p=f32,c=full,o=f32"),)),
        pickle.loads(pickle.dumps(same_map())),
        copy.deepcopy(same_map()),
        mpjax.PolicyMap.from_dict(json.loads(json.dumps(same_map().to_dict()))),
        mpjax.get_policy(same_map()),
        eval(repr(same_map()), {"PolicyMap": mpjax.PolicyMap}),
    ]
    assert len(set(ways)) == 1
    traced = Traced(lambda p, x: p.cast_to_compute(x))
    static = Traced(lambda p, x: p.cast_to_compute(x), static_argnums=0)
    for policies in ways:
        for fun in (traced, static):
            assert fun(policies, {"w": jnp.ones(2), "norm": jnp.ones(2)})["w"].dtype == jnp.bfloat16
    assert traced.traces == static.traces == 1


@pytest.mark.parametrize(
    "other",
    [same_map(default="float32"), same_map(pattern="n"), same_map(policy="f16"), MIXED, "x"],
    ids=str,
)
def test_maps_that_differ(other):
    assert same_map() != other


def test_order_of_rules_matters():
    rules = [("a", "f32"), ("b", "f16")]
    assert mpjax.PolicyMap("f32", rules) != mpjax.PolicyMap("f32", rules[::-1])


names = st.lists(st.sampled_from("abc"), min_size=1, max_size=4).map("/".join)


@given(names, names)
def test_rule_covers_itself_and_what_is_below(rule, below):
    policies = mpjax.PolicyMap("bf16-mixed", {rule: "float32"})
    assert policies.policy_for(rule) == policies.policy_for(f"{rule}/{below}") == F32
    assert policies.policy_for(f"x/{rule}") == policies.policy_for(f"{rule}x") == MIXED


def test_default_of_a_map_is_the_scoped_one():
    with mpjax.default_policy("bf16-mixed"):
        policies = mpjax.PolicyMap(rules={"a": "float32"})
    assert policies.default == MIXED
    assert mpjax.PolicyMap().default == F32


# -- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["bf16-mixed", "int8_from_mixed_bfloat16"])
def test_get_policy_reads_what_to_dict_wrote(policy):
    policies = mpjax.PolicyMap("bf16-mixed", {"head*": policy, "re:.*norm.*": "float32"})
    assert mpjax.get_policy(json.loads(json.dumps(policies.to_dict()))) == policies
    single = mpjax.get_policy(policy)
    assert mpjax.get_policy(single.to_dict()) == single


def test_a_map_is_a_mapping_from_pattern_to_policy():
    rules = {"a*": "float32", "re:.*b": "float16"}
    policies = mpjax.PolicyMap("bf16-mixed", rules)
    assert isinstance(policies, Mapping)
    assert list(policies) == list(rules)
    assert len(policies) == 2
    assert policies["a*"] == mpjax.get_policy("float32")
    assert "c" not in policies
    assert mpjax.PolicyMap("bf16-mixed", policies) == policies
    empty = mpjax.PolicyMap("bf16-mixed")
    assert empty and not len(empty)  # noqa: PT018
    with mpjax.default_policy(empty):
        assert mpjax.get_policy() is empty
