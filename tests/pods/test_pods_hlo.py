"""The reader of compiled programs: messages, types, sources, groups, trips, ways."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from _hlo_text import (
    LOOP,
    Message,
    Place,
    ValueFlow,
    _hlo,
    _loops,
    _read,
    encoded,
    group_of,
    joins_devices,
    parsed,
)
from hypothesis import given
from hypothesis import strategies as st


@pytest.fixture
def loop():
    return parsed(LOOP)


# -- messages --------------------------------------------------------------------------------------

NUMBERS = st.integers(-(2**63), 2**63 - 1)


@given(st.dictionaries(st.integers(1, 2000), st.lists(NUMBERS | st.binary(), min_size=1)))
def test_a_message_gives_back_what_was_written(fields):
    message = Message(encoded(fields))
    for field, values in fields.items():
        assert message.has(field)
        if all(isinstance(value, int) for value in values):
            assert message.integers(field) == tuple(values)
            assert message.integer(field) == values[-1]
        elif isinstance(values[-1], bytes):
            assert message.data(field) == values[-1]
    assert not message.has(2001)
    assert (message.integer(2001), message.text(2001), message.integers(2001)) == (0, "", ())


def test_packed_numbers_are_read_and_fixed_ones_are_passed_over():
    assert Message(b"\x0a\x03\x01\x96\x01").integers(1) == (1, 150)
    assert Message(b"\x09" + b"\xff" * 8 + b"\x15" + b"\xff" * 4 + b"\x18\x05").integer(3) == 5


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\x0a\x05ab", "field 1 is cut short"),
        (b"\x08\x80", "a number is cut short"),
        (b"\x0b", "unknown kind 3 of field 1"),
    ],
)
def test_what_is_no_message_is_refused(data, said):
    with pytest.raises(ValueError, match=said):
        Message(data)


def test_a_field_of_the_wrong_kind_is_refused():
    with pytest.raises(ValueError, match="field 1 is no number"):
        Message(encoded({1: [b"ab"]})).integer(1)
    with pytest.raises(ValueError, match="field 1 holds no bytes"):
        Message(encoded({1: [3]})).text(1)


# -- the program -----------------------------------------------------------------------------------


def test_types_are_read_with_tuples_layouts_and_memory_spaces(loop):
    body = loop.computations["body"]
    assert [str(s) for s in body.instructions["state"].shapes] == ["s32[]", *["f32[2,16,8]"] * 2]
    whole = body.instructions["whole"].shapes[0]
    assert (str(whole), whole.space, whole.bytes) == ("bf16[64,8]", 1, 64 * 8 * 2)


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [("pred", 8), ("s4", 4), ("bf16", 16), ("f8e4m3fn", 8), ("c64", 64), ("u32", 32), ("token", 0)],
)
def test_sizes_of_dtypes(dtype, bits):
    assert _hlo.Shape(dtype, (3, 4)).bytes == (bits * 12 + 7) // 8


def test_the_line_to_name_is_the_users():
    package = Path(_read.__file__).parent
    lines = (
        f"{package}/_gather.py:180 (_gather_bwd)",
        "/env/lib/python3.13/site-packages/optax/_src/base.py:3 (update)",
        "/home/mpjax/mpjax/train.py:7 (loss)",  # a folder of that name is not the library
        "/home/mpjax/mpjax/train.py:1 (<module>)",
    )
    assert _read.user_source(lines) == "/home/mpjax/mpjax/train.py:7 (loss)"
    assert _read.user_source(lines[:2]) == ""
    here = str(Path.cwd() / "train.py:7 (loss)")
    assert _read.user_source([here]) == "train.py:7 (loss)"


# -- groups ----------------------------------------------------------------------------------------

MESH = {"data": 2, "fsdp": 4}
LISTED = [{1: list(group)} for group in ((0, 4), (1, 5), (2, 6), (3, 7))]


def mesh_of(*axes):
    return {1: [{1: [name.encode()], 2: [size]} for name, size in axes]}


TURNED = {3: [{1: [2, 4], 2: [1, 0]}]}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({93: [{1: [mesh_of(*MESH.items())], 2: [{}, {1: [1]}]}]}, (("data", "fsdp"), 8, True)),
        ({93: [{1: [mesh_of(*MESH.items())], 2: [{1: [1]}]}]}, (("fsdp",), 4, True)),
        # The inner half of an axis, as XLA writes 'fsdp':(2)2.
        (
            {93: [{1: [mesh_of(*MESH.items())], 2: [{1: [1], 2: [{1: [2], 2: [2]}]}]}]},
            (("fsdp",), 2, False),
        ),
        ({93: [{1: [mesh_of(("x", 2), ("y", 4))], 2: [{1: [1]}]}]}, (("fsdp",), 4, True)),
        ({93: [{1: [mesh_of(("x", 8))], 2: [{}]}]}, (("data", "fsdp"), 8, True)),
        # Devices in another order than the mesh's, as XLA writes device_ids=([2,4]T(1,0)).
        ({93: [{1: [mesh_of(("x", 4), ("y", 2)) | TURNED], 2: [{1: [1]}]}]}, (("data",), 2, True)),
        ({87: [{1: LISTED}]}, (("data",), 2, True)),
        ({49: LISTED}, (("data",), 2, True)),
        ({87: [{2: [{1: [2], 2: [4], 3: [8]}]}]}, (("fsdp",), 4, True)),
        ({87: [{2: [{1: [4], 2: [2], 3: [2, 4], 4: [1, 0]}]}]}, (("data",), 2, True)),
        ({92: [{1: [4], 2: [2], 3: [2, 4], 4: [1, 0]}]}, (("data",), 2, True)),
        ({52: [{1: [0], 2: [1]}, {1: [1], 2: [2]}]}, (("fsdp",), 4, True)),
        ({26: [1]}, (("data", "fsdp"), 8, True)),
    ],
)
def test_groups_are_read_in_every_notation(fields, expected):
    instruction = _hlo.Instruction("x", "all-reduce", (), (), False, Message(encoded(fields)))
    assert joins_devices(instruction)
    assert tuple(group_of(instruction, MESH)) == expected


def test_an_axis_of_one_device_is_not_named():
    whole = Message(encoded({93: [{1: [mesh_of(("data", 1), ("fsdp", 8))], 2: [{}, {1: [1]}]}]}))
    instruction = _hlo.Instruction("x", "all-reduce", (), (), False, whole)
    assert tuple(group_of(instruction, {"data": 1, "fsdp": 8})) == (("fsdp",), 8, True)


# -- loops -----------------------------------------------------------------------------------------


def body_runs(text):
    """Returns how often the loop's body runs; None where that is said to be unknown."""
    runs = _loops.run_counts(parsed(text))
    return None if "body" in runs.open else runs.counts["body"]


