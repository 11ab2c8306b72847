"""Counts the products and the memory traffic of a compiled program on one device.

XLA's own `cost_analysis` counts the body of a loop once and is absent on GPUs; here a body counts
as often as it runs, on every target alike.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import re

from mpjax.pods._hlo import Computation, Instruction, Module, Shape
from mpjax.pods._loops import Runs
from mpjax.pods._proto import Message

HBM = 0
_FREE = (
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "iota"),
    *("while", "conditional", "call", "partition-id", "replica-id", "opt-barrier"),
    *("add-dependency", "domain"),
)
_CALLS = ("call", "async-start")  # their computations read and write memory themselves
# Part of a line's work is in its other half.
_HALVES = ("-done", "-update")
# Fields of an instruction: of a product, of a convolution.
_DOT, _WINDOW, _DIMENSIONS, _BATCH_GROUPS = 30, 15, 16, 58
# cuDNN's names, with the one of (input, filter, output) that a convolution computes.
_CUDNN = {"convBackwardInput": 0, "convBackwardFilter": 1}


@dataclasses.dataclass(frozen=True)
class Cost:
    """Counts for one device and one step."""

    flops: dict[str, int]  # of products, by the dtype of their operands
    hbm_bytes: int  # read and written by the operations that are left after fusion
    uncounted: tuple[str, ...]  # library calls of which only the memory traffic is counted

    @property
    def total_flops(self) -> int:
        """The products of all dtypes."""
        return sum(self.flops.values())


def count(module: Module, runs: Runs) -> Cost:
    """Returns the cost of a program, each computation as often as it runs."""
    times = runs.counts
    inside = _fused(module)
    flops: collections.Counter[str] = collections.Counter()
    traffic, uncounted = 0, set[str]()
    for computation in module.computations.values():
        repeats = times.get(computation.name, 0)
        for instruction in computation.instructions.values() if repeats else ():
            work = product_flops(computation, instruction)
            if work:
                flops[_operand_dtype(computation, instruction)] += work * repeats
            elif work is None:
                uncounted.add(instruction.target)
            if computation.name not in inside:
                traffic += _traffic(module, computation, instruction) * repeats
    return Cost(dict(flops), traffic, tuple(sorted(uncounted)))


def _fused(module: Module) -> set[str]:
    """Returns the computations inside fusions: their values stay on the chip."""
    names = set[str]()
    # Reversed: a computation stands after all that it calls.
    for computation in reversed(tuple(module.computations.values())):
        for instruction in computation.instructions.values():
            fused = instruction.is_call and instruction.opcode not in _CALLS
            callee = instruction.callee
            if callee and (fused or computation.name in names):
                names.add(callee)
    return names


# -- products --------------------------------------------------------------------------------------


def product_flops(computation: Computation, instruction: Instruction) -> int | None:
    """Returns the FLOPs of a product, 2mnk of matrices; None for a library call of unknown work."""
    if instruction.opcode == "dot":
        return _dot(computation, instruction, instruction.proto.message(_DOT).integers(1))
    if instruction.opcode == "convolution":
        return _convolution(computation, instruction, result=2)
    if instruction.opcode != "custom-call":
        return 0
    target = instruction.target
    if "gemm" in target or target.endswith("matmul") or "$matmul" in target:
        numbers = re.search(
            r'"lhs_contracting_dimensions":(\[[^\]]*\])', instruction.backend_config
        )
        if numbers is not None:
            return _dot(computation, instruction, tuple(map(int, json.loads(numbers[1]))))
    if target.startswith("__cudnn$conv"):
        kind = target.removeprefix("__cudnn$")
        return _convolution(computation, instruction, result=_CUDNN.get(kind, 2))
    is_library = target.startswith(("__cu", "__onednn")) or "custom_call" in target
    return None if is_library else 0


def _dot(computation: Computation, instruction: Instruction, contracted: tuple[int, ...]) -> int:
    left = _operands(computation, instruction)[0]
    return 2 * instruction.shapes[0].elements * math.prod(left.dims[d] for d in contracted)


def _convolution(computation: Computation, instruction: Instruction, *, result: int) -> int:
    """Returns the work of a convolution, padding and dilation left out.

    Args:
      computation: that holds it.
      instruction: whose dims are labelled as input, filter and output.
      result: which of the three it computes; cuDNN labels a gradient as its forward pass.
    """
    operands = _operands(computation, instruction)
    numbers = instruction.proto.message(_DIMENSIONS)
    if len(operands) < 2 or not instruction.proto.has(_DIMENSIONS):
        return 0
    roles = [operands[0], operands[1]]
    roles.insert(result, instruction.shapes[0])
    image, kernel, output = roles[:3]
    sides = [image.dims[axis] for axis in numbers.integers(11)]
    made = [output.dims[axis] for axis in numbers.integers(12)]
    windows = map(_Window, instruction.proto.message(_WINDOW).messages(1))
    places = math.prod(w.valid(a, b) for w, a, b in zip(windows, sides, made, strict=True))
    batch = output.dims[numbers.integer(9)] * output.dims[numbers.integer(10)]
    features = kernel.dims[numbers.integer(3)]
    return 2 * batch * features * places // max(instruction.proto.integer(_BATCH_GROUPS), 1)


class _Window:
    """The window of a convolution along one axis: size, stride, padding and dilations."""

    def __init__(self, proto: Message) -> None:
        self._size, self._stride, self._low = (proto.integer(n) for n in (1, 2, 3))
        self._right, self._left = (max(proto.integer(n), 1) for n in (5, 6))

    def valid(self, size: int, out: int) -> int:
        """Returns the number of pairs of filter and output positions that meet an input value.

        TPU programs write batched products as convolutions whose windows mostly miss.
        """
        window, stride, left = self._size, self._stride, self._left
        reach = (size - 1) * left + 1
        if window * out > 1 << 22:  # too many to look at; all of them, as if none were padding
            return window * min(out, size)
        offsets = [k * self._right - self._low for k in range(window)]
        return sum(
            0 <= (at := o * stride + offset) < reach and at % left == 0
            for o in range(out)
            for offset in offsets
        )


def _operand_dtype(computation: Computation, instruction: Instruction) -> str:
    """Returns the wider dtype of a product's two operands: it decides how fast it is."""
    dtypes = [shape.dtype for shape in _operands(computation, instruction)[:2]]
    return max(dtypes, key=lambda dtype: (Shape(dtype, ()).bytes, dtype))


