"""What a person may get wrong, a row each: what was got, what is allowed, what to type.

No row compiles more than a small array: what is wrong is said where it is given, or while a step
is traced.
"""

import importlib
import inspect

import _wrong_keras
import _wrong_numerics
import _wrong_optim
import _wrong_policies
import _wrong_scales
import _wrong_steps
import pytest

import mpjax

pytestmark = pytest.mark.no_leak_check("pytest.raises keeps the frame that holds the tracer")

ROWS = {}
TABLES = (_wrong_policies, _wrong_keras, _wrong_scales, _wrong_steps, _wrong_optim, _wrong_numerics)
for rows in TABLES:
    ROWS |= rows.ROWS
TABLE = {f"{area} {i}": row for area, rows in ROWS.items() for i, row in enumerate(rows)}


@pytest.mark.parametrize(("call", "error", "said"), TABLE.values(), ids=TABLE)
def test_a_wrong_use_is_refused_with_what_to_type(call, error, said):
    with pytest.raises(error) as caught:  # a warning is an error in these tests
        call()
    rest = str(caught.value)
    for phrase in said.split(" | "):
        assert phrase in rest, f"{phrase!r} is not in, or not behind the phrase before, in:\n{rest}"
        rest = rest.partition(phrase)[2]


MODULES = ("", ".optim", ".numerics", ".nnx", ".linen", ".pods", ".testing")
CLASSES = ("NoOpLossScale", "StaticLossScale", "DynamicLossScale", "default_policy") + tuple(
    name for name in mpjax.__all__ if name.endswith(("Policy", "PolicyMap", "Scaling"))
)


def _public_callables():
    """Yields what a person calls, by its public name, with the number of arguments that it needs.

    Not what takes any keyword or any number of arguments, and no class that mpjax returns.
    """
    for suffix in MODULES:
        module = importlib.import_module(f"mpjax{suffix}")
        for name in module.__all__:
            public = getattr(module, name)
            if not callable(public) or (isinstance(public, type) and name not in CLASSES):
                continue
            parameters = inspect.signature(public).parameters.values()
            if any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters):
                continue
            required = [p.kind for p in parameters if p.default is p.empty]
            needed = len(required) - required.count(inspect.Parameter.KEYWORD_ONLY)
            yield pytest.param(public, needed, id=f"mpjax{suffix}.{name}")


@pytest.mark.parametrize(("fun", "needed"), tuple(_public_callables()))
def test_an_unknown_keyword_is_answered_with_those_that_there_are(fun, needed):
    with pytest.raises(TypeError) as caught:
        fun(*[None] * needed, quux=1)
    assert "unknown keyword quux=.\n  Allowed: " in str(caught.value)
    assert str(caught.value).endswith("Drop quux=.")


def test_the_table_is_long_enough_to_be_one():
    assert len(TABLE) >= 400
    assert all(said for *_, said in TABLE.values())
