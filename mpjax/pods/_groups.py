"""Reads the devices that a collective joins: mesh axes, and the number that take part."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from mpjax.pods._hlo import Instruction
from mpjax.pods._proto import Message

# Fields of an instruction that say who takes part, in the notations that XLA has had: groups one by
# one, a list of them or a range, a range, axes of a mesh. Then the pairs of a permutation, and the
# channel, which joins all devices if nothing else is said.
_LISTED, _LIST, _RANGE, _BY_MESH, _PAIRS, _CHANNEL = 49, 87, 92, 93, 52, 26


class DeviceGroup(NamedTuple):
    """The devices of one group."""

    axes: tuple[str, ...]  # of the mesh, along which they differ
    size: int
    whole: bool  # whether it has all devices along these axes


def joins_devices(instruction: Instruction) -> bool:
    """Whether an instruction names devices that take part in it, or a channel between them.

    Every collective does, also one whose opcode this package does not know.
    """
    proto = instruction.proto
    fields = (_LISTED, _LIST, _RANGE, _BY_MESH, _PAIRS)
    return any(map(proto.has, fields)) or proto.integer(_CHANNEL) > 0


def sends_by_itself(instruction: Instruction) -> bool:
    """Whether a `custom-call` is a kernel that sends to other devices, such as some of Pallas."""
    return '"has_communication":true' in instruction.backend_config.replace(" ", "")


def group_of(instruction: Instruction, mesh: Mapping[str, int]) -> DeviceGroup:
    """Returns the group that the first device of a mesh is in.

    Args:
      instruction: a collective.
      mesh: axis sizes, in the order of the devices.
    """
    proto = instruction.proto
    if proto.has(_PAIRS):
        return _permuted(proto, mesh)
    if proto.has(_BY_MESH):
        return _of(_named(proto.message(_BY_MESH)), mesh)
    members = _members(proto)
    everyone = range(math.prod(mesh.values()))
    return _of(members or everyone, mesh)


def along(axes: Sequence[str], mesh: Mapping[str, int]) -> DeviceGroup:
    """Returns the group of all devices along some axes of a mesh."""
    return DeviceGroup(tuple(axes), math.prod(mesh[axis] for axis in axes), True)


def coordinates(device: int, mesh: Mapping[str, int]) -> dict[str, int]:
    """Returns the coordinates of a device in a mesh, by axis."""
    place: dict[str, int] = {}
    for axis in reversed(tuple(mesh)):
        device, place[axis] = divmod(device, mesh[axis])
    return place


def _of(members: Sequence[int], mesh: Mapping[str, int]) -> DeviceGroup:
    """Returns the group of some devices."""
    first, differing = coordinates(members[0], mesh), set[str]()
    for member in members:
        here = coordinates(member, mesh)
        differing |= {axis for axis in mesh if here[axis] != first[axis]}
    axes = tuple(axis for axis in mesh if axis in differing)
    return DeviceGroup(axes, len(members), len(members) == math.prod(mesh[axis] for axis in axes))


def _members(proto: Message) -> list[int]:
    """Returns the devices of the first group of a list; none where all are meant."""
    if proto.has(_RANGE):
        return _iota(proto.message(_RANGE))
    groups = proto.message(_LIST)
    if groups.has(2):
        return _iota(groups.message(2))
    listed = next(groups.messages(1), None) or next(proto.messages(_LISTED), None)
    return list(listed.integers(1)) if listed else []


def _iota(proto: Message) -> list[int]:
    """Returns the first group of a range of numbers that is reshaped, transposed and cut."""
    numbers = _transposed(proto.integers(3), proto.integers(4))
    return list(itertools.islice(numbers, proto.integer(2)))


def _transposed(dims: Sequence[int], order: Sequence[int]) -> Iterator[int]:
    """Yields the numbers from 0 on, put into an array of that shape and read in another order."""
    order = order or tuple(range(len(dims)))
    strides = [math.prod(dims[i + 1 :]) for i in range(len(dims))]
    for place in itertools.product(*(range(dims[axis]) for axis in order)):
        yield sum(at * strides[axis] for at, axis in zip(place, order, strict=True))


def _named(proto: Message) -> list[int]:
    """Returns the devices of the first group, from axes of a mesh, or parts of axes.

    The partitioner of `jit` names axes of its own, of the same devices in the same order, or in an
    order that it lists.
    """
    declared = proto.message(1)
    sizes = {f"{i}": axis.integer(2) for i, axis in enumerate(declared.messages(1))}
    # Stride and size of the part of each axis.
    chosen: dict[str, tuple[int, int]] = dict.fromkeys(sizes, (1, 1))
    for axis in proto.messages(2):
        name, part = f"{axis.integer(1)}", axis.message(2)
        stride = sizes[name] // (part.integer(1) * part.integer(2)) if axis.has(2) else 1
        chosen[name] = (stride, part.integer(2) if axis.has(2) else sizes[name])
    steps = [[n * stride for n in range(size)] for stride, size in chosen.values()]
    weights = [math.prod(list(sizes.values())[i + 1 :]) for i in range(len(sizes))]
    places = itertools.product(*steps)
    members = [sum(n * w for n, w in zip(place, weights, strict=True)) for place in places]
    ids = declared.integers(2)
    if declared.has(3):  # the order of the devices, as a range that is reshaped and transposed
        order = declared.message(3)
        ids = tuple(_transposed(order.integers(1), order.integers(2)))
    return [ids[member] for member in members] if ids else members


def _permuted(proto: Message, mesh: Mapping[str, int]) -> DeviceGroup:
    """Returns the axes along which a permutation sends; all devices along them count as a group."""
    differing = set[str]()
    for pair in proto.messages(_PAIRS):
        source, target = (coordinates(pair.integer(n), mesh) for n in (1, 2))
        differing |= {axis for axis in mesh if source[axis] != target[axis]}
    return along([axis for axis in mesh if axis in differing], mesh)
