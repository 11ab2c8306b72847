"""What a compiled program sends, on small texts: kinds, dtypes, roles, paths, counts, groups."""

import dataclasses
import functools

from _hlo_text import (
    LOOP,
    NAMES,
    Place,
    ValueFlow,
    found,
    line_of,
    parsed,
    with_line,
)


def test_collectives_have_roles_paths_counts_and_axes():
    gather, scatter, reduce = found(LOOP)
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
    text = with_line("%dot", line_of(LOOP, "%dot") + ", metadata={stack_frame_id=2}")
    scatter = next(c for c in found(text) if c.kind == "reduce-scatter")
    assert scatter.source == "/home/user/train.py:7 (loss)"
    text = with_line("%g2", line_of(LOOP, "%g2") + ", metadata={stack_frame_id=1}")
    reduce = next(c for c in found(text) if c.kind == "all-reduce")
    assert reduce.source == "/home/user/train.py:7 (loss)"


def test_a_collective_of_one_device_sends_nothing():
    groups = "replica_groups=" + str([[n] for n in range(8)]).replace("[", "{").replace("]", "}")
    alone = LOOP.replace("replica_groups=[4,2]<=[2,4]T(1,0)", groups.replace(" ", ""))
    assert alone != LOOP
    gather, scatter = found(alone)
    assert (gather.kind, scatter.kind) == ("all-gather", "reduce-scatter")


def test_a_sum_and_a_slice_in_one_fusion_are_a_reduce_scatter():
    text = with_line(
        "%part", "  %part = f32[16,8] fusion(%dot), kind=kCustom, calls=%all-reduce-scatter.1"
    ).replace(
        "%body (",
        "%all-reduce-scatter.1 (d: f32[64,8]) -> f32[16,8] {\n  %d = f32[64,8] parameter(0)\n"
        "  %r = f32[64,8] all-reduce(%d), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add\n"
        "  %z = s32[] constant(0)\n"
        "  ROOT %s = f32[16,8] dynamic-slice(%r, %z, %z), dynamic_slice_sizes={16,8}\n}\n\n%body (",
    )
    scatter = next(c for c in found(text) if c.shape == (64, 8) and c.dtype == "f32")
    assert (scatter.kind, scatter.role, scatter.path) == ("reduce-scatter", "gradients", "w")
    assert scatter.wire_bytes == 2 * 64 * 8 * 4 * 3 // 4


def test_ring_traffic():
    gather, scatter, reduce = found(LOOP)
    assert gather.wire_bytes == 2 * 64 * 8 * 2 * 3 // 4
    assert scatter.wire_bytes == 2 * 64 * 8 * 4 * 3 // 4
    assert reduce.wire_bytes == 2 * 16 * 8 * 4  # 2 * (n - 1) / n with n = 2


def test_asynchronous_and_combined_collectives_count_one_side_once():
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
    gathers = [c for c in found(text) if c.kind == "all-gather"]
    assert [(c.dtype, c.shape, c.path) for c in gathers] == [
        ("bf16", (64, 8), "w"),
        ("f32", (8, 16, 8), "w"),
    ]


def test_one_collective_in_several_fusions_counts_once():
    chained = LOOP.replace(
        "dimensions={0}, metadata", 'dimensions={0}, frontend_attributes={chain_id="5"}, metadata'
    )
    again = chained.replace(
        "  %dot =", line_of(chained, "%whole").replace("%whole", "%again") + "\n  %dot ="
    )
    assert len([c for c in found(again) if c.kind == "all-gather"]) == 1


def test_a_collective_that_a_sparse_core_runs_is_followed():
    """TPU7x hands operands to a computation that was started before, and takes the result later.

    XLA's parser has no such calls: they are put in place of one that runs at once.
    """
    line = line_of(LOOP, "%whole")
    module = parsed(
        LOOP.replace(line, "  %whole = bf16[64,8] call(%low), to_apply=%core").replace(
            "%body (",
            "%core (q: bf16[16,8]) -> bf16[64,8] {\n  %q = bf16[16,8] parameter(0)\n"
            + line.replace("  %whole", "  ROOT %all").replace("%low", "%q")
            + "\n}\n\n%body (",
        )
    )
    body = module.computations["body"]
    whole = body.instructions["whole"]
    change = functools.partial(dataclasses.replace, whole)
    done = change(opcode="async-done", operands=("given",), called=())
    given = change(name="given", opcode="async-update", operands=("begun", "low"), called=())
    begun = change(name="begun", opcode="async-start", operands=())
    more = {"begun": begun, "given": given, "whole": done}
    body = dataclasses.replace(body, instructions={**body.instructions, **more})
    module = dataclasses.replace(module, computations={**module.computations, "body": body})
    gather = next(c for c in found(module) if c.kind == "all-gather")
    assert (gather.role, gather.path, gather.count) == ("weights", "w", 2)
    assert ValueFlow(module).inputs_of(Place("body", "whole")) == {0}


def test_what_tpu_slices_exchange_is_a_collective():
    rendezvous = 'frontend_attributes={_xla_host_transfer_rendezvous="all-reduce_0"'
    kind = '_xla_megascale_transfer_type="ALL_REDUCE"}'
    text = with_line(
        "%total",
        f"  %t = token[] after-all()\n"
        f"  %sent = (f32[16,8], u32[], token[]) send(%part, %t), {rendezvous},{kind}\n"
        f"  %coming = (f32[16,8], u32[], token[]) recv(%t), {rendezvous},{kind}\n"
        "  %came = (f32[16,8], token[]) recv-done(%coming)\n"
        "  %total = f32[16,8] get-tuple-element(%came), index=0",
    )
    names = dataclasses.replace(NAMES, slice_axes=("data",))
    scatter, between = found(text, names)[1:]
    assert (between.kind, between.role, between.axes) == ("all-reduce", "gradients", ("data",))
    assert (between.group_size, between.bytes, between.path) == (2, 16 * 8 * 4, "w")
    assert scatter.path == "w"  # the way to the output leads over the other slice


def test_a_gradient_that_is_moved_as_bytes_is_followed():
    """A TPU copies large arrays into its vector memory in pieces, which it writes as bytes."""
    text = with_line(
        "%rate",
        "  %bytes = s8[1024] bitcast(%grad)\n"
        "  %a = ((s8[1024]), s8[512], s32[]) slice-start(%bytes), slice={[0:512]}\n"
        "  %b = ((s8[1024]), s8[512], s32[]) slice-start(%bytes), slice={[512:1024]}\n"
        "  %low = s8[512] slice-done(%a)\n"
        "  %high = s8[512] slice-done(%b)\n"
        '  %all = f32[2,16,8] custom-call(%low, %high), custom_call_target="ConcatBitcast"\n'
        "  %rate = f32[2,16,8] multiply(%all, %moments)",
    )
    assert {(c.role, c.path) for c in found(text)[1:]} == {("gradients", "w")}


def test_a_reduction_has_the_dtype_that_it_adds_in():
    """A TPU reads 16-bit operands and sums them in the result's float32."""
    text = LOOP.replace(
        "%total = f32[16,8] all-reduce(%part)", "%total = f32[16,8] all-reduce(%low)"
    )
    reduce = next(c for c in found(text) if c.kind == "all-reduce")
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
    first, second = found(text)
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
    scatter = next(c for c in found(text) if c.kind == "reduce-scatter")
    assert (scatter.dtype, scatter.bytes) == ("bf16", 64 * 8 * 2)
