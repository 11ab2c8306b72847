"""The checks of the arrays that devices hold: batch, copies, optimizer state, donated memory."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mpjax._base.tree import is_overwritten
from mpjax.pods._copies import Differs
from mpjax.pods._findings import Finding, Severity

SMALL_SHARE = 0.01
"""The share of all bytes of its role below which an array, as a bias, is no finding."""

DONATED_SHARE = 0.98
"""The part of the state whose memory the results take in a step that donates it."""


BATCH_SHARE = 0.1
"""The part of the batch from which on an array that every device has whole is a finding."""

FEW = 32
"""Inputs of fewer values are no batch: keys, rates, counters."""


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf of the arguments or results."""

    path: str
    key_path: Any
    shape: tuple[int, ...]
    dtype: str
    bytes: int  # on one device
    elements: int  # on one device
    dims: tuple[frozenset[str], ...]  # for each axis, those of the mesh that split it
    is_state: bool
    is_weight: bool = False  # whether a product reads it

    @property
    def axes(self) -> frozenset[str]:
        """The axes of the mesh that split it."""
        return frozenset[str]().union(*self.dims)

    @property
    def leading(self) -> frozenset[str]:
        """The axes of the mesh that split its first axis."""
        return self.dims[0] if self.dims else frozenset[str]()

    @property
    def is_replicated(self) -> bool:
        """Whether every device has the whole."""
        return not self.axes


def batch_axes(inputs: Sequence[Leaf]) -> frozenset[str]:
    """Returns the mesh axes that split the examples: the first axis of inputs that are no state."""
    return frozenset(axis for leaf in _data(inputs) for axis in leaf.leading)


def _data(inputs: Sequence[Leaf]) -> list[Leaf]:
    return [leaf for leaf in inputs if not leaf.is_state and leaf.elements >= FEW]


def batch(
    inputs: Sequence[Leaf], mesh: Mapping[str, int], shared: frozenset[str]
) -> Iterator[Finding]:
    """Yields a finding for each mesh axis along which all devices do the same work.

    Args:
      inputs: the leaves that the program reads.
      mesh: axis sizes.
      shared: the axes over which activations are sent: work is split there, if not the batch.
    """
    data = _data(inputs)
    if not data:
        return
    largest = max(data, key=lambda leaf: leaf.bytes)
    split = frozenset(axis for leaf in data for axis in leaf.axes)
    if not split and any(size > 1 for size in mesh.values()):
        yield Finding(
            check="batch",
            severity="warning",
            what=f"{largest.path} is whole on every device ({largest.bytes / 1e6:.1f} MB each), as "
            "is all that is no state: every host has to feed all of it.",
            culprit=largest.path,
            fix=f"Split the batch: PartitionSpec({next(iter(mesh))!r}) for its first axis.",
        )
        return
    for axis in (a for a, size in mesh.items() if size > 1 and a not in split | shared):
        yield Finding(
            check="batch",
            severity="warning",
            what=f"{largest.path} is whole on all {mesh[axis]} devices along {axis!r}, and nothing "
            "else splits the work there: they compute the same.",
            culprit=largest.path,
            fix=f"Split the batch, PartitionSpec({axis!r}) among its axes, or leave the axis out.",
        )
    examples = {leaf.shape[0] for leaf in data if leaf.leading}
    everything = sum(leaf.bytes for leaf in data)
    for leaf in data:
        large = leaf.bytes >= BATCH_SHARE * everything
        if large and leaf.is_replicated and leaf.shape and leaf.shape[0] in examples:
            yield Finding(
                check="batch",
                severity="warning",
                what=f"{leaf.path} is whole on every device ({leaf.bytes / 1e6:.1f} MB each), "
                "while the rest of the batch is split.",
                culprit=leaf.path,
                fix="Split it as the rest.",
            )


def copies(
    outputs: Sequence[Leaf], differing: Sequence[Differs], inputs: Sequence[Leaf]
) -> Iterator[Finding]:
    """Yields a finding if new state, whole along a mesh axis by its sharding, differs along it."""
    lost = [
        (leaf, sorted(differs.surely - leaf.axes))
        for leaf, differs in zip(outputs, differing, strict=True)
        if leaf.is_state and differs.surely - leaf.axes
    ]
    if not lost:
        return
    weights = {leaf.path for leaf in inputs if leaf.is_weight}
    leaf, axes = max(lost, key=lambda pair: (pair[0].path in weights, pair[0].bytes))
    rest = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
    yield Finding(
        check="copies",
        severity="error",
        what=f"{leaf.path}{rest}: the devices along {', '.join(axes)} compute different values for "
        "what is one array; a gradient or a decision is not reduced over them, or what each makes "
        "of its own number (axis_index) is kept.",
        culprit=leaf.path,
        fix=f"Before the update: jax.lax.pmean(grads, {tuple(axes)!r}), or mpjax.pods.gather(..., "
        "reduce='mean'). with_loss_scale takes axis_name. shard_map's check_vma refuses it.",
    )