def _operands(computation: Computation, instruction: Instruction) -> list[Shape]:
    shapes = (computation.instructions[name].shapes for name in instruction.operands)
    return [shape[0] for shape in shapes if shape]


# -- memory ----------------------------------------------------------------------------------------


def _traffic(module: Module, computation: Computation, instruction: Instruction) -> int:
    """Returns the bytes that an operation reads from HBM and writes to it."""
    if instruction.opcode in _FREE or instruction.opcode.endswith(_HALVES):
        return 0
    operands = [computation.instructions[name] for name in instruction.operands]
    if instruction.opcode in ("dynamic-slice", "slice", "gather"):
        return 2 * _hbm(instruction.shapes)
    if instruction.opcode == "dynamic-update-slice":
        return 2 * _hbm(operands[1].shapes)
    inner = module.computations.get(instruction.callee or "")
    if instruction.opcode in _CALLS:
        return 0  # the computation that it runs is counted by itself
    if inner is None:
        results = instruction.shapes
        if instruction.opcode.endswith("-start"):  # (operands, results): both are named once
            return _hbm(results)
        return _hbm(results) + sum(_hbm(operand.shapes) for operand in operands)
    reads = sum(_read(inner, number, operand) for number, operand in enumerate(operands))
    return reads + _written(inner, instruction)


def _read(inner: Computation, number: int, operand: Instruction) -> int:
    """Returns the bytes that a fusion reads of one operand: of slices, if it only takes slices."""
    parameter = inner.parameters.get(number)
    if parameter is None or not _hbm(operand.shapes):
        return 0
    users = inner.users.get(parameter.name, [])
    if users and all(u.opcode in ("dynamic-slice", "slice", "gather") and p == 0 for u, p in users):
        return sum(shape.bytes for user, _ in users for shape in user.shapes)
    if users and all(u.opcode == "dynamic-update-slice" and p == 0 for u, p in users):
        return 0  # updated in place
    return _hbm(operand.shapes)


def _written(inner: Computation, instruction: Instruction) -> int:
    """Returns the bytes that a fusion writes: of the update alone, if it updates in place."""
    root = inner.root
    parts = [inner.instructions[n] for n in root.operands] if root.opcode == "tuple" else [root]
    results = instruction.shapes
    if len(parts) != len(results):
        return _hbm(results)
    total = 0
    for part, shape in zip(parts, results, strict=True):
        while part.opcode in ("bitcast", "copy", "convert") and part.operands:
            part = inner.instructions[part.operands[0]]
        if part.opcode == "dynamic-update-slice" and shape.space == HBM:
            total += sum(s.bytes for s in inner.instructions[part.operands[1]].shapes)
        else:
            total += _hbm((shape,))
    return total


def _hbm(shapes: tuple[Shape, ...]) -> int:
    return sum(shape.bytes for shape in shapes if shape.space == HBM)
