"""The axes of a product: each with its place in both operands and in the result.

Example: `einsum("bij,bjk->bik")` has four, of which `j` has no place in the result.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Axis(NamedTuple):
    """One axis of a product: its place in both operands and the result, None where one lacks it.

    The product sums over an axis that the result lacks. An axis of all three is a batch axis.
    """

    first: int | None
    second: int | None
    result: int | None
    mapped: bool = False  # by `jax.vmap`: its examples do not share a scale


Axes = tuple[Axis, ...]


def of_dot_general(dimension_numbers: Any, ndims: tuple[int, int]) -> Axes:
    """Returns the axes of a `dot_general`."""
    contracted, batch = dimension_numbers
    both = [Axis(i, j, place) for place, (i, j) in enumerate(zip(*batch, strict=True))]
    free = [
        [i for i in range(ndim) if i not in (*summed, *batched)]
        for ndim, summed, batched in zip(ndims, contracted, batch, strict=True)
    ]
    second = len(both) + len(free[0])
    return (
        *both,
        *(Axis(i, None, len(both) + n) for n, i in enumerate(free[0])),
        *(Axis(None, j, second + n) for n, j in enumerate(free[1])),
        *(Axis(i, j, None) for i, j in zip(*contracted, strict=True)),
    )


def transposed(axes: Axes, wrt: int) -> Axes:
    """Returns the axes of (cotangent, other operand) → cotangent of operand `wrt`."""
    return tuple(Axis(a.result, a[1 - wrt], a[wrt], a.mapped) for a in axes)


def mapped(axes: Axes, first: int | None, second: int | None) -> Axes:
    """Returns the axes of a product that `jax.vmap` maps over; the result has it in front."""

    def moved(place: int | None, new: int | None) -> int | None:
        return place if place is None or new is None or place < new else place + 1

    wider = (
        Axis(moved(a.first, first), moved(a.second, second), moved(a.result, 0), a.mapped)
        for a in axes
    )
    return (Axis(first, second, 0, mapped=True), *wider)
