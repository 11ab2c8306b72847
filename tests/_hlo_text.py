"""A small compiled program as text, after what XLA prints, for the tests of what reads it.

What reads it is imported from here too: the one door of tests to `mpjax.pods`' readers.
"""

from collections.abc import Mapping, Sequence
from typing import Any

try:  # XLA's own parser; only tests read programs from text
    from jaxlib import _hlo as _parser
except ImportError:  # JAX before 0.12
    from jaxlib import _jax as _parser

from mpjax.pods import _collectives, _cost, _hlo, _loops, _read
from mpjax.pods._collectives import Names
from mpjax.pods._flow import Place, ValueFlow
from mpjax.pods._groups import group_of, joins_devices
from mpjax.pods._proto import Message

# fmt: off
__all__ = [
    "LOOP", "NAMES", "encoded", "found", "line_of", "parsed", "with_line",
    "_collectives", "_cost", "_hlo", "_loops", "_read",
    "Message", "Names", "Place", "ValueFlow", "group_of", "joins_devices",
]
# fmt: on

# Written by hand after what XLA prints: a loop over two layers that gathers a slice of the weights
# and reduces its gradient, on a mesh of data=2 and fsdp=4. The instructions mean nothing more.
LOOP = """\
HloModule jit_step, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }

FileNames
1 "/home/user/train.py"
2 "/env/lib/python3.13/site-packages/jax/_x.py"

FunctionNames
1 "loss"
2 "all_gather"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=1 end_column=2}
2 {file_name_id=2 function_name_id=2 line=99 end_line=99 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%cast (p: f32[2,16,8], at: s32[]) -> bf16[16,8] {
  %p = f32[2,16,8]{2,1,0:T(8,128)} parameter(0)
  %at = s32[] parameter(1)
  %zero = s32[] constant(0)
  %slice = f32[1,16,8]{2,1,0} dynamic-slice(%p, %at, %zero, %zero), dynamic_slice_sizes={1,16,8}
  %rounded = bf16[1,16,8]{2,1,0} convert(%slice)
  ROOT %flat = bf16[16,8]{1,0} bitcast(%rounded)
}

%stack (stacked: f32[2,16,8], new_row: f32[16,8], row_at: s32[]) -> f32[2,16,8] {
  %stacked = f32[2,16,8] parameter(0)
  %new_row = f32[16,8] parameter(1)
  %row_at = s32[] parameter(2)
  %row_zero = s32[] constant(0)
  %row = f32[1,16,8] bitcast(%new_row)
  ROOT %next = f32[2,16,8] dynamic-update-slice(%stacked, %row, %row_at, %row_zero, %row_zero)
}

%body (state: (s32[], f32[2,16,8], f32[2,16,8])) -> (s32[], f32[2,16,8], f32[2,16,8]) {
  %state = (s32[], f32[2,16,8], /*index=2*/f32[2,16,8]) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %w = f32[2,16,8] get-tuple-element(%state), index=1
  %g = f32[2,16,8] get-tuple-element(%state), index=2
  %low = bf16[16,8] fusion(%w, %i), kind=kLoop, calls=%cast
  %whole = bf16[64,8]{1,0:T(8,128)(2,1)S(1)} all-gather(%low), channel_id=1, \
replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}, metadata={op_name="a" \
stack_frame_id=2}
  %dot = f32[64,8] dot(%whole, %whole), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  %part = f32[16,8] reduce-scatter(%dot), channel_id=2, replica_groups={{0,1,2,3},{4,5,6,7}}, \
dimensions={0}, to_apply=%add
  %total = f32[16,8] all-reduce(%part), replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add
  %g2 = f32[2,16,8] fusion(%g, %total, %i), kind=kLoop, calls=%stack
  %one = s32[] constant(1)
  %i2 = s32[] add(%i, %one)
  ROOT %out = (s32[], f32[2,16,8], f32[2,16,8]) tuple(%i2, %w, %g2)
}

%condition (asked: (s32[], f32[2,16,8], f32[2,16,8])) -> pred[] {
  %asked = (s32[], f32[2,16,8], f32[2,16,8]) parameter(0)
  %count = s32[] get-tuple-element(%asked), index=0
  %bound = s32[] constant(3)
  ROOT %more = pred[] compare(%count, %bound), direction=LT
}

ENTRY %main (weights: f32[2,16,8], moments: f32[2,16,8]) -> (f32[2,16,8], f32[]) {
  %weights = f32[2,16,8] parameter(0), metadata={op_name="state[\\'w\\']"}
  %moments = f32[2,16,8] parameter(1), metadata={op_name="state[\\'m\\']"}
  %start = s32[] constant(1)
  %zeros = f32[2,16,8] broadcast(%start), dimensions={}
  %init = (s32[], f32[2,16,8], f32[2,16,8]) tuple(%start, %weights, %zeros)
  %while = (s32[], f32[2,16,8], f32[2,16,8]) while(%init), condition=%condition, body=%body
  %grad = f32[2,16,8] get-tuple-element(%while), index=2
  %rate = f32[2,16,8] multiply(%grad, %moments)
  %new = f32[2,16,8] subtract(%weights, %rate)
  %norm = f32[] constant(0)
  ROOT %result = (f32[2,16,8], f32[]) tuple(%new, %norm)
}
"""
NAMES = Names({0: "w", 1: "m"}, {0: "w"}, frozenset({0, 1}), frozenset({0}), {"data": 2, "fsdp": 4})


def parsed(text: str) -> _hlo.Module:
    """Returns the program of a text, as `read_module` has it from an executable."""
    proto = _parser.hlo_module_from_text(text).as_serialized_hlo_module_proto()
    return _hlo.parse_module(proto)


def found(program: str | _hlo.Module, names: Names = NAMES) -> list[_collectives.Collective]:
    module = parsed(program) if isinstance(program, str) else program
    runs = _loops.run_counts(module)
    return list(
        _collectives.find_collectives(module, ValueFlow(module), runs, names, _read.user_source)
    )


def encoded(fields: Mapping[int, Sequence[Any]]) -> bytes:
    """Returns a protocol buffer: numbers, bytes, and messages written as such mappings."""
    data = b""
    for field, values in fields.items():
        for value in values:
            if isinstance(value, int):
                data += _varint(field << 3) + _varint(value % (1 << 64))
            else:
                inside = value if isinstance(value, bytes) else encoded(value)
                data += _varint(field << 3 | 2) + _varint(len(inside)) + inside
    return data


def _varint(value: int) -> bytes:
    head, rest = value & 127, value >> 7
    return bytes([head | 128]) + _varint(rest) if rest else bytes([head])


def line_of(text: str, name: str) -> str:
    """Returns the line of `LOOP`'s body or entry that computes `name`."""
    return next(line for line in text.splitlines() if line.startswith(f"  {name} ="))


def with_line(name: str, line: str) -> str:
    """Returns `LOOP` with another line in the place of the one that computes `name`."""
    return LOOP.replace(line_of(LOOP, name), line)
