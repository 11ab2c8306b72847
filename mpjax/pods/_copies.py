"""Finds the mesh axes along which devices hold different copies of a value.

A value that comes from an input split over an axis, or from a device's own number
(`jax.lax.axis_index`), differs along it, until it is reduced or gathered over that axis. New state
whose sharding says that it is whole there must not differ.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from mpjax.pods._groups import DeviceGroup, along, coordinates, group_of, sends_by_itself
from mpjax.pods._hlo import Computation, Instruction, Module, Shape, Type


@dataclasses.dataclass(frozen=True)
class Differs:
    """The mesh axes along which a value differs between devices."""

    axes: frozenset[str] = frozenset()
    unsure: frozenset[str] = frozenset()  # of these it may or may not: it went round in a ring

    def __or__(self, other: Differs) -> Differs:
        if other is self or other == EQUAL:
            return self
        return (
            other if self == EQUAL else Differs(self.axes | other.axes, self.unsure | other.unsure)
        )

    def less(self, axes: Iterable[str]) -> Differs:
        """Returns the value once it is the same along some axes."""
        gone = frozenset(axes)
        return Differs(self.axes - gone, self.unsure - gone)

    @property
    def surely(self) -> frozenset[str]:
        """The axes along which it differs for sure."""
        return self.axes - self.unsure


EQUAL = Differs()


@dataclasses.dataclass(frozen=True)
class Joined:
    """Several values end to end, as GPU programs send many gradients at once."""

    parts: tuple[tuple[int, Differs], ...]  # the number of elements, and how they differ

    def map(self, change: Callable[[Differs], Differs]) -> Joined:
        """Returns the parts with a function applied to each."""
        return Joined(tuple((size, change(value)) for size, value in self.parts))

    def between(self, start: int, limit: int) -> Differs:
        """Returns how a range of its elements differs."""
        differs, position = EQUAL, 0
        for size, value in self.parts:
            if start < position + size and position < limit:
                differs |= value
            position += size
        return differs


@dataclasses.dataclass(frozen=True)
class Numbers:
    """An integer that is known on every device: its own number, or what is computed of that."""

    values: tuple[int, ...]  # in the order of the devices
    differs: Differs


Value: TypeAlias = "Differs | Joined | Numbers | tuple[Value, ...]"

# One element of the result for one of each operand, at the same place.
_BY_ELEMENT = (
    *("copy", "bitcast", "reshape", "convert", "multiply", "divide", "add", "subtract", "select"),
    *("negate", "maximum", "minimum", "reduce-precision", "copy-start"),
)
_SUMS = ("all-reduce", "all-gather", "collective-broadcast")
# What XLA finds the place along one axis of the mesh with, from the number in the whole of it.
_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "divide": lambda a, b: a // b if b else 0,
    "remainder": lambda a, b: a % b if b else 0,
    "and": operator.and_,
    "shift-right-logical": operator.rshift,
}
_KEEPS_NUMBERS = ("convert", "copy", "bitcast", "reshape", "broadcast")
_PLACES_FROM = {"dynamic-slice": 1, "dynamic-update-slice": 2}  # the first operand that is a place
_SAME = (
    *("opt-barrier", "copy-done", "all-gather-done", "all-reduce-done", "async-done"),
    *("collective-permute-done", "reduce-scatter-done", "add-dependency", "domain"),
    *("send-done", "recv-done"),
)


def outputs_that_differ(
    module: Module,
    inputs: Mapping[int, frozenset[str]],
    mesh: Mapping[str, int],
    slice_axes: Sequence[str],
) -> list[Differs]:
    """Returns for each result of a program along which axes the devices' values differ.

    Args:
      module: the compiled program.
      inputs: the axes that split each parameter, by its number.
      mesh: axis sizes, in the order of the devices.
      slice_axes: mesh axes whose devices are on several TPU slices.
    """
    reader = _Reader(module, mesh, slice_axes)
    entry = module.entry
    given = tuple(
        _like(entry.parameters[n].type, Differs(inputs.get(n, frozenset())))
        for n in sorted(entry.parameters)
    )
    result = reader.evaluate(entry.name, given)
    parts = result if isinstance(result, tuple) else (result,)
    return [_joined(part) for part in parts]


class _Reader:
    """Computes how values differ, computation by computation."""

    def __init__(self, module: Module, mesh: Mapping[str, int], slice_axes: Sequence[str]) -> None:
        self._module, self._mesh = module, mesh
        self._slices = along(slice_axes, mesh)
        self._everywhere = frozenset(axis for axis, size in mesh.items() if size > 1)
        self._count = math.prod(mesh.values())
        self.evaluate = functools.cache(self._evaluate)

    def _evaluate(self, name: str, given: tuple[Value, ...]) -> Value:
        computation = self._module.computations[name]
        values: dict[str, Value] = {}
        ends = any(i.opcode == "recv" for i in computation.instructions.values())
        for _ in range(2 if ends else 1):  # a receive may stand in front of its send
            for instruction in computation.instructions.values():
                values[instruction.name] = self._value(computation, instruction, values, given)
        return values[computation.root.name]

    def _value(
        self,
        computation: Computation,
        instruction: Instruction,
        values: Mapping[str, Value],
        given: tuple[Value, ...],
    ) -> Value:
        opcode = instruction.opcode
        operands = [values[name] for name in instruction.operands]
        if (numbers := self._numbers(computation, instruction, operands)) is not None:
            return numbers
        if opcode == "parameter":
            return given[instruction.number]
        if opcode == "tuple":
            return tuple(operands)
        if opcode == "get-tuple-element":
            whole = operands[0]
            return whole[instruction.tuple_index] if isinstance(whole, tuple) else whole
        if opcode in _SAME:
            return operands[0]
        if opcode in ("while", "conditional") or instruction.is_call or opcode == "async-update":
            return self._of_computations(computation, instruction, operands)
        if opcode == "recv":
            operands = [values.get(name, EQUAL) for name in _sent(computation, instruction)]
        kind = opcode.removesuffix("-start")
        if kind in (*_SUMS, "reduce-scatter", "collective-permute") or opcode == "recv":
            return self._of_collective(kind, instruction, operands)
        if (parts := _end_to_end(computation, instruction, operands)) is not None:
            return parts
        if (first := _PLACES_FROM.get(opcode)) is not None:
            # Parts that each device cuts out, or puts in, at a place of its own may be the same.
            operands[first:] = [_perhaps(value) for value in operands[first:]]
        joined = _joined(tuple(operands))
        if opcode in ("infeed", "outfeed") or (
            opcode == "custom-call" and sends_by_itself(instruction)
        ):
            joined |= Differs(unsure=self._everywhere)
        return _like(instruction.type, joined)

    def _numbers(
        self, computation: Computation, instruction: Instruction, operands: list[Value]
    ) -> Numbers | None:
        """Returns an integer that is known on every device; None for anything else."""
        opcode = instruction.opcode
        if opcode == "partition-id":
            # Only the author's own: what XLA's partitioner makes of the number comes out equal.
            asked = instruction.op_name.rpartition("/")[2] == "axis_index"
            return self._of_devices(range(self._count)) if asked else None
        if not any(isinstance(value, Numbers) for value in operands):
            return None
        if opcode in _KEEPS_NUMBERS and instruction.shapes[0].elements == 1:
            return operands[0] if isinstance(operands[0], Numbers) else None
        if opcode not in _ARITHMETIC or len(operands) != 2:
            return None
        pairs = zip(instruction.operands, operands, strict=True)
        sides = [self._side(computation.instructions[name], value) for name, value in pairs]
        left, right = sides
        if left is None or right is None:
            return None
        return self._of_devices(map(_ARITHMETIC[opcode], left, right))

    def _side(self, instruction: Instruction, value: Value) -> Sequence[int] | None:
        if isinstance(value, Numbers):
            return value.values
        return None if instruction.constant is None else (instruction.constant,) * self._count

    def _of_devices(self, values: Iterable[int]) -> Numbers:
        known = tuple(values)
        axes = (axis for axis in self._everywhere if self._varies(known, axis))
        return Numbers(known, Differs(frozenset(axes)))

    def _varies(self, values: Sequence[int], axis: str) -> bool:
        """Whether devices whose places differ along one axis alone have different numbers."""
        seen: dict[tuple[int, ...], int] = {}
        for device, number in enumerate(values):
            place = coordinates(device, self._mesh) | {axis: 0}
            if seen.setdefault(tuple(place.values()), number) != number:
                return True
        return False

    def _of_computations(
        self, computation: Computation, instruction: Instruction, operands: list[Value]
    ) -> Value:
        if instruction.opcode == "while":
            return self._of_loop(instruction, operands[0])
        if instruction.opcode == "conditional":
            pairs = zip(instruction.called, operands[1:], strict=True)
            branches = [self.evaluate(name, (value,)) for name, value in pairs]
            # Where the choice differs between devices, so do results, of different branches.
            return _spread(functools.reduce(_join, branches), _joined(operands[0]))
        if instruction.opcode == "async-update":
            begun = computation.instructions[instruction.operands[0]]
            if begun.operands or begun.opcode != "async-start":
                return operands[0]
            return self.evaluate(begun.called[0], tuple(operands[1:]))  # a SparseCore's
        if instruction.opcode == "async-start" and not operands:
            return EQUAL
        return self.evaluate(instruction.called[0], tuple(operands))

    def _of_loop(self, instruction: Instruction, state: Value) -> Value:
        """Returns how a loop's state differs: a turn spreads differences until nothing is added."""
        while True:
            turned = _join(state, self.evaluate(instruction.body, (state,)))
            asked = _joined(self.evaluate(instruction.condition, (turned,)))
            turned = _spread(turned, asked)  # devices that stop at different turns differ
            if turned == state:
                return state
            state = turned

    def _of_collective(self, kind: str, instruction: Instruction, operands: list[Value]) -> Value:
        if kind == "recv":
            between = instruction.attributes.get("_xla_megascale_transfer_type", "")
            group, joins = self._slices, between in ("ALL_REDUCE", "ALL_GATHER")
        else:
            group = group_of(instruction, self._mesh)
            joins = kind in _SUMS and group.whole
        # Of several arrays each is sent by itself.
        values = [_each(value, lambda v: _sent_on(kind, v, group, joins)) for value in operands]
        if kind == "recv":
            return _like(instruction.type, _joined(tuple(values)))
        return values[0] if len(values) == 1 else tuple(values)


