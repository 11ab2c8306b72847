"""What calls of a GPU's libraries cost, which XLA's own cost analysis counts as nothing.

cuDNN's convolutions and attention and cuBLAS's products are `custom-call`s: as bytes, their
operands and results; as flops, two for every product of a convolution's or attention's definition.
"""

import math

from mpjax.pods._hlo import Computation, Instruction, Shape

_DIMENSIONS, _MADE_FEATURES = 16, 4  # of a convolution, and which axis of its kernel those are


def cost(computation: Computation) -> dict[str, float]:
    """Returns the bytes and flops of the library calls in one computation."""
    found = {"bytes accessed": 0.0, "flops": 0.0}
    for call in computation.instructions.values():
        if call.opcode != "custom-call" or not call.target.startswith("__cu"):
            continue
        operands = [computation.instructions[name].shapes for name in call.operands]
        arrays = [shape for shapes in (*operands, call.shapes) for shape in shapes]
        found["bytes accessed"] += sum(shape.bytes for shape in arrays)
        if "conv" in call.target:
            found["flops"] += _convolution_flops(call, operands[0][0], operands[1][0])
        if "fmha" in call.target:
            found["flops"] += _attention_flops(call, [shapes[0] for shapes in operands])
    return found


def _attention_flops(call: Instruction, operands: list[Shape]) -> float:
    """Two for each product of a number, in two products forward and five backward, all pairs.

    A kernel leaves out what causality hides; XLA, which computes it, is counted with it too.
    """
    batch, queries, heads, size = operands[0].dims
    keys = operands[1].dims[1]
    products = 5 if "Backward" in call.target else 2
    return 2.0 * products * batch * heads * queries * keys * size


def _convolution_flops(call: Instruction, first: Shape, second: Shape) -> float:
    """Two for each place of the output, each point of the kernel and each of its inputs."""
    made = call.shapes[0]
    output, kernel = {
        "__cudnn$convBackwardFilter": (second, made),
        "__cudnn$convBackwardInput": (first, second),
    }.get(call.target, (made, second))
    if not call.proto.has(_DIMENSIONS):
        raise ValueError(f"cost: {call.name!r} does not say what its dimensions are.")
    features = call.proto.message(_DIMENSIONS).integer(_MADE_FEATURES)
    return 2.0 * output.elements * math.prod(kernel.dims) / kernel.dims[features]
