"""Reads the text of a compiled program: its computations, instructions, loops and source lines.

Only what the check needs is read. The text is XLA's optimised HLO, as `compiled.as_text()` gives
it; its grammar is not promised, so that whatever is not understood is left as text in `attributes`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping
from typing import TypeAlias

_BITS = {"pred": 8, "s4": 4, "u4": 4, "s2": 2, "u2": 2, "bf16": 16, "c64": 64, "c128": 128}
_FLOATS = ("f64", "f32", "f16", "bf16")


@dataclasses.dataclass(frozen=True)
class Shape:
    """One array: `bf16[512,64]`, and the memory it lives in."""

    dtype: str
    dims: tuple[int, ...]
    space: int = 0  # 0 is HBM; on a TPU 1 is the on-chip VMEM, others are scalar memory and flags

    @property
    def elements(self) -> int:
        """How many values it has."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """How much memory it takes, padding left out."""
        return math.ceil(self.elements * _bits(self.dtype) / 8)

    @property
    def itemsize(self) -> float:
        """The bytes of one value."""
        return _bits(self.dtype) / 8

    @property
    def is_float(self) -> bool:
        """Whether a policy could have moved it: float64, float32, float16 or bfloat16."""
        return self.dtype in _FLOATS

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


def _bits(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    match = re.match(r"[a-z]+(\d+)", dtype)  # f32, s8, u32, f8e4m3fn
    return int(match[1]) if match else 0  # token, opaque


Type: TypeAlias = "Shape | tuple[Type, ...]"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    type: Type
    opcode: str
    operands: tuple[str, ...]  # names, in the same computation
    arguments: str  # what stands between the parentheses, for constants and parameters
    attributes: str  # all that follows them
    is_root: bool

    @functools.cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """The arrays of the result, tuples flattened."""
        return tuple(leaves(self.type))

    @property
    def op_name(self) -> str:
        """JAX's name for what this was: 'jit(step)/transpose(jvp())/dot_general'."""
        match = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return match[1].replace("\\'", "'") if match else ""

    @property
    def rendezvous(self) -> str:
        """What the two ends of a transfer between TPU slices have in common; '' elsewhere."""
        match = re.search(r'_xla_host_transfer_rendezvous="([^"]*)"', self.attributes)
        return match[1] if match else ""

    @property
    def is_call(self) -> bool:
        """Whether it runs one computation on its operands: a fusion, a call, and either begun."""
        if self.opcode in ("fusion", "call", "call-start"):
            return True
        return self.opcode.endswith("-start") and self.called("calls") is not None

    @property
    def callee(self) -> str | None:
        """The computation that a call or a fusion runs; None for anything else."""
        if not self.is_call:
            return None
        return self.called("calls") or self.called("to_apply")

    def called(self, key: str) -> str | None:
        """Returns the computation that an attribute (`calls`, `body`, `condition`) names."""
        match = re.search(rf"\b{key}=%?([\w.\-]+)", self.attributes)
        return match[1] if match else None

    def integers(self, key: str) -> tuple[int, ...]:
        """Returns the numbers of an attribute such as `dimensions={0,1}` or `index=3`."""
        match = re.search(rf"\b{key}=\{{?([\d,]*)", self.attributes)
        return tuple(int(n) for n in match[1].split(",") if n) if match else ()


@dataclasses.dataclass(frozen=True)
class Computation:
    """A function of the program: the entry, a loop's body, or what is inside a fusion."""

    name: str
    instructions: Mapping[str, Instruction]
    root: Instruction

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        """The parameters by their number."""
        found = (i for i in self.instructions.values() if i.opcode == "parameter")
        return {int(i.arguments): i for i in found}

    @functools.cached_property
    def users(self) -> dict[str, list[tuple[Instruction, int]]]:
        """For each instruction, those that read it, and as which operand."""
        found: dict[str, list[tuple[Instruction, int]]] = {}
        for instruction in self.instructions.values():
            for position, name in enumerate(instruction.operands):
                found.setdefault(name, []).append((instruction, position))
        return found


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program."""

    computations: Mapping[str, Computation]
    entry: Computation
    header: str
    frames: Mapping[int, tuple[str, ...]]  # by id: source lines, innermost first

    @functools.cached_property
    def aliases(self) -> dict[int, int]:
        """Which parameter's memory each output takes: donated buffers, by their numbers."""
        match = re.search(r"input_output_alias=\{(.*?\)) \}", self.header)
        pairs = re.findall(r"\{(\d*)\}: \((\d+)", match[1]) if match else []
        return {int(output or 0): int(parameter) for output, parameter in pairs}

    def source(self, instruction: Instruction) -> tuple[str, ...]:
        """Returns the source lines of an instruction as 'path:12 (function)', innermost first."""
        match = re.search(r"stack_frame_id=(\d+)", instruction.attributes)
        if match:
            return self.frames.get(int(match[1]), ())
        match = re.search(r'source_file="([^"]*)" source_line=(\d+)', instruction.attributes)
        return (f"{match[1]}:{match[2]}",) if match else ()


