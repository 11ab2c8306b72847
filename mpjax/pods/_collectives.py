"""What a compiled program sends between devices: each collective with its dtype, bytes and role."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from mpjax._jaxpr.op_rules import PRODUCTS
from mpjax.pods._flow import Flow, Place
from mpjax.pods._groups import Group, along, group_of, joins_devices, sends_by_itself
from mpjax.pods._hlo import Computation, Instruction, Module, Shape
from mpjax.pods._loops import Runs
from mpjax.pods._programs import line_of

Role: TypeAlias = Literal["weights", "gradients", "updates", "activations", "scalars"]
"""What is sent: a parameter to compute with · its gradient · the new value of a parameter or of
optimizer state · something that is neither · a few numbers."""

FEW = 32
"""Arrays of fewer values are 'scalars': losses and norms, several of them in one message."""

KINDS = (
    *("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "ragged-all-to-all"),
    *("collective-permute", "collective-broadcast"),
)
_ENDS = ("send", "recv", "send-done", "recv-done")  # of transfers, to a host too


@dataclasses.dataclass(frozen=True)
class Collective:
    """One array that is sent, and how often."""

    kind: str  # of KINDS
    role: Role
    dtype: str  # 'bf16', as HLO spells it
    shape: tuple[int, ...]  # the whole array, as one device has it before or after
    bytes: int  # of that array, once
    count: int  # how often in a step: the trips of the loops around it
    at_least: bool  # whether one of these loops has trips that are not known, and counts once
    axes: tuple[str, ...]  # of the mesh; empty where they are not known
    group_size: int
    operation: str  # what made it, as JAX calls it: 'psum', 'dot_general'
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
        factor = {"all-reduce": 2 * (n - 1) / n}
        factor |= {"collective-permute": 1.0, "collective-broadcast": 1.0}
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
    module: Module,
    flow: Flow,
    runs: Runs,
    names: Names,
    name_source: Callable[[Sequence[str]], str],
) -> tuple[Collective, ...]:
    """Returns what a program sends.

    Args:
      module: the compiled program.
      flow: the ways of its values.
      runs: how often each of its computations runs.
      names: of its inputs and outputs.
      name_source: picks the line to name among those that led to an instruction.
    """
    by_key: dict[Any, Collective] = {}
    for computation in module.computations.values():
        if computation.name not in runs.counts:
            continue
        for instruction in computation.instructions.values():
            kind = _kind(computation, instruction)
            group = None if kind is None else _group(instruction, names)
            if kind is None or group is None or group.size == 1:
                continue  # along a mesh axis of one device: nothing is sent, nothing rounds
            common = dict[str, Any](
                kind=kind,
                count=runs.counts[computation.name],
                at_least=computation.name in runs.open,
                axes=group.axes,
                group_size=group.size,
                source=source_of(module, computation, instruction, name_source),
            )
            for number, own in enumerate(_arrays(flow, computation, instruction, names, common)):
                key = _once(computation, instruction, number)
                if key not in by_key or (own.path and not by_key[key].path):
                    by_key[key] = own
    return tuple(by_key.values())


def _arrays(
    flow: Flow,
    computation: Computation,
    instruction: Instruction,
    names: Names,
    common: dict[str, Any],
) -> Iterator[Collective]:
    """Yields the arrays that one instruction sends: side by side, or end to end in one."""
    parts = _parts(computation, instruction, common["kind"])
    for position, shape in enumerate(parts):
        place = Place(computation.name, instruction.name, (position,) if len(parts) > 1 else ())
        operand = Place(computation.name, instruction.operands[position])
        dtype = _dtype(flow, place, operand, shape)
        cut = flow.parts_of(place) if common["kind"] == "all-reduce" else []
        pieces = [(Shape(dtype, (size,)), places) for size, places in cut]
        for array, places in pieces or [(Shape(dtype, shape.dims, shape.space), [place])]:
            role, path = _role(common["kind"], array, flow, (operand, places), names)
            yield Collective(
                role=role,
                dtype=dtype,
                shape=array.dims,
                bytes=array.bytes,
                operation=_operation(computation, instruction, operand),
                path=path,
                **common,
            )


def find_unknown(
    module: Module, runs: Runs, name_source: Callable[[Sequence[str]], str]
) -> list[tuple[str, str]]:
    """Returns name and line of what sends between devices and is none of `KINDS`.

    A kernel that sends by itself says so in its notes; any other collective names a channel or
    the devices that take part.
    """
    unknown: list[tuple[str, str]] = []
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            opcode = instruction.opcode
            if computation.name not in runs.counts or opcode in _ENDS:
                continue
            kernel = opcode == "custom-call" and sends_by_itself(instruction)
            known = opcode.removesuffix("-start").removesuffix("-done") in KINDS
            if kernel or (not known and joins_devices(instruction)):
                source = source_of(module, computation, instruction, name_source)
                unknown.append((instruction.target or opcode, source))
    return list(dict.fromkeys(unknown))


def _group(instruction: Instruction, names: Names) -> Group:
    if instruction.opcode == "send":
        return along(names.slice_axes, names.mesh)
    return group_of(instruction, names.mesh)


def _kind(computation: Computation, instruction: Instruction) -> str | None:
    """Returns what an instruction is of `KINDS`; between TPU slices it is written as a `send`.

    A TPU program names a fusion `all-reduce-scatter` in which a sum and a slice are done in one.
    """
    if instruction.opcode == "send":
        between = instruction.attributes.get("_xla_megascale_transfer_type", "")
        return between.lower().replace("_", "-") or None
    kind = instruction.opcode.removesuffix("-start")
    if kind == "all-reduce" and computation.name.startswith("all-reduce-scatter"):
        return "reduce-scatter"
    return kind if kind in KINDS else None


def source_of(
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
    chain = instruction.attributes.get("chain_id")
    if chain is None:
        return computation.name, instruction.name, position
    shapes = tuple(map(str, instruction.shapes))
    return chain, instruction.op_name, shapes, position


def _parts(computation: Computation, instruction: Instruction, kind: str) -> list[Shape]:
    """Returns the whole arrays that are sent, one for each operand.

    The larger side: a gather's result, a reduction's operand. That one has the result's dtype where
    it is wider: a TPU sums 16-bit operands in the dtype of the result.
    """
    if instruction.opcode == "send":
        return [instruction.shapes[0]]
    operands = [computation.instructions[name].shapes for name in instruction.operands]
    before = [shapes[0] for shapes in operands if shapes]
    if kind == "ragged-all-to-all":
        return before[:1]  # behind it stand the result's memory, and where parts begin and end
    # A permute that is begun has two numbers more behind its result.
    after = instruction.shapes[1:2] if instruction.opcode == "collective-permute-start" else ()
    after = after or (instruction.shapes[-len(before) :] if before else ())
    if kind == "all-gather":
        return list(after)
    return [
        dataclasses.replace(x, dtype=y.dtype) if y.itemsize > x.itemsize else x
        for x, y in zip(before, after, strict=True)
    ]


def _dtype(flow: Flow, place: Place, operand: Place, shape: Shape) -> str:
    """Returns the dtype of what is sent, as the program would have it on an accelerator.

    XLA:CPU widens what is sent in 16 bits. Reductions say so by the name of their function; what
    is gathered was cast down and up again just before (on JAX before 0.12; see `_compat`). And a
    product of 16 bits is float32 there: where the partitioner of `jit` adds it up over devices and
    all that reads the sum rounds it, an accelerator adds rounded parts.
    """
    module = flow.module
    computation = module.computations[place.computation]
    instruction = computation.instructions[place.instruction]
    reduces = bool(instruction.called)
    promoted = any("_promoted" in name for name in instruction.called)
    if shape.dtype != "f32":
        return shape.dtype
    if reduces and not promoted:
        # Behind a product it was the partitioner that put it there.
        is_added = _operation(computation, instruction, operand) in PRODUCTS
        return (flow.rounded_at_once(place) if is_added else "") or "f32"
    producer = computation.instructions[operand.instruction]
    inner = module.computations.get(producer.callee or "")
    inside = list(inner.instructions.values()) if inner else []
    made = {s.dtype for i in inside if i.opcode != "parameter" for s in i.shapes}
    read = {s.dtype for name in producer.operands for s in computation.instructions[name].shapes}
    low = (made | read if promoted else made) & {"bf16", "f16"}
    return min(low, default="bf16" if promoted else shape.dtype)


def _operation(computation: Computation, instruction: Instruction, operand: Place) -> str:
    """Returns what JAX calls that which made what is sent: 'conv_general_dilated', 'psum'.

    Where several were put together, it is said of the operand.
    """
    own = instruction.op_name
    name = computation.instructions[operand.instruction].op_name if ":" in own else own
    return (name or own).rpartition("/")[2]


def as_traced(
    collectives: Iterable[Collective], traced: Mapping[tuple[str, str], set[str]]
) -> tuple[Collective, ...]:
    """Returns the collectives with the dtypes that they were traced with.

    For XLA:CPU before JAX 0.12, which widens 16 bits: a chunk that was cast to float32 and sent is
    then no other program than one that was sent as it is.

    Args:
      collectives: as compiled.
      traced: the dtypes of JAX's collectives, by operation and source line.
    """
    renamed: list[Collective] = []
    for c in collectives:
        dtypes = traced.get((c.operation, line_of(c.source)), set[str]())
        if len(dtypes) == 1 and dtypes | {c.dtype} <= {"f32", "bf16", "f16"}:
            shape = Shape(next(iter(dtypes)), c.shape)
            c = dataclasses.replace(c, dtype=shape.dtype, bytes=shape.bytes)
        renamed.append(c)
    return tuple(renamed)


# -- roles -----------------------------------------------------------------------------------------


def _role(
    kind: str, shape: Shape, flow: Flow, ways: tuple[Place, Sequence[Place]], names: Names
) -> tuple[Role, str]:
    """Returns what an array is, and whose: by where it comes from and what it becomes."""
    if shape.elements < FEW:
        return "scalars", ""
    operand, results = ways
    inputs = flow.inputs_of(operand) & names.state_inputs
    if inputs and shape.is_float:
        return "weights", _best(names.inputs[i] for i in inputs)
    outputs = set[int]().union(*map(flow.outputs_of, results)) & names.state_outputs
    if outputs:
        path = _best(names.outputs[i] for i in outputs)
        return ("updates" if kind == "all-gather" else "gradients"), path
    return "activations", ""


def _best(paths: Iterable[str]) -> str:
    """Returns the path to name: a parameter's own is shorter than those of its moments."""
    return min(set(paths), key=lambda path: (len(path.split("/")), path), default="")
