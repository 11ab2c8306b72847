"""What a compiled program sends between devices: each collective with its dtype, bytes and role."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from mpjax.pods._flow import Flow, Place
from mpjax.pods._hlo import Computation, Instruction, Module, Shape
from mpjax.pods._loops import run_counts

Role: TypeAlias = Literal["weights", "gradients", "updates", "activations", "scalars"]
"""What is sent: a parameter to compute with · its gradient · the new value of a parameter or of
optimizer state · something that is neither · a few numbers."""

FEW = 32
"""Arrays of fewer values are 'scalars': losses and norms, several of them in one message."""

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One array that is sent, and how often."""

    kind: str  # of KINDS
    role: Role
    dtype: str  # 'bf16', as HLO spells it
    shape: tuple[int, ...]  # the whole array, as one device has it before or after
    bytes: int  # of that array, once
    count: int  # how often in a step: the trips of the loops around it
    axes: tuple[str, ...]  # of the mesh; empty where they are not known
    group_size: int
    path: str  # of the parameter, gradient or state; empty where it is none
    source: str  # the user's line, 'train.py:12 (loss_fn)'

    @property
    def total_bytes(self) -> int:
        """The bytes of the array, times `count`."""
        return self.bytes * self.count

    @property
    def wire_bytes(self) -> int:
        """What one device sends in a step, by the ring algorithm."""
        n = max(self.group_size, 1)
        factor = {"all-reduce": 2 * (n - 1) / n, "collective-permute": 1.0}
        return round(factor.get(self.kind, (n - 1) / n) * self.total_bytes)

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as plain values, for JSON."""
        return dataclasses.asdict(self) | {
            "shape": list(self.shape),
            "axes": list(self.axes),
            "wire_bytes": self.wire_bytes,
        }

    def __str__(self) -> str:
        dims = ",".join(map(str, self.shape))
        what = self.path or self.source or "unnamed"
        return f"{self.kind} {self.dtype}[{dims}] of {what} x {self.count}"


@dataclasses.dataclass(frozen=True)
class Names:
    """What the check knows of a program from its arguments: the paths of inputs and outputs."""

    inputs: Mapping[int, str]
    outputs: Mapping[int, str]
    state_inputs: frozenset[int]  # the parameters, optimizer state, and so on
    state_outputs: frozenset[int]
    mesh: Mapping[str, int]  # axis sizes, in the order of the devices
    slice_axes: tuple[str, ...] = ()  # those whose devices are on several TPU slices


def find_collectives(
    module: Module, names: Names, name_source: Callable[[Sequence[str]], str]
) -> tuple[Collective, ...]:
    """Returns what a program sends.

    Args:
      module: the compiled program.
      names: of its inputs and outputs.
      name_source: picks the line to name among those that led to an instruction.
    """
    flow, counts = Flow(module), run_counts(module)
    found: dict[Any, Collective] = {}
    for computation in module.computations.values():
        if computation.name not in counts:
            continue
        for instruction in computation.instructions.values():
            kind = _kind(computation, instruction)
            if kind is None:
                continue
            groups = _groups(instruction, names)
            if groups[1] == 1:
                continue  # along a mesh axis of one device: nothing is sent, nothing rounds
            parts = _parts(computation, instruction, kind)
            for position, shape in enumerate(parts):
                place = Place(
                    computation.name, instruction.name, (position,) if len(parts) > 1 else ()
                )
                operand = Place(computation.name, instruction.operands[position])
                dtype = _dtype(module, computation, instruction, position, shape)
                shape = dataclasses.replace(shape, dtype=dtype)
                role, path = _role(kind, shape, flow, (operand, place), names)
                collective = Collective(
                    kind=kind,
                    role=role,
                    dtype=dtype,
                    shape=shape.dims,
                    bytes=shape.bytes,
                    count=counts[computation.name],
                    axes=groups[0],
                    group_size=groups[1],
                    path=path,
                    source=_source(module, computation, instruction, name_source),
                )
                key = _once(computation, instruction, position)
                if key not in found or (path and not found[key].path):
                    found[key] = collective
    return tuple(found.values())


def _kind(computation: Computation, instruction: Instruction) -> str | None:
    """Returns what an instruction is of `KINDS`; between TPU slices it is written as a `send`.

    A TPU program names a fusion `all-reduce-scatter` in which a sum and a slice are done in one.
    """
    if instruction.opcode == "send":
        between = re.search(r'_xla_megascale_transfer_type="(\w+)"', instruction.attributes)
        return between[1].lower().replace("_", "-") if between else None
    kind = instruction.opcode.removesuffix("-start")
    if kind == "all-reduce" and computation.name.startswith("all-reduce-scatter"):
        return "reduce-scatter"
    return kind if kind in KINDS else None


def _source(
    module: Module,
    computation: Computation,
    instruction: Instruction,
    name_source: Callable[[Sequence[str]], str],
) -> str:
    """Returns the line to name, of what is sent or else of what reads it.

    What a TPU's compiler makes of a scatter and a reduction in one has no line of its own.
    """
    operands = (computation.instructions[name] for name in instruction.operands)
    users = (user for user, _ in computation.users.get(instruction.name, ()))
    near = itertools.chain([instruction], operands, users)
    return next(filter(None, (name_source(module.source(i)) for i in near)), "")


def _once(computation: Computation, instruction: Instruction, position: int) -> Any:
    """Returns what the parts have in common into which a TPU program splits one collective.

    They stand in several fusions, so that it overlaps with what these compute.
    """
    chain = re.search(r'chain_id="(\d+)"', instruction.attributes)
    if chain is None:
        return computation.name, instruction.name, position
    shapes = tuple(map(str, instruction.shapes))
    return chain[1], instruction.op_name, shapes, position


def _parts(computation: Computation, instruction: Instruction, kind: str) -> list[Shape]:
    """Returns the whole arrays that are sent, one for each operand.

    The larger side: a gather's result, a reduction's operand. That one has the result's dtype where
    it is wider: a TPU sums 16-bit operands in the dtype of the result.
    """
    if instruction.opcode == "send":
        return [instruction.shapes[0]]
    operands = [computation.instructions[name].shapes for name in instruction.operands]
    before = [shapes[0] for shapes in operands if shapes]
    # A permute that is begun has two numbers more behind its result.
    after = instruction.shapes[1:2] if instruction.opcode == "collective-permute-start" else ()
    after = after or (instruction.shapes[-len(before) :] if before else ())
    if kind == "all-gather":
        return list(after)
    return [
        dataclasses.replace(x, dtype=y.dtype) if y.itemsize > x.itemsize else x
        for x, y in zip(before, after, strict=True)
    ]


def _dtype(
    module: Module, computation: Computation, instruction: Instruction, position: int, shape: Shape
) -> str:
    """Returns the dtype of what is sent, as the program would have it on an accelerator.

    XLA:CPU widens what is sent in 16 bits. Reductions say so by the name of their function; what
    is gathered was cast down and up again just before (on JAX before 0.12; see `_compat`).
    """
    promoted = "_promoted" in (instruction.called("to_apply") or "")
    reduces = instruction.called("to_apply") is not None
    if shape.dtype != "f32" or (reduces and not promoted):
        return shape.dtype
    producer = computation.instructions[instruction.operands[position]]
    inner = module.computations.get(producer.callee or "")
    inside = list(inner.instructions.values()) if inner else []
    made = {s.dtype for i in inside if i.opcode != "parameter" for s in i.shapes}
    read = {s.dtype for name in producer.operands for s in computation.instructions[name].shapes}
    low = (made | read if promoted else made) & {"bf16", "f16"}
    return min(low, default="bf16" if promoted else shape.dtype)


# -- roles -----------------------------------------------------------------------------------------


def _role(
    kind: str, shape: Shape, flow: Flow, places: tuple[Place, Place], names: Names
) -> tuple[Role, str]:
    """Returns what an array is, and whose: by where it comes from and what it becomes."""
    if shape.elements < FEW:
        return "scalars", ""
    operand, result = places
    inputs = flow.inputs_of(operand) & names.state_inputs
    if inputs and shape.is_float:
        return "weights", _best(names.inputs[i] for i in inputs)
    outputs = flow.outputs_of(result) & names.state_outputs
    if outputs:
        path = _best(names.outputs[i] for i in outputs)
        return ("updates" if kind == "all-gather" else "gradients"), path
    return "activations", ""


def _best(paths: Iterable[str]) -> str:
    """Returns the path to name: a parameter's own is shorter than those of its moments."""
    return min(set(paths), key=lambda path: (len(path.split("/")), path), default="")


