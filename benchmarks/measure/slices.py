"""What XLA's cost analysis counts whole though a fusion reads a slice of it.

The analysis counts an operand of a fusion that is sliced first as the slice. Where the operand gets
another shape before (`bitcast`, which moves nothing), it counts the operand: all layers of a stack
of weights in each turn of a loop that takes one.
"""

from mpjax.pods._hlo import Computation, Instruction, Module

_SLICES = ("dynamic-slice", "slice")
_COUNTED_APART = (*_SLICES, "dynamic-update-slice", "broadcast", "reshape", "fusion")


def counted_in_vain(module: Module, computation: Computation) -> float:
    """Returns the bytes of the operands of a computation's fusions that none of them reads."""
    fusions = [x for x in computation.instructions.values() if x.opcode == "fusion"]
    return float(sum(_of_fusion(module.computations[x.called[0]]) for x in fusions))


def _of_fusion(fused: Computation) -> int:
    readers: dict[str, list[Instruction]] = {}
    for made in fused.instructions.values():
        for name in dict.fromkeys(made.operands):
            readers.setdefault(name, []).append(made)
    parameters = (x for x in fused.instructions.values() if x.opcode == "parameter")
    return sum(_unread(x, readers) for x in parameters)


def _unread(parameter: Instruction, readers: dict[str, list[Instruction]]) -> int:
    """Returns an operand's bytes less those of its slices, where renamed ones alone count it."""
    whole = [x for x in readers.get(parameter.name, ()) if x.opcode not in _COUNTED_APART]
    ends = [end for x in whole for end in _ends(x, readers)]
    if not ends or any(x.opcode not in _SLICES for x in ends):
        return 0
    size = sum(shape.bytes for shape in parameter.shapes)
    return max(0, size - sum(shape.bytes for end in ends for shape in end.shapes))


def _ends(made: Instruction, readers: dict[str, list[Instruction]]) -> list[Instruction]:
    """Returns what reads a value under its other shapes; the value itself if it is no such."""
    if made.opcode != "bitcast":
        return [made]
    return [end for x in readers.get(made.name, ()) for end in _ends(x, readers)] or [made]
