"""Every law of the design has a test named after it."""

import ast
import re

import pytest
from _places import ROOT

DESIGN = (ROOT / "docs" / "design.md").read_text()
LAWS = [int(number) for number in re.findall(r"^(\d+)\. ", DESIGN, re.MULTILINE)]


def function_names():
    trees = (ast.parse(path.read_text()) for path in (ROOT / "tests").rglob("test_*.py"))
    return [
        node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)
    ]


NAMES = function_names()


def test_the_laws_are_numbered_without_a_gap():
    assert list(range(1, 18)) == LAWS


@pytest.mark.parametrize("law", LAWS)
def test_law_has_a_test_of_its_name(law):
    assert any(name.startswith(f"test_law_{law:02d}_") for name in NAMES)
