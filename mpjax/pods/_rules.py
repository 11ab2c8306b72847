"""The checks of a traced step and its collectives: one function each; a finding has a culprit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from mpjax.pods._collectives import Collective
from mpjax.pods._findings import Finding
from mpjax.pods._state_rules import SMALL_SHARE, Leaf

_LOW = ("bf16", "f16")
_HIGH = ("f32", "f64")
_SUMS = ("all-reduce", "reduce-scatter")

GATHERED_SHARE = 0.1
"""The part of all bytes from which on gathered activations are worth a finding."""


def callbacks(operations: Iterable[tuple[str, str]]) -> Iterator[Finding]:
    """Yields a finding for each operation that calls the host."""
    for name, source in operations:
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


def gradients(
    collectives: Sequence[Collective], compute_dtype: str, platform: str
) -> Iterator[Finding]:
    """Yields a finding for each gradient that is summed over devices in 16 bits."""
    for path, group in _large(collectives, "gradients", _LOW):
        first = group[0]
        yield Finding(
            check="gradients",
            severity="error",
            what=f"the gradient of {path} is summed over {first.group_size} devices in "
            f"{first.dtype}, {_mb(group)} a step at {first.source}: each addition rounds.",
            culprit=path,
            fix=_OF_CONVOLUTIONS if first.operation == _CONVOLUTION else _OF_PRODUCTS,
        )
    if platform != "cpu" or compute_dtype not in _LOW:
        return
    # The partitioner of `jit` sums the result of a convolution as it is: in 16 bits on a GPU.
    for path, group in _large(collectives, "gradients", _HIGH):
        if group[0].operation == _CONVOLUTION:
            yield Finding(
                check="gradients",
                severity="warning",
                what=f"on a GPU the gradient of {path} is summed over {group[0].group_size} "
                f"devices in {compute_dtype}, at {group[0].source}: cuDNN's convolutions of low "
                "operands give low results, and jit adds these.",
                culprit=path,
                fix=_OF_CONVOLUTIONS,
            )


_CONVOLUTION = "conv_general_dilated"
_OF_PRODUCTS = (
    "Reduce in float32: mpjax.pods.gather under shard_map; under jit products whose weight "
    "gradient is float32, as autocast's are."
)
_OF_CONVOLUTIONS = (
    "Take gradients inside shard_map, and reduce them there: mpjax.pods.gather(..., "
    "reduce='mean'), or jax.lax.pmean of the float32 gradients."
)


def repeated(
    collectives: Sequence[Collective], leaves: Iterable[Leaf], mesh: Mapping[str, int]
) -> Iterator[Finding]:
    """Yields a finding for each gradient that is summed over devices several times in a step.

    That is so in a loop over micro-batches that reduces in each turn. A weight that is used twice
    has two gradients, and each may be reduced; it is in no loop.
    """
    by_path = {leaf.path: leaf for leaf in leaves}
    same = (c for c in collectives if c.role == "gradients" and c.kind in _SUMS)
    by_place = itertools.groupby(sorted(same, key=_place), key=_place)
    for (path, axes), members in by_place:
        group = list(members)
        leaf = by_path.get(path)
        if leaf is None or not leaf.elements:
            continue
        once = leaf.elements * math.prod(mesh[axis] for axis in axes if axis in leaf.axes)
        own = [c for c in group if math.prod(c.shape) <= once]  # others hold several gradients
        times = sum(math.prod(c.shape) * c.count for c in own) / once
        if times < (2 if any(c.count > 1 for c in group) else 3):
            continue
        yield Finding(
            check="gradients",
            severity="warning",
            what=f"the gradient of {path} is summed over {', '.join(axes)} {times:.0f} times, "
            f"{_mb(group)} a step at {group[0].source}.",
            culprit=path,
            fix="Add up micro-batches on each device and reduce their sum, where memory allows.",
        )


def _place(collective: Collective) -> tuple[str, tuple[str, ...]]:
    return collective.path, collective.axes


def gathered(collectives: Sequence[Collective], batch: frozenset[str]) -> Iterator[Finding]:
    """Yields a finding where activations are made whole along an axis that splits the batch."""
    everything = sum(c.total_bytes for c in collectives)
    whole = [
        c
        for c in collectives
        if c.role == "activations" and c.kind == "all-gather" and batch & {*c.axes}
    ]
    size, count = sum(c.total_bytes for c in whole), sum(c.count for c in whole)
    if count < 2 or size < GATHERED_SHARE * everything:
        return
    first = max(whole, key=lambda c: c.total_bytes)
    dims = ",".join(map(str, first.shape))
    yield Finding(
        check="activations",
        severity="warning",
        what=f"{first.dtype}[{dims}] of the batch is gathered whole over {', '.join(first.axes)} "
        f"at {first.source or 'an unnamed place'}; {count} such arrays, {_mb(whole)} a step.",
        culprit=first.source,
        fix="Gather weights and leave the batch split: under jit with_sharding_constraint on "
        "activations, or mpjax.pods.gather_constraint on weights.",
    )


def unknown(operations: Iterable[tuple[str, str]]) -> Iterator[Finding]:
    """Yields a finding for each kind of sending that the check does not know."""
    for name, source in operations:
        yield Finding(
            check="unknown",
            severity="warning",
            what=f"{name} at {source or 'an unnamed place'} sends between devices; what and in "
            "which dtype, the check cannot say.",
            culprit=source or name,
            fix="Look at it yourself: the other lines of this report are without it.",
        )


def activations(collectives: Sequence[Collective], compute_dtype: str) -> Iterator[Finding]:
    """Yields a finding for each line that sends activations in float32."""
    if compute_dtype not in _LOW:
        return
    everything = sum(c.total_bytes for c in collectives)
    wide = (c for c in collectives if c.role == "activations" and c.dtype in _HIGH)
    wide = sorted(wide, key=lambda c: (c.source, c.path))
    for (source, path), lines in itertools.groupby(wide, key=lambda c: (c.source, c.path)):
        group = list(lines)
        if sum(c.total_bytes for c in group) < SMALL_SHARE * everything:
            continue
        first = max(group, key=lambda c: c.total_bytes)
        dims = ",".join(map(str, first.shape))
        what = f"which is no parameter, {_mb(group)} a step at {source or 'an unnamed place'}"
        fix = f"Cast it to {compute_dtype} before it is sent."
        if path:
            what = f"which is {path}, {_mb(group)} a step"
            fix = f"Split {path} along another axis: as the step uses it, a device needs the whole."
        yield Finding(
            check="activations",
            severity="error",
            what=f"{first.kind} of {first.dtype}[{dims}], {what}.",
            culprit=source or path,
            fix=fix,
        )


def _large(
    collectives: Sequence[Collective], role: str, dtypes: Sequence[str]
) -> Iterator[tuple[str, list[Collective]]]:
    """Yields, by path, the collectives in one of the dtypes, if they are a large enough share."""
    same = [c for c in collectives if c.role == role]
    everything = sum(c.total_bytes for c in same)
    wrong = sorted((c for c in same if c.dtype in dtypes), key=lambda c: c.path)
    for path, members in itertools.groupby(wrong, key=lambda c: c.path):
        group = list(members)
        if sum(c.total_bytes for c in group) >= SMALL_SHARE * everything:
            yield path, group


def _mb(group: Iterable[Collective]) -> str:
    return f"{sum(c.total_bytes for c in group) / 1e6:.1f} MB"
