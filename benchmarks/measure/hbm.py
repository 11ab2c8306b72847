"""Bytes that a TPU's program moves between its chip and HBM.

XLA's cost analysis counts what is read and written wherever it lies. On a TPU much of it lies in
the chip's own memory, VMEM, and a copy of a part is counted as a copy of the whole. Here only
what lies in HBM counts, and a part as a part.
"""

from collections.abc import Iterable

from mpjax.pods._hlo import Instruction, Module, Shape

_NAMES_ONLY = frozenset(
    {"parameter", "tuple", "get-tuple-element", "bitcast", "constant", "copy-done", "async-done"}
    | {"partition-id", "after-all"}
)


def traffic(module: Module) -> int | None:
    """Returns the bytes of a compiled program, None where it has a loop.

    What a loop reads of a stacked array is told by its fusions alone; without one, each operand
    is read once, and each result written once.
    """
    instructions = module.entry.instructions
    if any(made.opcode == "while" for made in instructions.values()):
        return None
    total = 0
    for made in instructions.values():
        if made.opcode == "copy-start" or _begins_slice(module, made):
            total += _moved(*made.shapes[:2])
        elif made.opcode not in _NAMES_ONLY:
            operands = (instructions[name].shapes for name in made.operands)
            total += sum(map(_in_hbm, (made.shapes, *operands)))
    return total


def _begins_slice(module: Module, made: Instruction) -> bool:
    if made.opcode != "async-start" or made.callee is None:
        return False
    return module.computations[made.callee].root.opcode == "slice"


def _moved(source: Shape, target: Shape) -> int:
    """Returns what a copy moves: of two arrays the smaller, once for each that lies in HBM."""
    return min(source.bytes, target.bytes) * [source.space, target.space].count(0)


def _in_hbm(shapes: Iterable[Shape]) -> int:
    return sum(shape.bytes for shape in shapes if shape.space == 0)
