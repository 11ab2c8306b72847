"""Finds the operations that made an inf or NaN of the loss and gradients, and those that passed it.

It goes from these results backwards, through values that are not finite themselves. So it never
meets the -inf of a mask, the inf of a division that `jnp.where` leaves out, or a value that does
not get to the loss.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpjax.numerics._overflow import BORN_NAN, INF, NAN, ORIGIN, TURNED
from mpjax.numerics._plan import RECOMPUTED, MeasuredSite, RunPlan


@dataclasses.dataclass(frozen=True)
class Followed:
    """Rows by their part in an inf or NaN, each in the order in which they ran."""

    born: tuple[int, ...]  # not finite, of finite operands
    turned: tuple[int, ...]  # NaN, of infinities
    leaves: tuple[int, ...]  # arguments and constants that came in so
    inherited: tuple[int, ...]
    apart: tuple[int, ...]  # made here, or an argument, and never in the loss or a gradient
    literals: bool  # whether an inf or NaN written in the program is among the sources


def follow(plan: RunPlan, values: Any, index: Any, bad_outputs: Sequence[bool]) -> Followed:
    """Returns the rows that outputs have their inf and NaN from.

    Args:
      plan: of the program.
      values: f32[rows, 4], as `Overflow` measures them.
      index: i32[rows, depth], of loops and shards.
      bad_outputs: which of the program's outputs are not finite.
    """
    bad = values[:, INF] + values[:, NAN] > 0
    starts = [n for n, b in zip(plan.outputs, bad_outputs, strict=True) if b and n is not None]
    reached, literals = _reached(plan, bad, starts)
    order = sorted(reached, key=lambda row: when(plan.sites[row], row, index[row]))
    made = values[:, ORIGIN]
    leaves = [row for row in order if is_leaf(plan.sites[row])]
    inner = [row for row in order if not is_leaf(plan.sites[row])]
    arguments = np.array([site.phase == "argument" for site in plan.sites], bool)
    # Not finite, and on no way to the loss: an unused branch of `where`, an unused argument.
    apart = [
        row
        for row in np.flatnonzero(bad & (arguments | (made >= BORN_NAN))).tolist()
        if row not in reached and plan.sites[row].phase != "constant"
    ]
    born = [row for row in inner if made[row] >= BORN_NAN]
    return Followed(
        born=tuple(_once(plan, born)),
        turned=tuple(row for row in inner if made[row] == TURNED),
        leaves=tuple(leaves),
        inherited=tuple(row for row in inner if not made[row] or _again(plan, row, born)),
        apart=tuple(apart),
        literals=literals,
    )


def _again(plan: RunPlan, row: int, born: Sequence[int]) -> bool:
    """Whether a row repeats, in a checkpoint, a row of the forward pass that was not finite."""
    site = plan.sites[row]
    if site.phase != RECOMPUTED:
        return False
    known = (plan.sites[r] for r in born if plan.sites[r].phase != RECOMPUTED)
    return any(_what(other) == _what(site) for other in known)


def _what(site: MeasuredSite) -> tuple[str, str, str]:
    return site.module, site.operation, site.where


def _once(plan: RunPlan, born: Sequence[int]) -> list[int]:
    return [row for row in born if not _again(plan, row, born)]


def is_leaf(site: MeasuredSite) -> bool:
    """Whether a row is about an argument or a constant, and no operation."""
    return site.phase in ("argument", "constant")


def when(site: MeasuredSite, row: int, index: Any) -> tuple[int, ...]:
    """Returns a key by which rows sort as they ran: an iteration before the next one."""
    key: list[int] = []
    for level, number in zip(site.levels, index.tolist(), strict=False):
        key += [level.first_row, level.executed(number)]
    return (*key, row)


def _reached(plan: RunPlan, bad: Any, starts: Sequence[int]) -> tuple[set[int], bool]:
    rows: set[int] = set()
    seen: set[int] = set()
    waiting = list(starts)
    literals = False
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        literals |= node in plan.literals
        row = plan.row_of.get(node)
        if row is not None and not bad[row]:
            continue  # a finite value carries nothing on
        if row is not None:
            rows.add(row)
        waiting += plan.reads[node]
    return rows, literals