def _sent_on(kind: str, value: Differs, group: DeviceGroup, joins: bool) -> Differs:
    """Returns how a value differs after a collective, which makes it equal along axes or not."""
    if kind == "reduce-scatter":  # each device has a part of the sum
        return value | Differs(frozenset(group.axes))
    if joins:
        return value.less(group.axes)
    # Handed on from device to device in a ring: in the end every device has all chunks, but at
    # one moment each has another.
    return Differs(value.axes, value.unsure | frozenset(group.axes))


def _end_to_end(
    computation: Computation, instruction: Instruction, operands: Sequence[Value]
) -> Value | None:
    """Returns the result of an instruction that joins parts end to end, or cuts them out again."""
    shape = instruction.type
    if not isinstance(shape, Shape):
        return None
    if instruction.opcode == "concatenate" and len(shape.dims) == 1:
        sizes = [computation.instructions[name].shapes[0].elements for name in instruction.operands]
        return Joined(tuple(zip(sizes, map(_joined, operands), strict=True)))
    if not any(isinstance(value, Joined) for value in operands):
        return None
    if instruction.opcode == "slice" and isinstance(operands[0], Joined):
        (place,) = instruction.proto.messages(17)
        return operands[0].between(place.integer(1), place.integer(2))
    whole = [value for value in operands if isinstance(value, Joined)]
    # Elementwise, parts stay apart only if all operands are cut at the same places.
    sizes = {tuple(size for size, _ in value.parts) for value in whole}
    keeps = sum(next(iter(sizes))) == shape.elements and len(shape.dims) == 1
    if instruction.opcode not in _BY_ELEMENT or len(sizes) > 1 or not keeps:
        return None
    others = _joined(tuple(value for value in operands if not isinstance(value, Joined)))
    columns = zip(*(value.parts for value in whole), strict=True)
    return Joined(
        tuple(
            (column[0][0], functools.reduce(Differs.__or__, [v for _, v in column], others))
            for column in columns
        )
    )


