"""Reads a compiled program: its computations, instructions, shapes, source lines.

JAX hands the program over as a serialized `HloModuleProto`, which is the same on all its versions
and platforms; the objects around it are not. The names and numbers of its fields are in XLA's files
`hlo.proto` and `xla_data.proto`. XLA never gives a number to another field.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from mpjax.pods._proto import Message

# XLA's `PrimitiveType`, by number, and the bits of each.
# fmt: off
_TYPES = {
    1: ("pred", 8), 30: ("s1", 1), 26: ("s2", 2), 21: ("s4", 4), 2: ("s8", 8), 3: ("s16", 16),
    4: ("s32", 32), 5: ("s64", 64), 31: ("u1", 1), 27: ("u2", 2), 22: ("u4", 4), 6: ("u8", 8),
    7: ("u16", 16), 8: ("u32", 32), 9: ("u64", 64), 10: ("f16", 16), 11: ("f32", 32),
    16: ("bf16", 16), 12: ("f64", 64), 15: ("c64", 64), 18: ("c128", 128), 19: ("f8e5m2", 8),
    28: ("f8e4m3", 8), 20: ("f8e4m3fn", 8), 23: ("f8e4m3b11fnuz", 8), 29: ("f8e3m4", 8),
    24: ("f8e5m2fnuz", 8), 25: ("f8e4m3fnuz", 8), 32: ("f4e2m1fn", 4), 33: ("f8e8m0fnu", 8),
    14: ("opaque", 0), 17: ("token", 0),
}
# fmt: on
_BITS = dict(_TYPES.values())
_TUPLE, _BUFFER = 13, 34
_FLOATS = ("f64", "f32", "f16", "bf16")
_BY_INTEGERS = (4, 5, 6, 7)  # fields of a literal: s32, s64, u32, u64


@dataclasses.dataclass(frozen=True)
class Shape:
    """One array: `bf16[512,64]`, and the memory it lives in."""

    dtype: str
    dims: tuple[int, ...]
    space: int = 0  # 0 is HBM; on a TPU 1 is the on-chip VMEM, others are scalar memory and flags

    @property
    def elements(self) -> int:
        """The number of its values."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """The bytes of its values, without padding."""
        return math.ceil(self.elements * _BITS.get(self.dtype, 0) / 8)

    @property
    def itemsize(self) -> float:
        """The bytes of one value."""
        return _BITS.get(self.dtype, 0) / 8

    @property
    def is_float(self) -> bool:
        """Whether a policy could have moved it: float64, float32, float16 or bfloat16."""
        return self.dtype in _FLOATS

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


Type: TypeAlias = "Shape | tuple[Type, ...]"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One operation of a computation; fields that only some kinds have are read when asked for."""

    name: str
    opcode: str
    operands: tuple[str, ...]  # names, in the same computation
    called: tuple[str, ...]  # names of computations
    is_root: bool
    proto: Message

    @functools.cached_property
    def type(self) -> Type:
        """The result: an array, or a tuple of results."""
        return _type(self.proto.message(3))

    @functools.cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """The arrays of the result, tuples flattened."""
        return tuple(leaves(self.type))

    @property
    def op_name(self) -> str:
        """JAX's name for the operation that this was: 'jit(step)/transpose(jvp())/dot_general'."""
        return self.proto.message(7).text(2)

    @property
    def number(self) -> int:
        """The number of a `parameter` among its computation's parameters."""
        return self.proto.integer(9)

    @property
    def tuple_index(self) -> int:
        """The number of the element that a `get-tuple-element` takes."""
        return self.proto.integer(13)

    @property
    def constant(self) -> int | None:
        """The value of a scalar integer `constant`; None for anything else."""
        literal = self.proto.message(8)
        values = [n for field in _BY_INTEGERS for n in literal.integers(field)]
        return values[0] if self.opcode == "constant" and len(values) == 1 else None

    @property
    def target(self) -> str:
        """The function of a library or of the compiler that a `custom-call` runs; '' elsewhere."""
        return self.proto.text(28)

    @property
    def direction(self) -> str:
        """The comparison of a `compare`: 'LT', 'LE', 'GT', 'GE', 'EQ' or 'NE'; '' elsewhere."""
        return self.proto.text(63)

    @property
    def backend_config(self) -> str:
        """The notes of the platform's compiler, mostly JSON."""
        return self.proto.text(43)

    @functools.cached_property
    def attributes(self) -> dict[str, str]:
        """The notes of the front end, by name: `chain_id`, the names of transfers."""
        pairs = self.proto.message(68).messages(1)
        return {pair.text(1): pair.text(2) for pair in pairs}

    @property
    def rendezvous(self) -> str:
        """The name that both ends of a transfer between TPU slices share; '' elsewhere."""
        return self.attributes.get("_xla_host_transfer_rendezvous", "")

    @property
    def is_call(self) -> bool:
        """Whether it runs one computation on its operands: a fusion, a call, or a start of one."""
        return self.opcode in ("fusion", "call", "async-start") and bool(self.called)

    @property
    def callee(self) -> str | None:
        """The computation that a call or a fusion runs; None for anything else."""
        return self.called[0] if self.is_call else None

    @property
    def body(self) -> str:
        """The computation that a `while` repeats."""
        return self.called[0]

    @property
    def condition(self) -> str:
        """The computation that says whether a `while` goes on."""
        return self.called[1]


