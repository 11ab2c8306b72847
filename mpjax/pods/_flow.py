"""Follows a value through a compiled program: back to an input, on to an output.

Both directions pass instructions that keep the value: casts, copies, slices, layouts, tuples, loops
and fusions. Forward they also pass arithmetic that keeps the number of elements, as an optimizer's
with a gradient. A product, a reduction or a lookup ends the way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

from mpjax.pods._hlo import Computation, Instruction, Module, Shape

Index = tuple[int, ...]


class Place(NamedTuple):
    """A value: the result of an instruction, or a part of it where that is a tuple."""

    computation: str
    instruction: str
    part: Index = ()


# They read one value and return it, whole or in part, in another dtype, order or place.
_CARRY = (
    *("convert", "copy", "copy-start", "bitcast", "bitcast-convert", "reshape", "transpose"),
    *("slice", "dynamic-slice", "reduce-precision", "pad", "broadcast", "reverse"),
    *("all-gather", "all-gather-start", "all-reduce", "all-reduce-start", "all-to-all"),
    *("collective-permute", "collective-permute-start", "collective-broadcast"),
)
# Their result is the value or a part of it, whatever its shape: a TPU program also moves arrays
# between its memories as bytes, in pieces (f32[64,128] as s8[32768], sliced, and put together).
_SAME_BYTES = ("bitcast", "bitcast-convert", "dynamic-slice", "slice", "copy-start")
# They hand a value on, bit for bit.
_PASSED = ("bitcast", "copy", "get-tuple-element", "reshape", "transpose", "all-reduce-done")
_MANY = ("concatenate", "ConcatBitcast")
_COMBINED = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all")  # many at once
# Their result is a tuple with more than the value; a place without an index means the value.
_STARTS = (*("all-gather-start", "all-reduce-start", "collective-permute-start"),)
_ASYNC = ("AsyncCollectiveStart", "AsyncCollectiveDone")  # a TPU's, inside fusions
_SAME_PARTS = ("-done", "-update", "opt-barrier")
_PRODUCTS = ("dot", "convolution", "gather", "ragged-dot", "scaled-dot", "custom-call")
_ENDS = (
    *("dot", "convolution", "reduce", "reduce-window", "gather", "sort", "custom-call", "map"),
    *("rng", "iota", "constant", "parameter", "select-and-scatter"),
)


class ValueFlow:
    """The ways of values through one program."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self._sends, self._receives = map(self._find_transfers, ("send", "recv"))

    def inputs_of(self, place: Place) -> set[int]:
        """Returns the numbers of the program's parameters that a value is, cast or sliced."""
        numbers: set[int] = set()
        for at in self._walk(place, self._back):
            instruction = self._instruction(at)
            if at.computation == self.module.entry.name and instruction.opcode == "parameter":
                numbers.add(instruction.number)
        return numbers

    def outputs_of(self, place: Place) -> set[int]:
        """Returns the numbers of the program's results that a value is added or multiplied into."""
        entry, numbers = self.module.entry, set[int]()
        for at in self._walk(place, self._on):
            if at.computation != entry.name or at.instruction != entry.root.name:
                continue
            numbers.add(at.part[0] if at.part else 0)
        return numbers

    def parts_of(self, place: Place) -> list[tuple[int, list[Place]]]:
        """Returns the parts that a flat array is cut into, each with its size and its places.

        GPU programs put many gradients end to end, and send them as one.
        """
        whole = self._shape(place)
        if whole is None or len(whole.dims) != 1:
            return []
        places: dict[tuple[int, int], list[Place]] = {}
        for at in self._walk(place, lambda at: self._whole(at, whole)):
            for user, position in self._users(at):
                if user.opcode == "slice" and position == 0 and self._shape(at) is not None:
                    (cut,) = user.proto.messages(17)
                    limits = cut.integer(1), cut.integer(2)
                    places.setdefault(limits, []).append(Place(at.computation, user.name))
        sizes = [limit - start for start, limit in places]
        complete = len(places) > 1 and sum(sizes) == whole.elements
        return list(zip(sizes, places.values(), strict=True)) if complete else []

    def _whole(self, at: Place, whole: Shape) -> Iterator[Place]:
        """Yields the next places of a value that have its size and shape."""
        for further in self._on(at):
            shape = self._shape(further)
            inside = shape is None or shape.dims == whole.dims  # a tuple may hold it
            yield from [further] if inside else []

    def _shape(self, at: Place) -> Shape | None:
        return _part(self._instruction(at), at.part)

    def _users(self, at: Place) -> list[tuple[Instruction, int]]:
        return self.module.computations[at.computation].users.get(at.instruction, [])

    def rounded_at_once(self, place: Place) -> str:
        """Returns the 16-bit dtype that all readers of a value round it to first, '' if not all."""
        dtypes = set[str]()
        for at in self._walk(place, self._unread):
            for user, _ in self._users(at):
                if not _passes(user) and not user.is_call:
                    dtypes.add(_rounds_to(user))
        return dtypes.pop() if len(dtypes) == 1 else ""

    def _unread(self, at: Place) -> Iterator[Place]:
        passed = {user.name for user, _ in self._users(at) if _passes(user)}
        for further in self._on(at):
            if further.computation != at.computation or further.instruction in passed:
                yield further

    def reaches_product(self, place: Place) -> bool:
        """Whether a value is an operand of a product, lookup or library call, as a weight is."""
        return any(
            user.opcode in _PRODUCTS and user.target not in (*_MANY, *_ASYNC)
            for at in self._walk(place, self._on)
            for user, _ in self._users(at)
        )

    def _walk(self, place: Place, steps: Callable[[Place], Iterator[Place]]) -> Iterator[Place]:
        seen, waiting = {place}, [place]
        while waiting:
            at = waiting.pop()
            yield at
            for further in steps(at):
                if further not in seen:
                    seen.add(further)
                    waiting.append(further)

    def _instruction(self, at: Place) -> Instruction:
        return self.module.computations[at.computation].instructions[at.instruction]

    def _find_transfers(self, opcode: str) -> dict[str, Place]:
        """Returns the sends, or receives, between TPU slices, by the name that both ends share."""
        return {
            instruction.rendezvous: Place(computation.name, instruction.name, (0,))
            for computation in self.module.computations.values()
            for instruction in computation.instructions.values()
            if instruction.opcode == opcode and instruction.rendezvous
        }

    # -- back ----------------------------------------------------------------------------------

    def _back(self, at: Place) -> Iterator[Place]:
        """Yields the places that a value was handed on from."""
        instruction = self._instruction(at)
        opcode = instruction.opcode
        there = functools.partial(Place, at.computation)
        if opcode == "get-tuple-element":
            yield there(instruction.operands[0], (instruction.tuple_index, *at.part))
        elif opcode == "tuple":
            if at.part:
                yield there(instruction.operands[at.part[0]], at.part[1:])
        elif opcode == "parameter":
            yield from self._back_to_callers(at, instruction.number)
        elif instruction.is_call:
            inner = self.module.computations[instruction.called[0]]
            yield Place(inner.name, inner.root.name, at.part)
        elif opcode == "conditional":
            for branch in map(self.module.computations.get, instruction.called):
                if branch is not None:
                    yield Place(branch.name, branch.root.name, at.part)
        elif opcode == "while":
            yield from self._back_into_loop(at, instruction)
        else:
            yield from self._back_to_operands(at, instruction)

    def _back_to_operands(self, at: Place, instruction: Instruction) -> Iterator[Place]:
        opcode, operands = instruction.opcode, instruction.operands
        there = functools.partial(Place, at.computation)
        if opcode == "recv" and instruction.rendezvous in self._sends:
            yield self._sends[instruction.rendezvous]
        elif opcode == "dynamic-update-slice":
            yield from map(there, operands[:2])
        elif opcode in _MANY or instruction.target in _MANY:
            yield from map(there, operands)
        elif opcode == "send" or instruction.target in _ASYNC:
            yield there(operands[0])
        elif operands and (opcode in _CARRY or opcode.endswith(_SAME_PARTS)):
            yield from self._back_by_one(at, instruction)

    def _back_by_one(self, at: Place, instruction: Instruction) -> Iterator[Place]:
        """Yields the operand of an instruction that carries one value, or several side by side."""
        if instruction.opcode.endswith(_SAME_PARTS):
            yield Place(at.computation, instruction.operands[0], at.part)
            return
        position = at.part[-1] if at.part and len(instruction.operands) > 1 else 0
        if position < len(instruction.operands):
            yield Place(at.computation, instruction.operands[position])

    def _back_to_callers(self, at: Place, number: int) -> Iterator[Place]:
        for computation, caller in self.module.callers.get(at.computation, ()):
            if caller.opcode == "while":
                yield Place(computation.name, caller.operands[0], at.part)
                # A loop's parameter is its initial value, or what the body returned a turn before.
                body = self.module.computations[caller.body]
                yield Place(body.name, body.root.name, at.part)
            elif caller.opcode == "conditional":  # its operand 0 is the choice
                chosen = caller.called.index(at.computation)
                yield Place(computation.name, caller.operands[1 + chosen], at.part)
            elif number < len(operands := _bound(computation, caller)):
                yield Place(computation.name, operands[number], at.part)

    def _back_into_loop(self, at: Place, loop: Instruction) -> Iterator[Place]:
        yield Place(at.computation, loop.operands[0], at.part)
        body = self.module.computations[loop.body]
        yield Place(body.name, body.root.name, at.part)

    # -- on ------------------------------------------------------------------------------------

    def _on(self, at: Place) -> Iterator[Place]:
        """Yields the places that a value goes to, by instructions that keep its size."""
        computation = self.module.computations[at.computation]
        instruction = computation.instructions[at.instruction]
        for user, position in self._users(at):
            yield from self._into(at, instruction, user, position)
        if instruction.is_root:
            yield from self._to_callers(at)
        if instruction.opcode == "send" and instruction.rendezvous in self._receives:
            yield self._receives[instruction.rendezvous]

    def _into(
        self, at: Place, instruction: Instruction, user: Instruction, position: int
    ) -> Iterator[Place]:
        """Yields the places of a value in the results of a reader; it is operand `position`."""
        opcode, name = user.opcode, user.name
        there = functools.partial(Place, at.computation)
        if opcode == "get-tuple-element":
            if not at.part or at.part[0] == user.tuple_index:  # without an index it is any part
                yield there(name, at.part[1:])
        elif opcode == "tuple":
            yield there(name, (position, *at.part))
        elif user.is_call or opcode in ("conditional", "while"):
            yield from self._into_computations(at, user, position)
        elif opcode == "send" or (opcode == "async-update" and position):
            yield from self._into_other_end(at, user, position)
        elif opcode.endswith(_SAME_PARTS) or user.target in _ASYNC:
            yield there(name, at.part)
        elif opcode in _STARTS or opcode in _COMBINED:
            yield there(name, (position,) if len(user.operands) > 1 else ())
        elif self._continues(instruction, user, position, at):
            yield there(name)

    def _into_computations(self, at: Place, user: Instruction, position: int) -> Iterator[Place]:
        """Yields the places of a value inside a call, a branch or a loop that reads it."""
        if user.opcode == "while":
            inner, number = self.module.computations[user.body], 0
            yield Place(at.computation, user.name, at.part)
        elif user.opcode == "conditional":
            if not position:
                return  # the choice itself goes into no branch
            inner, number = self.module.computations[user.called[position - 1]], 0
        else:
            inner, number = self.module.computations[user.called[0]], position
        if number in inner.parameters:
            yield Place(inner.name, inner.parameters[number].name, at.part)

    def _into_other_end(self, at: Place, user: Instruction, position: int) -> Iterator[Place]:
        """Yields the other end of a transfer: on other TPU slices, in a SparseCore."""
        if user.opcode == "send":
            if user.rendezvous in self._receives:
                yield self._receives[user.rendezvous]
            return
        start = self._instruction(Place(at.computation, user.operands[0]))
        inner = self.module.computations[start.callee or ""]
        yield Place(inner.name, inner.parameters[position - 1].name, at.part)

    def _continues(
        self, instruction: Instruction, user: Instruction, position: int, at: Place
    ) -> bool:
        """Whether the result of an operation on arrays counts as the value."""
        if user.opcode == "dynamic-update-slice":
            return position <= 1  # operand 0 is the array, 1 its update, 2 on are indices
        if user.opcode == "scatter":
            return position == 0  # the sum so far: of a tied table's gradient the head's part
        many = user.opcode in _MANY or user.target in _MANY
        return many or self._keeps(instruction, user, at)

    def _keeps(self, instruction: Instruction, user: Instruction, at: Place) -> bool:
        """Whether an instruction is arithmetic on all of a value's elements, or a part of it."""
        if user.opcode in _ENDS:
            return False
        if user.opcode in _SAME_BYTES:
            return True
        value, result = _part(instruction, at.part), user.type
        if value is None or not isinstance(result, Shape) or value.elements < 2:
            return False
        return value.elements == result.elements

    def _to_callers(self, at: Place) -> Iterator[Place]:
        for computation, caller in self.module.callers.get(at.computation, ()):
            if caller.is_call or caller.opcode == "conditional":
                yield Place(computation.name, caller.name, at.part)
            elif caller.opcode == "while" and caller.body == at.computation:
                yield Place(computation.name, caller.name, at.part)
                body = self.module.computations[at.computation]
                yield Place(body.name, body.parameters[0].name, at.part)


