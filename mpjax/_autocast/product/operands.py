"""Operands with an 8-bit copy, as arguments of a primitive.

The product multiplies the 8-bit values, and their scales afterwards. The array from which they were
made is an argument for its derivatives alone, so that a compiled program stores one byte a value
and not two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from mpjax._base import compat
from mpjax._jaxpr.identity import in_front


class Operand(NamedTuple):
    """An operand of a product."""

    array: Any
    stored: tuple[Any, Any] | None = None  # its 8-bit values and their scales


Kept = tuple[bool, bool]
"""For each of two operands, whether 8-bit values and scales of it follow all other arguments."""


def joined(args: Sequence[Any], stored: Sequence[Any]) -> tuple[tuple[Any, ...], Kept]:
    """Returns arguments, followed by the 8-bit values and scales of two operands."""
    kept = stored[0] is not None, stored[1] is not None
    return (*args, *(x for pair in stored if pair is not None for x in pair)), kept


def parted(args: Sequence[Any], kept: Kept) -> tuple[Sequence[Any], tuple[Any, Any]]:
    """Returns arguments, and the 8-bit values and scales of two operands, None for none."""
    first, second = places(len(args), kept)
    pairs = tuple(args[i] for i in first) or None, tuple(args[i] for i in second) or None
    return args[: len(args) - 2 * sum(kept)], pairs


def places(count: int, kept: Kept) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the places of each operand's 8-bit values and scales among `count` arguments."""
    begin = count - 2 * sum(kept)
    first = (begin, begin + 1) if kept[0] else ()
    return first, (count - 2, count - 1) if kept[1] else ()


def batched_together(
    args: Sequence[Any], dims: Sequence[Any], group: Sequence[int], behind: Sequence[int]
) -> tuple[list[Any], list[Any]]:
    """Returns arguments and batch axes; if one form of an operand is batched, all are, on axis 0.

    Args:
      args, dims: of a batching rule.
      group: places of the arrays that have the shape of the operand.
      behind: places of its 8-bit values and its scales, empty if it has none.
    """
    args, dims = list(args), list(dims)
    alike, scale = [*group, *behind[:1]], behind[1:]
    if all(not compat.is_batched(dims[i]) for i in (*group, *behind)):
        return args, dims
    size = compat.batch_size(args, dims)
    for i in alike:
        args[i], dims[i] = in_front(args[i], dims[i], size), 0
    for i in scale:  # a scale that all examples share has a batch axis of 1
        args[i], dims[i] = in_front(args[i], dims[i], 1), 0
    return args, dims
