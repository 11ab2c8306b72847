"""The reader of compiled programs, on small texts: types, trips, ways, groups, costs."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from mpjax.pods import _collectives, _cost, _hlo, _loops, _read
from mpjax.pods._collectives import Names
from mpjax.pods._flow import Flow, Place

# Written by hand after what XLA prints: a loop over two layers that gathers a slice of the weights
# and reduces its gradient, on a mesh of data=2 and fsdp=4. The instructions mean nothing more.
LOOP = """\
HloModule jit_step, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }, entry_x={}

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

%cast (p: f32[2,16,8], i: s32[]) -> bf16[16,8] {
  %p = f32[2,16,8]{2,1,0:T(8,128)} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %slice = f32[1,16,8]{2,1,0} dynamic-slice(%p, %i, %zero, %zero), dynamic_slice_sizes={1,16,8}
  %low = bf16[1,16,8]{2,1,0} convert(%slice)
  ROOT %flat = bf16[16,8]{1,0} bitcast(%low)
}

%stack (g: f32[2,16,8], n: f32[16,8], i: s32[]) -> f32[2,16,8] {
  %g = f32[2,16,8] parameter(0)
  %n = f32[16,8] parameter(1)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  %row = f32[1,16,8] bitcast(%n)
  ROOT %next = f32[2,16,8] dynamic-update-slice(%g, %row, %i, %zero, %zero)
}