@dataclasses.dataclass(frozen=True)
class Computation:
    """A function of the program: the entry, a loop's body, or the inside of a fusion."""

    name: str
    instructions: Mapping[str, Instruction]
    root: Instruction

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        """The parameters by their number."""
        parameters = (i for i in self.instructions.values() if i.opcode == "parameter")
        return {i.number: i for i in parameters}

    @functools.cached_property
    def users(self) -> dict[str, list[tuple[Instruction, int]]]:
        """For each instruction, its readers, each with the number of the operand."""
        readers: dict[str, list[tuple[Instruction, int]]] = {}
        for instruction in self.instructions.values():
            for position, name in enumerate(instruction.operands):
                readers.setdefault(name, []).append((instruction, position))
        return readers


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program; a computation stands after all that it calls."""

    computations: Mapping[str, Computation]
    entry: Computation
    aliases: Mapping[int, int]  # output → the parameter whose memory it takes, by their numbers
    frames: Mapping[int, tuple[str, ...]]  # by id: source lines, innermost first

    @functools.cached_property
    def callers(self) -> dict[str, list[tuple[Computation, Instruction]]]:
        """For each computation, the calls, fusions, loops and branches that run it."""
        calls: dict[str, list[tuple[Computation, Instruction]]] = {}
        for computation in self.computations.values():
            for instruction in computation.instructions.values():
                if instruction.is_call or instruction.opcode in ("while", "conditional"):
                    for name in instruction.called:
                        calls.setdefault(name, []).append((computation, instruction))
        return calls

    def source(self, instruction: Instruction) -> tuple[str, ...]:
        """Returns the source lines of an instruction as 'path:12 (function)', innermost first."""
        metadata = instruction.proto.message(7)
        if frame := metadata.integer(15):
            return self.frames.get(frame, ())
        file = metadata.text(3)
        return (f"{file}:{metadata.integer(4)}",) if file else ()


def leaves(type_: Type) -> Iterator[Shape]:
    """Yields the arrays of a type, in order."""
    if isinstance(type_, Shape):
        yield type_
    else:
        for part in type_:
            yield from leaves(part)


def read_module(compiled: Any) -> Module:
    """Returns the program that `jax.stages.Lowered.compile` made."""
    modules = compiled.runtime_executable().hlo_modules()
    return parse_module(modules[0].as_serialized_hlo_module_proto())


def parse_module(data: bytes) -> Module:
    """Returns a program from a serialized `HloModuleProto`.

    Raises:
      ValueError: the bytes are none, or have no entry computation.
    """
    proto = Message(data)
    protos = list(proto.messages(3))
    names = {computation.integer(5): computation.text(1) for computation in protos}
    computations = [_computation(computation, names) for computation in protos]
    entry = names.get(proto.integer(6))
    if entry is None:
        raise ValueError("HLO module: no entry computation.")
    by_name = {computation.name: computation for computation in computations}
    return Module(by_name, by_name[entry], _aliases(proto.message(8)), _frames(proto.message(17)))


def _computation(proto: Message, names: Mapping[int, str]) -> Computation:
    protos, root = list(proto.messages(2)), proto.integer(6)
    own = {instruction.integer(35): instruction.text(1) for instruction in protos}
    instructions = [
        Instruction(
            name=instruction.text(1),
            opcode=instruction.text(2),
            operands=tuple(own[i] for i in instruction.integers(36)),
            called=tuple(names[i] for i in instruction.integers(38)),
            is_root=instruction.integer(35) == root,
            proto=instruction,
        )
        for instruction in protos
    ]
    by_name = {instruction.name: instruction for instruction in instructions}
    return Computation(proto.text(1), by_name, by_name[own[root]])


def _type(proto: Message) -> Type:
    kind = proto.integer(2)
    if kind in (_TUPLE, _BUFFER):
        parts = tuple(map(_type, proto.messages(4)))
        return parts[0] if kind == _BUFFER and parts else parts
    dtype, _ = _TYPES.get(kind, ("unknown", 0))
    return Shape(dtype, proto.integers(3), proto.message(5).integer(8))


def _aliases(proto: Message) -> dict[int, int]:
    inputs: dict[int, int] = {}
    for entry in proto.messages(1):
        output = entry.integers(1)
        inputs[output[0] if output else 0] = entry.integer(2)
    return inputs


def _frames(proto: Message) -> dict[int, tuple[str, ...]]:
    """Returns the source lines of every stack frame; all ids count from 1, 0 is none."""
    files, functions = proto.texts(1), proto.texts(2)
    lines = [
        f"{files[at.integer(1) - 1]}:{at.integer(3)} ({functions[at.integer(2) - 1]})"
        for at in proto.messages(3)
    ]
    stacks: dict[int, tuple[str, ...]] = {}
    for number, frame in enumerate(proto.messages(4), 1):  # a parent stands before
        stacks[number] = (lines[frame.integer(1) - 1], *stacks.get(frame.integer(2), ()))
    return stacks
