"""What makes a compiled train step wrong: one function a check, each names the culprit."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from mpjax._tree import is_overwritten
from mpjax.pods._collectives import Collective
from mpjax.pods._findings import Finding

_LOW = ("bf16", "f16")
_HIGH = ("f32", "f64")

SMALL_SHARE = 0.01
"""What is less than this part of all bytes of its role is not worth a finding: scales, biases."""

DONATED_SHARE = 0.98
"""The part of the state whose memory the results take in a step that donates it."""


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf of the arguments or results."""

    path: str
    key_path: Any
    shape: tuple[int, ...]
    dtype: str
    bytes: int  # on one device
    is_replicated: bool
    is_state: bool


def callbacks(found: Iterable[tuple[str, str]]) -> Iterator[Finding]:
    """Yields a finding for each operation that calls the host."""
    for name, source in found:
        yield Finding(
            check="callbacks",
            severity="error",
            what=f"{name} at {source} makes every device wait for its host in each step.",
            culprit=source,
            fix="Return the value with the metrics, and look at it outside of the step.",
        )


def agreement(difference: str, last: int) -> Iterator[Finding]:
    """Yields a finding where two processes would compile different programs."""
    if difference:
        yield Finding(
            check="agreement",
            severity="error",
            what=f"processes 0 and {last} would trace different programs: they differ in "
            f"{difference}.",
            culprit=difference,
            fix="Pass what differs as an argument; draw random numbers from a key in the state.",
        )


def weights(collectives: Sequence[Collective], compute_dtype: str) -> Iterator[Finding]:
    """Yields a finding for each parameter that is gathered wide and then cast."""
    if compute_dtype not in _LOW:
        return
    for path, group in _large(collectives, "weights", _HIGH):
        first = group[0]
        yield Finding(
            check="weights",
            severity="error",
            what=f"{path} is gathered in {first.dtype}, {_mb(group)} a step at {first.source}: "
            f"twice what {compute_dtype} takes.",
            culprit=path,
            fix="Cast before it is gathered: mpjax.pods.gather, or autocast inside shard_map.",
        )


def gradients(collectives: Sequence[Collective]) -> Iterator[Finding]:
    """Yields a finding for each gradient that is summed over devices in 16 bits."""
    for path, group in _large(collectives, "gradients", _LOW):
        first = group[0]
        yield Finding(
            check="gradients",
            severity="error",
            what=f"the gradient of {path} is summed over {first.group_size} devices in "
            f"{first.dtype}, {_mb(group)} a step at {first.source}: each addition rounds.",
            culprit=path,
            fix="Reduce in float32: mpjax.pods.gather under shard_map; under jit products whose "
            "weight gradient is float32, as autocast's are.",
        )


def activations(collectives: Sequence[Collective], compute_dtype: str) -> Iterator[Finding]:
    """Yields a finding for each line that sends activations in float32."""
    if compute_dtype not in _LOW:
        return
    everything = sum(c.total_bytes for c in collectives)
    wide = (c for c in collectives if c.role == "activations" and c.dtype in _HIGH)
    by_line = itertools.groupby(sorted(wide, key=lambda c: c.source), key=lambda c: c.source)
    for source, lines in by_line:
        group = list(lines)
        if sum(c.total_bytes for c in group) < SMALL_SHARE * everything:
            continue
        first = max(group, key=lambda c: c.total_bytes)
        dims = ",".join(map(str, first.shape))
        yield Finding(
            check="activations",
            severity="error",
            what=f"{first.kind} of {first.dtype}[{dims}], which is no parameter, {_mb(group)} "
            f"a step at {source or 'an unnamed place'}.",
            culprit=source,
            fix=f"Cast it to {compute_dtype} before it is sent.",
        )


def replication(inputs: Sequence[Leaf]) -> Iterator[Finding]:
    """Yields a finding for each piece of optimizer state that is whole on every device.

    Optimizer state is known by its parameter: a leaf of the same shape whose path is shorter and
    has the same end. Where that one is sharded, this one should be.
    """
    state = [leaf for leaf in inputs if leaf.is_state and not is_overwritten(leaf.key_path)]
    large = SMALL_SHARE * sum(leaf.bytes for leaf in state)
    sharded = [leaf for leaf in state if not leaf.is_replicated]
    for leaf in state:
        if not leaf.is_replicated or leaf.bytes < large:
            continue
        of = next((p for p in sharded if _is_of(leaf, p)), None)
        if of is not None:
            yield Finding(
                check="replication",
                severity="error",
                what=f"{leaf.path} is whole on every device ({leaf.bytes / 1e6:.1f} MB each), "
                f"while {of.path} is sharded.",
                culprit=leaf.path,
                fix="Give it its parameter's sharding: optax.tree.map_params makes the specs.",
            )


def _is_of(leaf: Leaf, parameter: Leaf) -> bool:
    mine, other = leaf.path.split("/"), parameter.path.split("/")
    return leaf.shape == parameter.shape and mine[-1] == other[-1] and len(mine) >= len(other)


def donation(
    inputs: Mapping[int, Leaf], outputs: Sequence[Leaf], aliases: Mapping[int, int]
) -> Iterator[Finding]:
    """Yields a finding where the new state does not take the memory of the old one.

    What counts is whose memory no result takes: JAX pairs what was donated with results of equal
    shape, so that a metric may have a counter's place, and the new counter a new one.

    Args:
      inputs: the leaves that the program reads, by the number of its parameter.
      outputs: the leaves of the results.
      aliases: which parameter's memory each output takes.
    """
    state = {number: leaf for number, leaf in inputs.items() if leaf.is_state}
    taken = set(aliases.values())
    results = (leaf for number, leaf in enumerate(outputs) if number not in aliases)
    waiting = collections.Counter(leaf.shape for leaf in results)
    lost: list[Leaf] = []
    for number, leaf in state.items():
        if number not in taken and waiting[leaf.shape] > 0:
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


def _large(
    collectives: Sequence[Collective], role: str, dtypes: Sequence[str]
) -> Iterator[tuple[str, list[Collective]]]:
    """Yields path and collectives of what is sent in one of the dtypes, if it is worth a word."""
    same = [c for c in collectives if c.role == role]
    everything = sum(c.total_bytes for c in same)
    wrong = sorted((c for c in same if c.dtype in dtypes), key=lambda c: c.path)
    for path, found in itertools.groupby(wrong, key=lambda c: c.path):
        group = list(found)
        if sum(c.total_bytes for c in group) >= SMALL_SHARE * everything:
            yield path, group


def _mb(group: Iterable[Collective]) -> str:
    return f"{sum(c.total_bytes for c in group) / 1e6:.1f} MB"