# -- groups ----------------------------------------------------------------------------------------


def _groups(instruction: Instruction, names: Names) -> tuple[tuple[str, ...], int]:
    """Returns the mesh axes over which is sent, and how many devices take part.

    The text writes them by name (`mesh['data'=2,'fsdp'=4] {'fsdp'}`), as a list of groups
    (`{{0,1},{2,3}}`) or as a reshaped range (`[2,4]<=[4,2]T(1,0)`).
    """
    text, mesh = instruction.attributes, names.mesh
    if instruction.opcode == "send":
        return names.slice_axes, math.prod(mesh[axis] for axis in names.slice_axes)
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", text):
        return _named(match[1], match[2], mesh)
    if "source_target_pairs=" in text:
        return _permuted(text, mesh)
    members = _members(text)
    if members is None:
        return tuple(mesh), math.prod(mesh.values())
    return _axes_of(members, mesh), len(members)


def _named(declared: str, chosen: str, mesh: Mapping[str, int]) -> tuple[tuple[str, ...], int]:
    """Returns the groups of `mesh['data'=2,'fsdp'=4] {'fsdp'}`; `'fsdp':(2)2` is a part of an axis.

    The partitioner of `jit` has axes of its own naming, of the same devices in the same order.
    """
    sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", declared)}
    parts = re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", chosen)
    count = math.prod(int(size) if size else sizes.get(name, 1) for name, _, size in parts)
    axes = {name for name, _, _ in parts}
    if axes <= set(mesh):
        return tuple(axis for axis in mesh if axis in axes and mesh[axis] > 1), count
    members = [
        device
        for device in range(math.prod(sizes.values()))
        if all(at == 0 or axis in axes for axis, at in _coordinates(device, sizes).items())
    ]
    return _axes_of(members, mesh), count


