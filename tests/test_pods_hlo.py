"""The reader of compiled programs, on a small text: types, sources, trips, ways."""

from pathlib import Path

import pytest
from _hlo_text import LOOP

from mpjax.pods import _hlo, _loops, _read
from mpjax.pods._flow import Flow, Place


@pytest.fixture
def loop() -> _hlo.Module:
    return _hlo.parse_module(LOOP)


def test_types_are_read_with_tuples_layouts_and_memory_spaces(loop: _hlo.Module):
    body = loop.computations["body"]
    assert [str(s) for s in body.instructions["state"].shapes] == ["s32[]", *["f32[2,16,8]"] * 2]
    whole = body.instructions["whole"].shapes[0]
    assert (str(whole), whole.space, whole.bytes) == ("bf16[64,8]", 1, 64 * 8 * 2)


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [("pred", 8), ("s4", 4), ("bf16", 16), ("f8e4m3fn", 8), ("c64", 64), ("u32", 32), ("token", 0)],
)
def test_sizes_of_dtypes(dtype: str, bits: int):
    assert _hlo.Shape(dtype, (3, 4)).bytes == (bits * 12 + 7) // 8


def test_names_aliases_and_sources(loop: _hlo.Module):
    assert loop.entry.instructions["w"].op_name == "state['w']"
    assert loop.aliases == {0: 0}
    lines = loop.source(loop.computations["body"].instructions["whole"])
    assert lines == (
        "/env/lib/python3.13/site-packages/jax/_x.py:99 (all_gather)",
        "/home/user/train.py:7 (loss)",
    )
    assert _read.user_source(lines) == "/home/user/train.py:7 (loss)"


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


def test_trips_are_the_bound_less_the_start(loop: _hlo.Module):
    counts = _loops.run_counts(loop)
    assert (counts["body"], counts["condition"], counts["cast"]) == (2, 3, 2)
    assert "add" not in counts  # the scalar function of a reduction


def test_annotated_trips_win():
    annotated = LOOP.replace(
        "body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"9"}}'
    )
    assert _loops.run_counts(_hlo.parse_module(annotated))["body"] == 9


def test_a_loop_without_known_trips_counts_once():
    unknown = LOOP.replace(
        "%n = s32[] constant(3)", "%n = s32[] get-tuple-element(%state), index=0"
    )
    assert _loops.run_counts(_hlo.parse_module(unknown))["body"] == 1


@pytest.mark.parametrize(
    ("added", "trips"),
    [
        ("%one = s32[] constant(2)", 4),  # as where a product overlaps with what it sends
        ("%one = s32[] copy(%two)\n  %two = s32[] constant(2)", 4),
        ("%one = s32[] get-tuple-element(%state), index=0", 7),  # not to be seen
    ],
)
def test_trips_are_fewer_where_the_counter_takes_larger_steps(added: str, trips: int):
    text = LOOP.replace("%one = s32[] constant(1)", added)
    text = text.replace("%n = s32[] constant(3)", "%n = s32[] constant(8)")
    assert _loops.run_counts(_hlo.parse_module(text))["body"] == trips


def test_a_step_inside_a_fusion_is_seen():
    text = LOOP.replace(
        "%i2 = s32[] add(%i, %one)", "%i2 = s32[] fusion(%i), kind=kLoop, calls=%count"
    ).replace(
        "%body (",
        "%count (c: s32[]) -> s32[] {\n  %c = s32[] parameter(0)\n  %two = s32[] constant(2)\n"
        "  ROOT %next = s32[] add(%c, %two)\n}\n\n%body (",
    )
    assert _loops.run_counts(_hlo.parse_module(text))["body"] == 1


def test_a_value_is_followed_to_its_input_and_its_output(loop: _hlo.Module):
    flow = Flow(loop)
    assert flow.inputs_of(Place("body", "low")) == {0}
    assert flow.inputs_of(Place("body", "dot")) == set()
    assert flow.outputs_of(Place("body", "total")) == {0}
    assert flow.outputs_of(Place("body", "whole")) == set()  # a product ends the way


def test_a_text_without_an_entry_is_refused():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        _hlo.parse_module("HloModule x\n")
