"""What a compiled program costs: products, convolutions, memory traffic, library calls."""

import jax
import jax.numpy as jnp
import pytest
from _hlo_text import LOOP, _cost, _hlo, _loops, parsed


def counted(module):
    return _cost.count(module, _loops.run_counts(module))


@pytest.fixture
def loop():
    return parsed(LOOP)


def test_products_and_traffic_are_multiplied_by_trips(loop):
    cost = counted(loop)
    assert cost.flops == {"bf16": 2 * (2 * 64 * 8 * 8)}
    outside = sum(_cost._traffic(loop, loop.entry, i) for i in loop.entry.instructions.values())
    parts = {name: loop.computations[name] for name in ("body", "condition")}
    each = {
        name: sum(_cost._traffic(loop, part, i) for i in part.instructions.values())
        for name, part in parts.items()
    }
    assert cost.hbm_bytes == outside + 2 * each["body"] + 3 * each["condition"]


@pytest.mark.parametrize(
    ("strides", "padding", "dilation"),
    [((1, 1), "VALID", (1, 1)), ((2, 1), "SAME", (1, 1)), ((1, 1), "SAME", (2, 2))],
)
def test_flops_of_convolutions_are_those_of_xla(strides, padding, dilation):
    def fun(x, w):
        return jax.lax.conv_general_dilated(
            x,
            w,
            strides,
            padding,
            rhs_dilation=dilation,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )

    args = jnp.ones((2, 12, 10, 3)), jnp.ones((3, 3, 3, 8))
    compiled = jax.jit(fun).lower(*args).compile()
    mine = counted(_hlo.read_module(compiled)).total_flops
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
    assert counted(parsed(text)).total_flops == 2 * 8 * 16 * 32 * 4


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
    cost = counted(parsed(text))
    assert cost.flops == {"bf16": 2 * 16 * 32 * 4}
    assert cost.uncounted == ("__cudnn$fmhaSoftmax",)


def test_an_update_in_place_costs_the_update(loop):
    body = loop.computations["body"]
    stack = _cost._traffic(loop, body, body.instructions["g2"])
    assert stack == (16 * 8 * 4) + 4 + 16 * 8 * 4  # the row read, the index, the row written