def test_annotated_trips_win():
    noted = 'body=%body, backend_config={"known_trip_count":{"n":"9"}}'
    assert body_runs(LOOP.replace("body=%body", noted)) == 9


ONE, BOUND = "%one = s32[] constant(1)", "%bound = s32[] constant(3)"


@pytest.mark.parametrize(
    ("old", "new", "trips"),
    [
        (BOUND, "%bound = s32[] constant(8)", 7),
        (BOUND, "%eight = s32[] constant(8)\n  %bound = s32[] copy(%eight)", 7),
        (BOUND, "%bound = s32[] get-tuple-element(%asked), index=0", None),
        ("direction=LT", "direction=LE", 3),
        ("direction=LT", "direction=NE", 2),
        ("direction=LT", "direction=GT", None),
        ("ROOT %more = pred[] compare", "%less = pred[] compare", None),  # see below
        ("%start = s32[] constant(1)", "%start = s32[] constant(-1)", 4),
        (ONE, "%one = s32[] constant(2)", 1),  # as where a product overlaps with what it sends
        (ONE, "%two = s32[] constant(2)\n  %one = s32[] copy(%two)", 1),
        (ONE, "%one = s32[] get-tuple-element(%state), index=0", None),  # it doubles
        ("%i2 = s32[] add(%i, %one)", "%i2 = s32[] multiply(%i, %one)", None),
    ],
)
def test_trips_are_worked_out_or_not_known(old, new, trips):
    assert old in LOOP
    text = LOOP.replace(old, new)
    if "%less" in new:  # a second reason to stop, as a loop until something has converged has
        text = text.replace(
            "direction=LT\n}",
            "direction=LT\n  %near = pred[] constant(false)\n"
            "  ROOT %more = pred[] and(%less, %near)\n}",
        )
    assert body_runs(text) == trips


def test_a_step_inside_a_fusion_is_seen():
    text = LOOP.replace(
        "%i2 = s32[] add(%i, %one)", "%i2 = s32[] fusion(%i), kind=kLoop, calls=%counted"
    ).replace(
        "%body (",
        "%counted (c: s32[]) -> s32[] {\n  %c = s32[] parameter(0)\n  %two = s32[] constant(2)\n"
        "  ROOT %added = s32[] add(%c, %two)\n}\n\n%body (",
    )
    assert body_runs(text) == 1


@pytest.mark.parametrize("length", [1, 3, 50])
def test_what_the_compiler_notes_is_what_is_worked_out(length):
    def fun(x):
        return jax.lax.scan(lambda x, _: (x @ x, None), x, length=length)[0]

    module = _hlo.read_module(jax.jit(fun).lower(jnp.ones((4, 4))).compile())
    for computation in module.computations.values():
        for loop in computation.instructions.values():
            if loop.opcode == "while":
                bare = _hlo.Instruction(
                    loop.name, "while", loop.operands, loop.called, False, Message(b"")
                )
                assert _loops.trip_count(module, computation, loop) == length
                assert _loops.trip_count(module, computation, bare) == length


# -- ways ------------------------------------------------------------------------------------------


def test_a_way_leads_through_a_branch():
    def fun(w, x, apply):
        return jax.lax.cond(apply, lambda w, x: w - x, lambda w, x: w * 2.0, w, x)

    args = jnp.ones((4, 4)), jnp.ones((4, 4)), True
    module = _hlo.read_module(jax.jit(fun).lower(*args).compile())
    flow, entry = ValueFlow(module), module.entry
    assert any(i.opcode == "conditional" for i in entry.instructions.values())
    for number in (0, 1):
        assert flow.outputs_of(Place(entry.name, entry.parameters[number].name)) == {0}
    name, doubled = next(
        (computation.name, i)
        for computation in module.computations.values()
        for i in computation.instructions.values()
        if i.opcode == "multiply"
    )
    ways = (flow.inputs_of(Place(name, operand)) for operand in doubled.operands)
    assert {0} in ways


def test_a_program_without_an_entry_is_refused():
    with pytest.raises(ValueError, match="no entry computation"):
        _hlo.parse_module(encoded({1: [b"x"]}))