def undecided(outputs: Sequence[Leaf], differing: Sequence[Differs]) -> bool:
    """Whether some state cannot be judged: its operands went round in a ring of devices."""
    pairs = zip(outputs, differing, strict=True)
    return any(leaf.is_state and (d.axes & d.unsure) - leaf.axes for leaf, d in pairs)


def replication(inputs: Sequence[Leaf]) -> Iterator[Finding]:
    """Yields a finding for each piece of optimizer state that is not laid out as its parameter is.

    Optimizer state is state that no product reads, and its parameter is found by shape and path. It
    may be split over more axes of the mesh than that, not over fewer.
    """
    state = [leaf for leaf in inputs if leaf.is_state and not is_overwritten(leaf.key_path)]
    large = SMALL_SHARE * sum(leaf.bytes for leaf in state)
    for leaf in state:
        if leaf.is_weight or leaf.bytes < large:
            continue  # a weight may be whole while the optimizer's state is split
        named, of = _parameters(leaf, state)
        fewer = [p for p in of if leaf.axes < p.axes]
        size = f"({leaf.bytes / 1e6:.1f} MB each)"
        if fewer and (named or len(fewer) == len(of)):
            along = ", ".join(sorted(fewer[0].axes - leaf.axes))
            whole = "every device" if leaf.is_replicated else f"all devices along {along}"
            yield _layout(
                "error", leaf, f"whole on {whole} {size}, while {fewer[0].path} is sharded"
            )
        elif named and of and all(p.axes == leaf.axes and p.dims != leaf.dims for p in of):
            what = f"split along other dimensions {size} than {of[0].path}: one of them is sent in "
            yield _layout("warning", leaf, f"{what}each step")


def _layout(severity: Severity, leaf: Leaf, what: str) -> Finding:
    return Finding(
        check="replication",
        severity=severity,
        what=f"{leaf.path} is {what}.",
        culprit=leaf.path,
        fix="Give it its parameter's sharding: optax.tree.map_params makes the specs.",
    )


def _parameters(leaf: Leaf, state: Sequence[Leaf]) -> tuple[bool, list[Leaf]]:
    """Returns whether names tell the parameter of a piece of optimizer state, and what it may be.

    It has the same shape, and of such leaves the longest common end of the path
    (`opt_state/mu/w`, `params/w`) and then the shortest path. Where no name is in common, it may
    be any weight of that shape.
    """
    alike = [p for p in state if p is not leaf and p.shape == leaf.shape]
    ends = {p.path: _common_end(p, leaf) for p in alike}
    longest = max(ends.values(), default=0)
    if not longest:
        return False, [p for p in alike if p.is_weight]
    nearest = [p for p in alike if ends[p.path] == longest]
    shortest = min(p.path.count("/") for p in nearest)
    if shortest > leaf.path.count("/"):
        return True, []
    return True, [p for p in nearest if p.path.count("/") == shortest]


def _common_end(one: Leaf, other: Leaf) -> int:
    """Returns the number of equal names at the end of two paths."""
    pairs = zip(reversed(one.path.split("/")), reversed(other.path.split("/")), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def donation(
    inputs: Mapping[int, Leaf], outputs: Sequence[Leaf], aliases: Mapping[int, int]
) -> Iterator[Finding]:
    """Yields a finding where the new state does not take the memory of the old one.

    It counts old leaves whose memory no result takes. JAX pairs donated arrays with results of
    equal shape, so a metric may take a counter's memory, and the new counter other memory.

    Args:
      inputs: the leaves that the program reads, by the number of its parameter.
      outputs: the leaves of the results.
      aliases: output → the parameter whose memory it takes.
    """
    state = {number: leaf for number, leaf in inputs.items() if leaf.is_state}
    taken = set(aliases.values())
    results = (leaf for number, leaf in enumerate(outputs) if number not in aliases)
    waiting = collections.Counter(leaf.shape for leaf in results)
    lost: list[Leaf] = []
    for number, leaf in state.items():
        if number not in taken and waiting[leaf.shape] > 0:
            # Only where a result of its shape is without memory: other leaves have no successor.
            waiting[leaf.shape] -= 1
            lost.append(leaf)
    size, whole = (sum(leaf.bytes for leaf in leaves) for leaves in (lost, state.values()))
    if not lost or size < (1 - DONATED_SHARE) * whole:
        return
    largest = max(lost, key=lambda leaf: (leaf.bytes, -len(leaf.path)))
    rest = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
    yield Finding(
        check="donation",
        severity="error",
        what=f"{largest.path}{rest}: the new state takes {size / 1e6:.1f} MB beside the old one "
        f"({1 - size / whole:.0%} of it reuses memory).",
        culprit=largest.path,
        fix="jax.jit(step, donate_argnums=0); shapes, dtypes and shardings must stay the same.",
    )