def _members(text: str) -> list[int] | None:
    """Returns the devices of the first group."""
    if match := re.search(r"replica_groups=\{\{([\d,]+)\}", text):
        return [int(n) for n in match[1].split(",")]
    match = re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if match is None:
        return None
    dims = [int(n) for n in match[3].split(",")]
    order = [int(n) for n in match[4].split(",")] if match[4] else list(range(len(dims)))
    strides = [math.prod(dims[i + 1 :]) for i in range(len(dims))]
    ranges = [range(dims[axis]) for axis in order]
    flat = (
        sum(at * strides[axis] for at, axis in zip(place, order, strict=True))
        for place in itertools.product(*ranges)
    )
    return list(itertools.islice(flat, int(match[2])))


def _axes_of(members: Sequence[int], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the mesh axes along which the members of a group differ."""
    first, differing = _coordinates(members[0], mesh), list[str]()
    for member in members:
        here = _coordinates(member, mesh)
        differing += [axis for axis in mesh if here[axis] != first[axis]]
    return tuple(axis for axis in mesh if axis in differing)


def _permuted(text: str, mesh: Mapping[str, int]) -> tuple[tuple[str, ...], int]:
    match = re.search(r"source_target_pairs=\{\{(\d+),(\d+)\}", text)
    if match is None or not mesh:
        return tuple(mesh), math.prod(mesh.values())
    axes = _axes_of([int(match[1]), int(match[2])], mesh)
    return axes, math.prod(mesh[axis] for axis in axes)


def _coordinates(device: int, mesh: Mapping[str, int]) -> dict[str, int]:
    found: dict[str, int] = {}
    for axis in reversed(tuple(mesh)):
        device, found[axis] = divmod(device, mesh[axis])
    return found