def leaves(type_: Type) -> Iterator[Shape]:
    """Yields the arrays of a type, in order."""
    if isinstance(type_, Shape):
        yield type_
    else:
        for part in type_:
            yield from leaves(part)


def parse_module(text: str) -> Module:
    """Returns a program from its text.

    Raises:
      ValueError: the text has no entry computation.
    """
    text = re.sub(r"/\*index=\d+\*/", "", text)
    computations: dict[str, Computation] = {}
    entry = None
    name, lines = "", list[Instruction]()
    for line in text.splitlines():
        if (match := _HEADER.match(line)) is not None:
            name, lines = match[2], []
            entry = name if match[1] else entry
        elif line.startswith("}") and name:
            root = next((i for i in lines if i.is_root), lines[-1])
            computations[name] = Computation(name, {i.name: i for i in lines}, root)
            name = ""
        elif name and (instruction := parse_instruction(line)) is not None:
            lines.append(instruction)
    if entry is None:
        raise ValueError("HLO text: no ENTRY computation.")
    return Module(computations, computations[entry], text.split("\n", 1)[0], _frames(text))


_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_START = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")


def parse_instruction(line: str) -> Instruction | None:
    """Returns the instruction on one line, None where the line holds none."""
    start = _START.match(line)
    if start is None:
        return None
    type_, end = _parse_type(line, start.end())
    opcode = _OPCODE.match(line, end)
    if opcode is None:
        return None
    close = _closing(line, opcode.end() - 1)
    arguments = line[opcode.end() : close]
    operands = () if opcode[1] in ("constant", "parameter") else _names(arguments)
    return Instruction(
        name=start[2],
        type=type_,
        opcode=opcode[1],
        operands=operands,
        arguments=arguments,
        attributes=line[close + 1 :],
        is_root=start[1] is not None,
    )


def _names(arguments: str) -> tuple[str, ...]:
    return tuple(re.findall(r"%([\w.\-]+)", arguments))


def _closing(line: str, start: int) -> int:
    """Returns where the parenthesis that opens at `start` is closed."""
    depth = 0
    for match in re.compile(r"[()]").finditer(line, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    return len(line)


_SHAPE = re.compile(r"([a-z]\w*)\[([^\]]*)\](\{[^}]*\})?")


def _parse_type(line: str, start: int) -> tuple[Type, int]:
    """Returns the type that starts there, and where it ends."""
    if line[start] == "(":
        parts: list[Type] = []
        position = start + 1
        while line[position] != ")":
            part, position = _parse_type(line, position)
            parts.append(part)
            position += len(line[position:]) - len(line[position:].lstrip(", "))
        return tuple(parts), position + 1
    match = _SHAPE.match(line, start)
    if match is None:  # token[] has brackets; anything else is unknown
        return (), line.index(" ", start)
    space = re.search(r"S\((\d+)\)", match[3] or "")
    dims = tuple(int(d.lstrip("<=")) for d in match[2].split(",") if d)
    return Shape(match[1], dims, int(space[1]) if space else 0), match.end()


def _frames(text: str) -> dict[int, tuple[str, ...]]:
    """Returns the source lines of every stack frame from the tables in front of the program."""
    files, functions = _table(text, "FileNames"), _table(text, "FunctionNames")
    locations, frames = _table(text, "FileLocations"), _table(text, "StackFrames")
    lines = {
        key: f"{files[_field(row, 'file_name_id')].strip(chr(34))}:{_field(row, 'line')} "
        f"({functions[_field(row, 'function_name_id')].strip(chr(34))})"
        for key, row in locations.items()
    }
    # Parents are written one higher than their number, so that 0 can mean none: a first frame,
    # which has none, then names itself.
    first = frames.get(1, "")
    offset = 1 if first and _field(first, "parent_frame_id") == 1 else 0
    found: dict[int, tuple[str, ...]] = {}
    for key in sorted(frames):  # a parent's number is smaller
        here = lines.get(_field(frames[key], "file_location_id"), "")
        found[key] = (here, *found.get(_field(frames[key], "parent_frame_id") - offset, ()))
    return found


def _table(text: str, name: str) -> dict[int, str]:
    match = re.search(rf"^{name}\n((?:\d+ .*\n)+)", text, re.MULTILINE)
    rows = (row.split(" ", 1) for row in match[1].splitlines()) if match else ()
    return {int(key): value for key, value in rows}


def _field(row: str, key: str) -> int:
    match = re.search(rf"\b{key}=(\d+)", row)
    return int(match[1]) if match else 0
