"""Lists the collectives of a compiled program, each with its dtype, bytes and role."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from mpjax._base.own_primitives import WATCHED
from mpjax._jaxpr.op_rules import PRODUCTS
from mpjax.pods._flow import Place, ValueFlow
from mpjax.pods._groups import DeviceGroup, along, group_of, joins_devices, sends_by_itself
from mpjax.pods._hlo import Computation, Instruction, Module, Shape
from mpjax.pods._loops import Runs
from mpjax.pods._programs import line_of

Role: TypeAlias = Literal["weights", "gradients", "updates", "activations", "scalars"]
"""In order: a parameter to compute with · its gradient · the new value of a parameter or of
optimizer state · an array that is none of these · a few numbers."""

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
    count: int  # in a step: the trips of the loops around it
    at_least: bool  # whether one of these loops has trips that are not known, and counts once
    axes: tuple[str, ...]  # of the mesh; empty where they are not known
    group_size: int
    operation: str  # that made the array, in JAX's name: 'psum', 'dot_general'
    path: str  # of the parameter, gradient or state, or of an argument that no line sends, or empty
    source: str  # the user's line, 'train.py:12 (loss_fn)'

    @property
    def total_bytes(self) -> int:
        """The bytes of the array, times `count`."""
        return self.bytes * self.count

    @property
    def wire_bytes(self) -> int:
        """The bytes that one device sends in a step, by the ring algorithm."""
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
    """The paths of a program's inputs and outputs, and other facts from the step's arguments."""

    inputs: Mapping[int, str]
    outputs: Mapping[int, str]
    state_inputs: frozenset[int]  # the parameters, optimizer state, and so on
    state_outputs: frozenset[int]
    mesh: Mapping[str, int]  # axis sizes, in the order of the devices
    slice_axes: tuple[str, ...] = ()  # mesh axes whose devices are on several TPU slices


def find_collectives(
    module: Module,
    flow: ValueFlow,
    runs: Runs,
    names: Names,
    name_source: Callable[[Sequence[str]], str],
) -> tuple[Collective, ...]:
    """Returns the collectives of a program.

    Args:
      module: the compiled program.
      flow: the ways of its values.
      runs: the number of runs of each computation.
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
            if WATCHED in instruction.op_name.split("/"):
                continue  # not in a usual step, and not for it
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
                # Of the parts of one collective, keep the one whose parameter is known.
                if key not in by_key or (own.path and not by_key[key].path):
                    by_key[key] = own
    return tuple(by_key.values())


def _arrays(
    flow: ValueFlow,
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
        # XLA:GPU joins gradients end to end and sums them as one array.
        cut = flow.parts_of(place) if common["kind"] == "all-reduce" else []
        pieces = [(Shape(dtype, (size,)), places) for size, places in cut]
        for array, places in pieces or [(Shape(dtype, shape.dims, shape.space), [place])]:
            role, path = _role(common["kind"], array, flow, (operand, places), names)
            if role == "activations" and not common["source"]:  # of no line: perhaps an argument
                path = _best(names.inputs[i] for i in flow.inputs_of(operand))
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
    """Returns name and line of operations that send between devices and are none of `KINDS`.

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


def _group(instruction: Instruction, names: Names) -> DeviceGroup:
    if instruction.opcode == "send":
        return along(names.slice_axes, names.mesh)
    return group_of(instruction, names.mesh)


def _kind(computation: Computation, instruction: Instruction) -> str | None:
    """Returns the one of `KINDS` that an instruction is; between TPU slices that is a `send`.

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
    """Returns the source line of a collective, or else of an instruction that reads it.

    A scatter and a reduction that a TPU's compiler joins have no line of their own.
    """
    operands = (computation.instructions[name] for name in instruction.operands)
    users = (user for user, _ in computation.users.get(instruction.name, ()))
    near = itertools.chain([instruction], operands, users)
    return next(filter(None, (name_source(module.source(i)) for i in near)), "")


def _once(computation: Computation, instruction: Instruction, position: int) -> Any:
    """Returns a key that is equal for the parts into which a TPU program splits one collective.

    The parts stand in several fusions, so that sending overlaps with what these compute.
    """
    chain = instruction.attributes.get("chain_id")
    if chain is None:
        return computation.name, instruction.name, position
    shapes = tuple(map(str, instruction.shapes))
    return chain, instruction.op_name, shapes, position


def _parts(computation: Computation, instruction: Instruction, kind: str) -> list[Shape]:
    """Returns the whole arrays that are sent, one for each operand.

    Whole is the larger side: a gather's result, a reduction's operand. A reduction's operand gets
    the result's dtype where that is wider: a TPU sums 16-bit operands in the dtype of the result.
    """
    if instruction.opcode == "send":
        return [instruction.shapes[0]]
    operands = [computation.instructions[name].shapes for name in instruction.operands]
    before = [shapes[0] for shapes in operands if shapes]
    if kind == "ragged-all-to-all":
        return before[:1]  # the others are the result's memory, and where parts begin and end
    # A permute that is begun has two numbers more behind its result.
    after = instruction.shapes[1:2] if instruction.opcode == "collective-permute-start" else ()
    after = after or (instruction.shapes[-len(before) :] if before else ())
    if kind == "all-gather":
        return list(after)
    return [
        dataclasses.replace(x, dtype=y.dtype) if y.itemsize > x.itemsize else x
        for x, y in zip(before, after, strict=True)
    ]


def _dtype(flow: ValueFlow, place: Place, operand: Place, shape: Shape) -> str:
    """Returns the dtype that an array is sent in, as the program would have it on an accelerator.

    XLA:CPU widens 16-bit arrays before it sends them. A reduction says so in the name of its
    function; a gather's operand was cast down and up again just before (on JAX before 0.12; see
    `_base/compat.py`). And a product of 16-bit operands is float32 there: if the partitioner of
    `jit` sums it over devices and every reader of the sum rounds it, an accelerator sums rounded
    parts.
    """
    module = flow.module
    computation = module.computations[place.computation]
    instruction = computation.instructions[place.instruction]
    reduces = bool(instruction.called)
    promoted = any("_promoted" in name for name in instruction.called)
    if shape.dtype != "f32":
        return shape.dtype
    if reduces and not promoted:
        # The partitioner put it there if it reads a product.
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
    """Returns JAX's name for the operation of a collective: 'conv_general_dilated', 'psum'.

    A collective that joins several has no name of its own: then it is the operand's.
    """
    own = instruction.op_name
    name = computation.instructions[operand.instruction].op_name if ":" in own else own
    return (name or own).rpartition("/")[2]


def as_traced(
    collectives: Iterable[Collective], traced: Mapping[tuple[str, str], set[str]]
) -> tuple[Collective, ...]:
    """Returns the collectives with the dtypes that they were traced with.

    For XLA:CPU before JAX 0.12, which widens 16 bits: it compiles a bfloat16 chunk that is sent as
    it is to the same program as one that is cast to float32 and then sent.

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
    kind: str, shape: Shape, flow: ValueFlow, ways: tuple[Place, Sequence[Place]], names: Names
) -> tuple[Role, str]:
    """Returns an array's role and path: from the input it comes from and the output it becomes."""
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
