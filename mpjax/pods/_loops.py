"""How often each computation of a compiled program runs: loops counted by their trips."""

from __future__ import annotations

import math
import re

from mpjax.pods._hlo import Computation, Instruction, Module

_BRANCHES = ("true_computation", "false_computation")


def run_counts(module: Module) -> dict[str, int]:
    """Returns how often each computation runs in one call of the program.

    What a branch holds counts as if every branch ran. What is not reached (the scalar functions
    inside reductions) has no entry. A loop without a known number of trips counts once.
    """
    counts = {module.entry.name: 1}
    # A computation stands in the text behind all that it calls: backwards, every caller of a
    # computation was counted before the computation itself.
    for computation in reversed(tuple(module.computations.values())):
        times = counts.get(computation.name)
        if times is None:
            continue
        for instruction in computation.instructions.values():
            for callee, repeats in callees(module, computation, instruction):
                counts[callee] = counts.get(callee, 0) + times * repeats
    return counts


def callees(
    module: Module, computation: Computation, instruction: Instruction
) -> list[tuple[str, int]]:
    """Returns the computations that an instruction runs, and how often each time."""
    if instruction.opcode == "while":
        trips = trip_count(module, computation, instruction) or 1
        names = [(instruction.called("body"), trips), (instruction.called("condition"), trips + 1)]
    elif instruction.is_call:
        names = [(instruction.callee, 1)]
    elif instruction.opcode == "conditional":
        names = [(instruction.called(key), 1) for key in _BRANCHES]
        branches = re.search(r"branch_computations=\{([^}]*)\}", instruction.attributes)
        names += [(n, 1) for n in re.findall(r"[\w.\-]+", branches[1])] if branches else []
    else:
        return []
    return [(name, times) for name, times in names if name and name in module.computations]


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """Returns how often a `while` runs its body; None where the text does not tell.

    CPU and GPU programs say so. A TPU program does not: there it is the bound in the condition,
    less what the counter starts with, by steps of what the body adds to it. Loops in which a
    product overlaps with what it sends take steps of two.
    """
    known = re.search(r'known_trip_count"?:\{"n":"(\d+)"', loop.attributes)
    if known:
        return int(known[1])
    condition = module.computations.get(loop.called("condition") or "")
    if condition is None:
        return None
    bounds = [
        int(i.arguments)
        for i in _everything(module, condition)
        if i.opcode == "constant" and re.fullmatch(r"\d+", i.arguments)
    ]
    if len(bounds) != 1:
        return None
    counters = [i for i in condition.instructions.values() if i.opcode == "get-tuple-element"]
    if len(counters) != 1:
        return bounds[0]
    counter = counters[0].integers("index")[0]
    start = _element(computation, computation.instructions[loop.operands[0]], counter) or 0
    body = module.computations[loop.called("body") or ""]
    return max(0, math.ceil((bounds[0] - start) / _step(module, body, counter)))


def _everything(module: Module, condition: Computation) -> list[Instruction]:
    """Returns the instructions of a condition, those inside its fusions too."""
    found = list(condition.instructions.values())
    for instruction in condition.instructions.values():
        inner = module.computations.get(instruction.called("calls") or "")
        found += _everything(module, inner) if inner else []
    return found


def _element(computation: Computation, state: Instruction, position: int) -> int | None:
    """Returns a value of a tuple where it is a constant."""
    if state.opcode != "tuple":
        return None
    return _constant(computation, state.operands[position])


def _constant(computation: Computation, name: str) -> int | None:
    value = _copied(computation, name)
    is_one = value.opcode == "constant" and re.fullmatch(r"\d+", value.arguments)
    return int(value.arguments) if is_one else None


def _copied(computation: Computation, name: str) -> Instruction:
    """Returns the instruction that computes a value, copies left out."""
    value = computation.instructions[name]
    while value.opcode in ("copy", "bitcast"):
        value = computation.instructions[value.operands[0]]
    return value


def _step(module: Module, body: Computation, counter: int) -> int:
    """Returns what the body of a loop adds to its counter, 1 where that is not to be seen."""
    if body.root.opcode != "tuple":
        return 1
    last = _copied(body, body.root.operands[counter])
    if (inner := module.computations.get(last.callee or "")) is not None:
        last, body = inner.root, inner
    added = [_constant(body, name) for name in last.operands] if last.opcode == "add" else []
    return next((step for step in added if step), 1)