def _bound(computation: Computation, caller: Instruction) -> tuple[str, ...]:
    """Returns the operands of a call; a SparseCore's has them after its start."""
    if caller.opcode != "async-start" or caller.operands:
        return caller.operands
    users = computation.users.get(caller.name, [])
    return next((user.operands[1:] for user, _ in users if user.opcode == "async-update"), ())


def _passes(instruction: Instruction) -> bool:
    """Whether an instruction hands a value on, bit for bit; a rounding to float32 counts too."""
    to_float32 = instruction.opcode == "reduce-precision" and instruction.proto.integer(19) == 23
    return to_float32 or instruction.opcode in _PASSED


def _rounds_to(instruction: Instruction) -> str:
    """Returns the 16-bit dtype that an instruction rounds to; '' where it does not."""
    if instruction.opcode == "reduce-precision":
        bits = instruction.proto.integer(18), instruction.proto.integer(19)
        return {(8, 7): "bf16", (5, 10): "f16"}.get(bits, "")
    dtype = instruction.shapes[0].dtype if instruction.opcode == "convert" else ""
    return dtype if dtype in ("bf16", "f16") else ""


def _part(instruction: Instruction, index: Index) -> Shape | None:
    part = instruction.type
    for position in index:
        if isinstance(part, Shape) or position >= len(part):
            return None
        part = part[position]
    return part if isinstance(part, Shape) else None
