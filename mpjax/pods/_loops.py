"""Counts the runs of each computation of a compiled program, loops by their trips."""

from __future__ import annotations

import dataclasses
import math
import re

from mpjax.pods._hlo import Computation, Instruction, Module

_SAME = ("copy", "copy-start", "copy-done", "bitcast", "convert", "reshape", "opt-barrier")


@dataclasses.dataclass(frozen=True)
class Runs:
    """The number of runs of each computation in a step."""

    counts: dict[str, int]  # by computation; at least, in those of `open`
    open: frozenset[str]  # computations inside a loop whose trips are not known
    loops: tuple[Instruction, ...]  # these loops


def run_counts(module: Module) -> Runs:
    """Returns the runs of each computation in one call of the program.

    Branches count as if every one ran. A computation that is not reached, as the scalar function of
    a reduction, has no entry. A loop without a known number of trips counts once, and the
    computations in it are `open`.
    """
    counts, inside, loops = {module.entry.name: 1}, set[str](), list[Instruction]()
    # A computation stands after all that it calls. So backwards every caller is counted before the
    # computation itself.
    for computation in reversed(tuple(module.computations.values())):
        times = counts.get(computation.name)
        if times is None:
            continue
        for instruction in computation.instructions.values():
            trips = None
            if instruction.opcode == "while":
                trips = trip_count(module, computation, instruction)
                loops += [instruction] if trips is None else []
            for callee, repeats in callees(instruction, trips or 1):
                counts[callee] = counts.get(callee, 0) + times * repeats
                unknown = instruction.opcode == "while" and trips is None
                inside |= {callee} if unknown or computation.name in inside else set()
    return Runs(counts, frozenset(inside), tuple(loops))


def callees(instruction: Instruction, trips: int) -> list[tuple[str, int]]:
    """Returns the computations that an instruction runs, and how often each time."""
    if instruction.opcode == "while":
        return [(instruction.body, trips), (instruction.condition, trips + 1)]
    if instruction.is_call:
        return [(instruction.called[0], 1)]
    if instruction.opcode == "conditional":
        return [(name, 1) for name in instruction.called]
    return []


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """Returns the number of trips of a `while`; None if the program does not tell.

    CPU and GPU compilers note it. A TPU's does not: there it is (bound - start) / step, of the
    counter that the condition compares with a bound and the body adds a step to. The step is two in
    loops that overlap a product with a transfer.
    """
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.backend_config):
        return int(known[1])
    condition, body = (module.computations[name] for name in (loop.condition, loop.body))
    asked = _origin(module, _Scope(condition), condition.root.name)
    if asked.instruction.opcode != "compare":
        return None
    counter, bound = (asked.operand(module, n) for n in (0, 1))
    index, limit = _counter(module, counter), bound.instruction.constant
    if index is None or limit is None:
        return None
    start = _element(module, _called(module, computation), loop.operands[0], index)
    step = _step(module, body, index)
    if start is None or start.instruction.constant is None or not step:
        return None
    return _trips(limit - start.instruction.constant, step, asked.instruction.direction)


def _trips(distance: int, step: int, direction: str) -> int | None:
    if direction in ("LT", "NE") or (direction == "GT" and step < 0):
        return max(0, math.ceil(distance / step))
    if direction == "LE" or (direction == "GE" and step < 0):
        return max(0, math.floor(distance / step) + 1)
    return None


# -- values ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Scope:
    """A computation, and the place that it is called from, if there is one."""

    computation: Computation
    operands: tuple[str, ...] = ()
    outer: _Scope | None = None


def _called(module: Module, computation: Computation) -> _Scope:
    """Returns the scope of a computation, with its caller if there is only one."""
    callers = module.callers.get(computation.name, [])
    if len(callers) != 1 or not callers[0][1].operands or not callers[0][1].is_call:
        return _Scope(computation)
    outer, call = callers[0]
    return _Scope(computation, call.operands, _called(module, outer))


@dataclasses.dataclass(frozen=True)
class _Value:
    """The instruction that makes a value, and its scope."""

    scope: _Scope
    instruction: Instruction

    def operand(self, module: Module, number: int) -> _Value:
        return _origin(module, self.scope, self.instruction.operands[number])


def _origin(module: Module, scope: _Scope, name: str) -> _Value:
    """Returns the maker of a value: past copies, and inside fusions and calls."""
    while True:
        instruction = scope.computation.instructions[name]
        if instruction.opcode in _SAME and instruction.operands:
            name = instruction.operands[0]
        elif instruction.opcode == "parameter" and scope.outer is not None:
            scope, name = scope.outer, scope.operands[instruction.number]
        elif instruction.is_call and instruction.opcode != "async-start":
            inner = module.computations[instruction.called[0]]
            scope, name = _Scope(inner, instruction.operands, scope), inner.root.name
        elif instruction.opcode == "get-tuple-element":
            part = _element(module, scope, instruction.operands[0], instruction.tuple_index)
            return part or _Value(scope, instruction)
        else:
            return _Value(scope, instruction)


def _element(module: Module, scope: _Scope, name: str, index: int) -> _Value | None:
    """Returns an element of a tuple that is built here; None for a tuple from outside."""
    whole = _origin(module, scope, name)
    if whole.instruction.opcode != "tuple":
        return None
    return whole.operand(module, index)


def _counter(module: Module, value: _Value) -> int | None:
    """Returns the number of the element of a loop's state that a value is."""
    instruction = value.instruction
    if instruction.opcode != "get-tuple-element":
        return None
    whole = value.operand(module, 0)
    is_state = whole.instruction.opcode == "parameter" and whole.scope.outer is None
    return instruction.tuple_index if is_state else None


def _step(module: Module, body: Computation, counter: int) -> int | None:
    """Returns the step that a loop's body adds to its counter; None if it does something else."""
    last = _element(module, _Scope(body), body.root.name, counter)
    if last is None or last.instruction.opcode not in ("add", "subtract"):
        return None
    first, second = (last.operand(module, n) for n in (0, 1))
    if last.instruction.opcode == "add" and _counter(module, second) == counter:
        first, second = second, first
    step = second.instruction.constant
    if _counter(module, first) != counter or step is None:
        return None
    return step if last.instruction.opcode == "add" else -step