%body (state: (s32[], f32[2,16,8], f32[2,16,8])) -> (s32[], f32[2,16,8], f32[2,16,8]) {
  %state = (s32[], f32[2,16,8], /*index=2*/f32[2,16,8]) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %w = f32[2,16,8] get-tuple-element(%state), index=1
  %g = f32[2,16,8] get-tuple-element(%state), index=2
  %low = bf16[16,8] fusion(%w, %i), kind=kLoop, calls=%cast
  %whole = bf16[64,8]{1,0:T(8,128)(2,1)S(1)} all-gather(%low), channel_id=1, \
replica_groups=mesh['data'=2,'fsdp'=4] {'fsdp'}, dimensions={0}, metadata={op_name="a" \
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

%condition (state: (s32[], f32[2,16,8], f32[2,16,8])) -> pred[] {
  %state = (s32[], f32[2,16,8], f32[2,16,8]) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %n = s32[] constant(3)
  ROOT %more = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (w: f32[2,16,8], m: f32[2,16,8]) -> (f32[2,16,8], f32[]) {
  %w = f32[2,16,8] parameter(0), metadata={op_name="state[\\'w\\']"}
  %m = f32[2,16,8] parameter(1), metadata={op_name="state[\\'m\\']"}
  %start = s32[] constant(1)
  %zeros = f32[2,16,8] broadcast(%start), dimensions={}
  %init = (s32[], f32[2,16,8], f32[2,16,8]) tuple(%start, %w, %zeros)
  %while = (s32[], f32[2,16,8], f32[2,16,8]) while(%init), condition=%condition, body=%body
  %grad = f32[2,16,8] get-tuple-element(%while), index=2
  %rate = f32[2,16,8] multiply(%grad, %m)
  %new = f32[2,16,8] subtract(%w, %rate)
  %norm = f32[] constant(0)
  ROOT %result = (f32[2,16,8], f32[]) tuple(%new, %norm)
}
"""
NAMES = Names({0: "w", 1: "m"}, {0: "w"}, frozenset({0, 1}), frozenset({0}), {"data": 2, "fsdp": 4})


@pytest.fixture
def loop() -> _hlo.Module:
    return _hlo.parse_module(LOOP)


def found(module: _hlo.Module, names: Names = NAMES) -> list[_collectives.Collective]:
    return list(_collectives.find_collectives(module, names, _read.user_source))


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


def test_collectives_have_roles_paths_counts_and_axes(loop: _hlo.Module):
    gather, scatter, reduce = found(loop)
    assert (gather.role, gather.path, gather.dtype, gather.shape) == (
        "weights",
        "w",
        "bf16",
        (64, 8),
    )
    assert (gather.count, gather.axes, gather.group_size) == (2, ("fsdp",), 4)
    assert gather.source == "/home/user/train.py:7 (loss)"
    assert (scatter.role, scatter.path, scatter.dtype, scatter.shape) == (
        "gradients",
        "w",
        "f32",
        (64, 8),
    )
    assert (scatter.axes, scatter.group_size) == (("fsdp",), 4)
    assert (reduce.role, reduce.axes, reduce.group_size) == ("gradients", ("data",), 2)


def test_what_has_no_line_of_its_own_has_that_of_its_operand_or_reader():
    """A TPU's compiler writes none where it makes one reduction of several operations."""
    line = _line(LOOP, "%dot")
    text = LOOP.replace(line, line + ", metadata={stack_frame_id=2}")
    scatter = next(c for c in found(_hlo.parse_module(text)) if c.kind == "reduce-scatter")
    assert scatter.source == "/home/user/train.py:7 (loss)"
    line = _line(LOOP, "%g2")
    text = LOOP.replace(line, line + ", metadata={stack_frame_id=1}")
    reduce = next(c for c in found(_hlo.parse_module(text)) if c.kind == "all-reduce")
    assert reduce.source == "/home/user/train.py:7 (loss)"


def test_an_axis_of_one_device_is_not_named():
    instruction = _hlo.parse_instruction(
        "  %x = f32[4] all-reduce(%y), replica_groups=mesh['data'=1,'fsdp'=8] {'data','fsdp'}"
    )
    assert instruction is not None
    names = dataclasses.replace(NAMES, mesh={"data": 1, "fsdp": 8})
    assert _collectives._groups(instruction, names) == (("fsdp",), 8)


def test_a_collective_of_one_device_sends_nothing():
    groups = "replica_groups=" + str([[n] for n in range(8)]).replace("[", "{").replace("]", "}")
    alone = LOOP.replace("replica_groups=[4,2]<=[2,4]T(1,0)", groups.replace(" ", ""))
    assert alone != LOOP
    gather, scatter = found(_hlo.parse_module(alone))
    assert (gather.kind, scatter.kind) == ("all-gather", "reduce-scatter")


def test_a_sum_and_a_slice_in_one_fusion_are_a_reduce_scatter():
    line = _line(LOOP, "%part")
    text = LOOP.replace(
        line, "  %part = f32[16,8] fusion(%dot), kind=kCustom, calls=%all-reduce-scatter.1"
    ).replace(
        "%body (",
        "%all-reduce-scatter.1 (d: f32[64,8]) -> f32[16,8] {\n  %d = f32[64,8] parameter(0)\n"
        "  %r = f32[64,8] all-reduce(%d), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add\n"
        "  %z = s32[] constant(0)\n"
        "  ROOT %s = f32[16,8] dynamic-slice(%r, %z, %z), dynamic_slice_sizes={16,8}\n}\n\n%body (",
    )
    scatter = next(
        c for c in found(_hlo.parse_module(text)) if c.shape == (64, 8) and c.dtype == "f32"
    )
    assert (scatter.kind, scatter.role, scatter.path) == ("reduce-scatter", "gradients", "w")
    assert scatter.wire_bytes == 2 * 64 * 8 * 4 * 3 // 4


def test_ring_traffic(loop: _hlo.Module):
    gather, scatter, reduce = found(loop)
    assert gather.wire_bytes == 2 * 64 * 8 * 2 * 3 // 4
    assert scatter.wire_bytes == 2 * 64 * 8 * 4 * 3 // 4
    assert reduce.wire_bytes == 2 * 16 * 8 * 4  # 2 * (n - 1) / n with n = 2


def test_asynchronous_and_combined_collectives_count_one_side_once(loop: _hlo.Module):
    line = "  %whole = bf16[64,8]{1,0:T(8,128)(2,1)S(1)} all-gather(%low), channel_id=1, "
    assert line in LOOP
    text = LOOP.replace(
        line,
        "  %begun = ((bf16[16,8], f32[2,16,8]), (bf16[64,8], f32[8,16,8])) "
        "all-gather-start(%low, %w), channel_id=1, ",
    ).replace(
        "  %dot = ",
        "  %done = (bf16[64,8], f32[8,16,8]) all-gather-done(%begun)\n"
        "  %whole = bf16[64,8] get-tuple-element(%done), index=0\n  %dot = ",
    )
    gathers = [c for c in found(_hlo.parse_module(text)) if c.kind == "all-gather"]
    assert [(c.dtype, c.shape, c.path) for c in gathers] == [
        ("bf16", (64, 8), "w"),
        ("f32", (8, 16, 8), "w"),
    ]


def test_one_collective_in_several_fusions_counts_once():
    chained = LOOP.replace(
        "dimensions={0}, metadata", 'dimensions={0}, frontend_attributes={chain_id="5"}, metadata'
    )
    again = chained.replace(
        "  %dot =", _line(chained, "%whole").replace("%whole", "%again") + "\n  %dot ="
    )
    assert len([c for c in found(_hlo.parse_module(again)) if c.kind == "all-gather"]) == 1


def _line(text: str, name: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(f"  {name} ="))


def test_a_collective_that_a_sparse_core_runs_is_followed():
    """TPU7x hands operands to a computation that was started before, and takes the result later."""
    line = _line(LOOP, "%whole")
    text = LOOP.replace(
        line,
        "  %begun = ((), (), (s32[1])) call-start(), to_apply=%core\n"
        "  %given = ((bf16[16,8]), bf16[64,8]) call-update(%begun, %low)\n"
        "  %whole = bf16[64,8] call-done(%given)",
    ).replace(
        "%body (",
        "%core (p: bf16[16,8]) -> bf16[64,8] {\n  %p = bf16[16,8] parameter(0)\n"
        + line.replace("  %whole", "  ROOT %all").replace("%low", "%p")
        + "\n}\n\n%body (",
    )
    module = _hlo.parse_module(text)
    gather = next(c for c in found(module) if c.kind == "all-gather")
    assert (gather.role, gather.path, gather.count) == ("weights", "w", 2)
    assert Flow(module).inputs_of(Place("body", "whole")) == {0}


def test_what_tpu_slices_exchange_is_a_collective():
    line = _line(LOOP, "%total")
    rendezvous = 'frontend_attributes={_xla_host_transfer_rendezvous="all-reduce_0"'
    kind = '_xla_megascale_transfer_type="ALL_REDUCE"}'
    text = LOOP.replace(
        line,
        f"  %t = token[] after-all()\n"
        f"  %sent = (f32[16,8], u32[], token[]) send(%part, %t), {rendezvous},{kind}\n"
        f"  %coming = (f32[16,8], u32[], token[]) recv(%t), {rendezvous},{kind}\n"
        "  %came = (f32[16,8], token[]) recv-done(%coming)\n"
        "  %total = f32[16,8] get-tuple-element(%came), index=0",
    )
    names = dataclasses.replace(NAMES, slice_axes=("data",))
    scatter, between = found(_hlo.parse_module(text), names)[1:]
    assert (between.kind, between.role, between.axes) == ("all-reduce", "gradients", ("data",))
    assert (between.group_size, between.bytes, between.path) == (2, 16 * 8 * 4, "w")
    assert scatter.path == "w"  # the way to the output leads over the other slice


def test_a_gradient_that_is_moved_as_bytes_is_followed():
    """A TPU copies large arrays into its vector memory in pieces, which it writes as bytes."""
    text = LOOP.replace(
        _line(LOOP, "%rate"),
        "  %bytes = s8[1024] bitcast(%grad)\n"
        "  %a = ((s8[1024]), s8[512], s32[]) slice-start(%bytes), slice={[0:512]}\n"
        "  %b = ((s8[1024]), s8[512], s32[]) slice-start(%bytes), slice={[512:1024]}\n"
        "  %low = s8[512] slice-done(%a)\n"
        "  %high = s8[512] slice-done(%b)\n"
        '  %all = f32[2,16,8] custom-call(%low, %high), custom_call_target="ConcatBitcast"\n'
        "  %rate = f32[2,16,8] multiply(%all, %m)",
    )
    assert {(c.role, c.path) for c in found(_hlo.parse_module(text))[1:]} == {("gradients", "w")}


def test_a_reduction_has_the_dtype_that_it_adds_in():
    """A TPU reads 16-bit operands and sums them in the result's float32."""
    text = LOOP.replace(
        "%total = f32[16,8] all-reduce(%part)", "%total = f32[16,8] all-reduce(%low)"
    )
    reduce = next(c for c in found(_hlo.parse_module(text)) if c.kind == "all-reduce")
    assert (reduce.dtype, reduce.bytes) == ("f32", 16 * 8 * 4)


def test_a_gather_or_reduction_written_as_a_loop_of_permutes_keeps_its_role():
    """TPU programs do so to overlap them with a product, whose chunks go round in a ring."""
    text = """HloModule ring, input_output_alias={ {}: (0, {}, may-alias) }

%body (s: (s32[], bf16[16,8], f32[16,8])) -> (s32[], bf16[16,8], f32[16,8]) {
  %s = (s32[], bf16[16,8], f32[16,8]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %chunk = bf16[16,8] get-tuple-element(%s), index=1
  %sum = f32[16,8] get-tuple-element(%s), index=2
  %begun = (bf16[16,8], bf16[16,8], u32[]{:S(2)}, u32[]{:S(2)}) \
collective-permute-start(%chunk), source_target_pairs={{0,1},{1,2},{2,3},{3,0}}
  %next = bf16[16,8] collective-permute-done(%begun)
  %part = f32[16,8] dot(%chunk, %chunk), lhs_contracting_dims={0}, rhs_contracting_dims={0}
  %more = f32[16,8] add(%sum, %part)
  %passed = f32[16,8] collective-permute(%more), source_target_pairs={{0,1},{1,2},{2,3},{3,0}}
  %one = s32[] constant(1)
  %i2 = s32[] add(%i, %one)
  ROOT %out = (s32[], bf16[16,8], f32[16,8]) tuple(%i2, %next, %passed)
}

%condition (s: (s32[], bf16[16,8], f32[16,8])) -> pred[] {
  %s = (s32[], bf16[16,8], f32[16,8]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %n = s32[] constant(4)
  ROOT %more = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (w: f32[16,8]) -> f32[16,8] {
  %w = f32[16,8] parameter(0)
  %low = bf16[16,8] convert(%w)
  %zero = s32[] constant(0)
  %zeros = f32[16,8] broadcast(%zero), dimensions={}
  %init = (s32[], bf16[16,8], f32[16,8]) tuple(%zero, %low, %zeros)
  %loop = (s32[], bf16[16,8], f32[16,8]) while(%init), condition=%condition, body=%body
  %grad = f32[16,8] get-tuple-element(%loop), index=2
  ROOT %new = f32[16,8] subtract(%w, %grad)
}
"""
    first, second = found(_hlo.parse_module(text))
    assert (first.role, first.path, first.dtype, first.count) == ("weights", "w", "bf16", 4)
    assert (second.role, second.path, second.dtype, second.axes) == (
        "gradients",
        "w",
        "f32",
        ("fsdp",),
    )
    assert second.wire_bytes == 4 * 16 * 8 * 4


def test_a_sum_widened_for_the_cpu_is_known_by_its_function():
    text = (
        LOOP.replace("%add", "%add_promoted")
        .replace("  %dot = f32", "  %d = bf16")
        .replace("  %part =", "  %dot = f32[64,8] convert(%d)\n  %part =")
    )
    scatter = next(c for c in found(_hlo.parse_module(text)) if c.kind == "reduce-scatter")
    assert (scatter.dtype, scatter.bytes) == ("bf16", 64 * 8 * 2)


@pytest.mark.parametrize(
    ("text", "axes", "size"),
    [
        ("replica_groups=mesh['data'=2,'fsdp'=4] {'fsdp','data'}", ("data", "fsdp"), 8),
        ("replica_groups=mesh['data'=2,'fsdp'=4] {'fsdp':(2)2}", ("fsdp",), 2),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", ("fsdp",), 4),
        ("replica_groups=mesh['axis_0'=8] {'axis_0'}", ("data", "fsdp"), 8),
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", ("data",), 2),
        ("replica_groups=[2,4]<=[8]", ("fsdp",), 4),
        ("replica_groups=[1,8]<=[8]", ("data", "fsdp"), 8),
        ("source_target_pairs={{0,1},{1,2},{2,3},{3,0}}", ("fsdp",), 4),
        ("channel_id=1", ("data", "fsdp"), 8),
    ],
)
def test_groups_are_read_in_every_notation(text: str, axes: tuple[str, ...], size: int):
    line = f"  %x = f32[4] all-reduce(%y), {text}, to_apply=%add"
    instruction = _hlo.parse_instruction(line)
    assert instruction is not None
    assert _collectives._groups(instruction, NAMES) == (axes, size)


def test_a_text_without_an_entry_is_refused():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        _hlo.parse_module("HloModule x\n")


# -- costs -----------------------------------------------------------------------------------------


def test_products_and_traffic_are_multiplied_by_trips(loop: _hlo.Module):
    cost = _cost.count(loop)
    assert cost.flops == {"bf16": 2 * (2 * 64 * 8 * 8)}
    outside = sum(_cost._traffic(loop, loop.entry, i) for i in loop.entry.instructions.values())
    parts = {name: loop.computations[name] for name in ("body", "condition")}
    each = {
        name: sum(_cost._traffic(loop, part, i) for i in part.instructions.values())
        for name, part in parts.items()
    }
    assert cost.hbm_bytes == outside + 2 * each["body"] + 3 * each["condition"]


def compiled_text(fun: Any, *args: Any) -> tuple[str, Any]:
    compiled = jax.jit(fun).lower(*args).compile()
    return compiled.as_text(), compiled


@pytest.mark.parametrize("layers", [1, 5])
def test_flops_of_a_scan_are_counted_for_every_layer(layers: int):
    def fun(w: Any, x: Any) -> Any:
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    text, _ = compiled_text(fun, jnp.ones((layers, 32, 32)), jnp.ones((64, 32)))
    assert _cost.count(_hlo.parse_module(text)).total_flops == layers * 2 * 64 * 32 * 32


@pytest.mark.parametrize(
    ("strides", "padding", "dilation"),
    [((1, 1), "VALID", (1, 1)), ((2, 1), "SAME", (1, 1)), ((1, 1), "SAME", (2, 2))],
)
def test_flops_of_convolutions_are_those_of_xla(strides: Any, padding: str, dilation: Any):
    def fun(x: Any, w: Any) -> Any:
        return jax.lax.conv_general_dilated(
            x,
            w,
            strides,
            padding,
            rhs_dilation=dilation,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )

    text, compiled = compiled_text(fun, jnp.ones((2, 12, 10, 3)), jnp.ones((3, 3, 3, 8)))
    mine = _cost.count(_hlo.parse_module(text)).total_flops
    assert mine == compiled.cost_analysis()["flops"]


def test_a_batched_product_written_as_a_convolution_is_not_overcounted():
    # TPU programs do so; the window of 8 meets one batch entry at each of its places.
    text = """HloModule m

ENTRY %main (a: f32[8,16,32], b: f32[8,32,4]) -> f32[8,16,4] {
  %a = f32[8,16,32] parameter(0)
  %b = f32[8,32,4] parameter(1)
  ROOT %c = f32[8,16,4] convolution(%a, %b), window={size=8 stride=7 pad=0_0 lhs_dilate=8}, \
dim_labels=0bf_0io->0bf
}
"""
    assert _cost.count(_hlo.parse_module(text)).total_flops == 2 * 8 * 16 * 32 * 4


def test_library_products_are_counted_and_unknown_calls_are_named():
    text = """HloModule m

ENTRY %main (a: bf16[16,32], b: bf16[32,4]) -> bf16[16,4] {
  %a = bf16[16,32] parameter(0)
  %b = bf16[32,4] parameter(1)
  %c = bf16[16,4] custom-call(%a, %b), custom_call_target="__cublas$gemm", backend_config=\
{"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}
  ROOT %d = bf16[16,4] custom-call(%c), custom_call_target="__cudnn$fmhaSoftmax"
}
""".replace('["1"]', "[1]")
    cost = _cost.count(_hlo.parse_module(text))
    assert cost.flops == {"bf16": 2 * 16 * 32 * 4}
    assert cost.uncounted == ("__cudnn$fmhaSoftmax",)


def test_an_update_in_place_costs_the_update(loop: _hlo.Module):
    body = loop.computations["body"]
    stack = _cost._traffic(loop, body, body.instructions["g2"])
    assert stack == (16 * 8 * 4) + 4 + 16 * 8 * 4  # the row read, the index, the row written


# -- what XLA compiles here ------------------------------------------------------------------------


def test_a_program_that_xla_compiled_here(devices: list[jax.Device], tmp_path: Path):
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), (AxisType.Auto,) * 2, devices=devices)

    def local(w: Any, x: Any) -> Any:
        whole = jax.lax.all_gather(w, "fsdp", tiled=True)
        y = x @ whole
        grad = jax.lax.psum_scatter(x.T @ y, "fsdp", tiled=True)
        return w - jax.lax.psum(grad, "data")

    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(P("fsdp"), P("data")), out_specs=P("fsdp"), check_vma=False
    )
    w = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(mesh, P("fsdp")))
    x = jax.ShapeDtypeStruct((16, 64), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    text = jax.jit(mapped, donate_argnums=0).lower(w, x).compile().as_text()
    names = Names({0: "w", 1: "x"}, {0: "w"}, frozenset({0}), frozenset({0}), dict(mesh.shape))
    sent = found(_hlo.parse_module(text), names)
    assert [(c.kind, c.role, c.path, c.axes) for c in sent] == [
        ("all-gather", "weights", "w", ("fsdp",)),
        ("reduce-scatter", "gradients", "w", ("fsdp",)),
        ("all-reduce", "gradients", "w", ("data",)),
    ]
    assert all("test_pods_hlo.py" in c.source for c in sent)