def _each(value: Value, change: Callable[[Differs], Differs]) -> Value:
    return value.map(change) if isinstance(value, Joined) else change(_joined(value))


def _sent(computation: Computation, received: Instruction) -> list[str]:
    """Returns the value that the other slices send to a `recv`."""
    return [
        i.operands[0]
        for i in computation.instructions.values()
        if i.opcode == "send" and i.rendezvous and i.rendezvous == received.rendezvous
    ]


def _perhaps(value: Value) -> Differs:
    """Returns a value of which nothing is sure."""
    axes = _joined(value).axes
    return Differs(axes, axes)


def _like(type_: Type, value: Differs) -> Value:
    return value if isinstance(type_, Shape) else tuple(_like(part, value) for part in type_)


def _joined(value: Value) -> Differs:
    """Returns the axes along which any part of a value differs."""
    if isinstance(value, Differs):
        return value
    if isinstance(value, Numbers):
        return value.differs
    parts = [v for _, v in value.parts] if isinstance(value, Joined) else map(_joined, value)
    return functools.reduce(Differs.__or__, parts, EQUAL)


def _join(a: Value, b: Value) -> Value:
    if a == b:
        return a
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        return tuple(map(_join, a, b))
    return _joined(a) | _joined(b)


def _spread(value: Value, more: Differs) -> Value:
    """Returns a value with every part differing along more axes."""
    if isinstance(value, tuple):
        return tuple(_spread(part, more) for part in value)
    return _each(value, lambda v: v | more)
