"""The table of operations: complete, in one place each, and open to the user's overrides."""

import functools
import importlib.util
import json
import pathlib
import subprocess
import sys

import pytest

from mpjax._autocast.known import traits
from mpjax._jaxpr import op_rules

_EXTENSIONS = ("flax", "equinox", "optax", "lineax", "optimistix", "diffrax")  # where installed
_PACKAGES = [p for p in ("jax", *_EXTENSIONS) if importlib.util.find_spec(p)]


@functools.cache
def every_primitive():
    """The names of all that JAX, and those who extend it, can bind; in a process of its own."""
    script = pathlib.Path(__file__).with_name("_all_primitives.py")
    command = [sys.executable, str(script), *_PACKAGES]
    return json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)


def unknown(rules=op_rules.OP_RULES):
    known = (
        rules.keys()
        | op_rules.COMPARISONS
        | op_rules.STRUCTURE
        | op_rules.AS_TRACED
        | op_rules.IN_KERNELS
    )
    return sorted(name for name in every_primitive() if name not in known)


def test_every_primitive_that_can_be_bound_has_a_rule_or_is_unknown_on_purpose():
    assert {"dot_general", "pallas_call", "bcoo_dot_general"} <= set(every_primitive())
    assert unknown() == [], "give each a row in _jaxpr/op_rules.py: a rule, or a place without one"


def test_the_completeness_test_sees_a_missing_row():
    assert unknown(
        {name: op_rules.OP_RULES[name] for name in op_rules.OP_RULES if name != "tanh"}
    ) == ["tanh"]


def test_no_primitive_stands_in_two_places():
    places = [
        op_rules.OP_RULES.keys(),
        op_rules.COMPARISONS,
        op_rules.STRUCTURE,
        op_rules.AS_TRACED,
        op_rules.IN_KERNELS,
    ]
    names = [name for place in places for name in place]
    assert len(names) == len(set(names))


def test_every_trait_is_of_operations_with_a_rule_that_stand_in_one_row_each():
    names = [name for names, _ in traits._ROWS for name in names]
    assert len(names) == len(set(names))
    assert [
        n
        for n in names
        if n not in op_rules.OP_RULES.keys() | op_rules.COMPARISONS | op_rules.AS_TRACED
    ] == []


def test_every_word_of_the_table_is_a_trait_that_is_asked_for():
    words = {word for _, words in traits._ROWS for word in words}
    folder = pathlib.Path(traits.__file__).parents[1]
    asked = "".join(p.read_text() for p in folder.rglob("*.py") if p.name != "traits.py")
    assert [w for w in sorted(words) if f"traits.{w.upper()}" not in asked] == []
    constants = {name: found for name, found in vars(traits).items() if name.isupper()}
    assert {name for name in constants if not name.startswith("_")} == {w.upper() for w in words}


@pytest.mark.parametrize("rule", op_rules.OP_RULES.values(), ids=lambda rule: rule.primitive)
def test_every_row_has_a_reason_and_a_known_torch_list(rule):
    assert rule.reason
    assert rule.torch in ("", "lower", "fp32", "promote")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dot_general", op_rules.OpClass.LOWER),
        ("conv_general_dilated", op_rules.OpClass.LOWER),
        ("exp", op_rules.OpClass.FULL),
        ("reduce_sum", op_rules.OpClass.FULL),
        ("cholesky", op_rules.OpClass.FULL),
        ("add", op_rules.OpClass.FOLLOW),
        ("tanh", op_rules.OpClass.FOLLOW),
        ("reshape", op_rules.OpClass.KEEP),
        ("reduce_max", op_rules.OpClass.KEEP),
    ],
)
def test_classes_of_the_common_operations(name, expected):
    assert op_rules.op_class(name, {}) is expected
    assert op_rules.op_class(name, {name: op_rules.OpClass.FULL}) is op_rules.OpClass.FULL
