"""What a person may get wrong, a row each: what was got, what is allowed, what to type.

No row compiles more than a small array: what is wrong is said where it is given, or while a step
is traced.
"""

import _wrong_keras
import _wrong_numerics
import _wrong_optim
import _wrong_policies
import _wrong_scales
import _wrong_steps
import pytest

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


def test_the_table_is_long_enough_to_be_one():
    assert len(TABLE) >= 400
    assert all(said for *_, said in TABLE.values())
