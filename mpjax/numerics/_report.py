"""The report of `diagnose`: a row an operation, the cause, and a print of one screen."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

from mpjax._base.shown import Shown, Table
from mpjax.numerics._clock import spent


@dataclasses.dataclass(frozen=True)
class Row:
    """One operation of the program that ran, in the order in which they ran."""

    module: str  # the path of `jax.named_scope`s and modules; empty where there is none
    operation: str
    where: str  # the user's source line, 'file.py:12'
    phase: str  # 'forward', 'backward', 'recomputed' (the forward pass again, in a checkpoint)
    dtype: str
    shape: tuple[int, ...]
    inf: int  # elements, over all iterations and shards
    nan: int
    amax: float  # the largest finite magnitude
    headroom: float  # bits between amax and the dtype's largest number
    origin: (
        str  # 'born here', 'born of inf', 'inherited', 'apart', 'came in'; '' for what is finite
    )
    iteration: tuple[int, ...] = ()  # of the loops around it, by the index in what they scan
    shard: int | None = None  # of a `shard_map`, in the order of its devices
    branch: tuple[int, ...] = ()  # of the `cond`s around it
    library: str = ""  # the line of the library that the user's line called, if it called one

    @property
    def at(self) -> str:
        """The iteration, shard and branch in which it first was not finite."""
        parts = []
        if self.iteration:
            parts.append("iteration " + ".".join(map(str, self.iteration)))
        if self.shard is not None:
            parts.append(f"shard {self.shard}")
        if self.branch:
            parts.append("branch " + ".".join(map(str, self.branch)))
        return ", ".join(parts)


@dataclasses.dataclass(frozen=True)
class Cause:
    """The reason why the loss or a gradient is not finite, and the code to type."""

    kind: str
    """'loss_scale', 'range', 'gradient_range', 'precision', 'everywhere', 'leaf', 'masked',
    'unscaled' (finite gradients, without their scale) or 'none' (all is finite)."""
    text: str
    fix: str
    loss_scale: float | None = None  # the scale that fits, for 'loss_scale'


@dataclasses.dataclass(frozen=True, repr=False)
class Report(Shown):
    """The result of `diagnose`; `print(report)` shows it on one screen.

    `rows` holds every operation. `first` holds those that made an inf or NaN of finite operands
    which got into the loss or a gradient, in the order in which they ran.
    """

    function: str
    policy: str
    loss_scale: float
    loss: float
    bad_gradients: tuple[str, ...]  # paths
    gradients: int  # leaves in all
    rows: tuple[Row, ...]
    first: tuple[Row, ...]
    leaves: tuple[Row, ...]  # arguments and constants that are not finite and got there
    cause: Cause
    seconds: dict[str, float] = dataclasses.field(default_factory=dict[str, float], compare=False)

    @property
    def finite(self) -> bool:
        """Whether the loss and all gradients are finite."""
        return not self.bad_gradients and self.loss - self.loss == 0

    def to_dict(self) -> dict[str, Any]:
        """Returns all of it as dicts and lists, for JSON."""
        return dataclasses.asdict(self)

    def _headline(self) -> str:
        return f"{self._title()}; cause: {self.cause.kind}"

    def _blocks(self) -> list[str | Table]:
        blocks: list[str | Table] = [self._title()]
        if self.finite:
            blocks.append(self._headroom())
        else:
            tables = (self._leaves(), self._born(), self._inherited())
            blocks += [table for table in tables if table.rows]
        apart = self._apart()
        blocks += [apart] if apart else []
        blocks += [spent(self.seconds)] if self.seconds else []
        return [*blocks, f"cause: {self.cause.text}\n  {self.cause.fix}"]

    # -- blocks --------------------------------------------------------------------------------

    def _title(self) -> str:
        text = f"{self.function} under {self.policy}, loss scale {whole(self.loss_scale)}: "
        if self.finite:
            return text + f"loss {self.loss:.6g} and all {self.gradients} gradients are finite"
        bad = len(self.bad_gradients)
        first = f" (first {self.bad_gradients[0]!r})" if bad else ""
        return text + f"loss {self.loss:.6g}, {bad} of {self.gradients} gradients not finite{first}"

    def _leaves(self) -> Table:
        cells = [(r.module, r.phase, r.dtype, f"{r.inf}", f"{r.nan}") for r in self.leaves[:4]]
        headers = ("came in not finite", "kind", "dtype", "inf", "nan")
        return Table(headers, cells, _more(len(self.leaves), 4))

    def _born(self) -> Table:
        headers = ("born here", "operation", "where", "pass", "dtype", "inf", "nan", "amax", "at")
        cells = [
            (
                _module(r.module),
                r.operation,
                r.where,
                r.phase,
                r.dtype,
                f"{r.inf}",
                f"{r.nan}",
                _number(r.amax),
                r.at,
            )
            for r in self.first[:6]
        ]
        return Table(headers, cells, _more(len(self.first), 6))

    def _inherited(self) -> Table:
        places: dict[tuple[str, str], list[Row]] = {}
        for row in self.rows:
            if row.origin in ("inherited", "born of inf"):
                places.setdefault((row.module, row.phase), []).append(row)
        cells = [
            (
                _module(module),
                phase,
                f"{len(rows)}",
                _listed(dict.fromkeys(r.operation for r in rows)),
                rows[0].at,
            )
            for (module, phase), rows in list(places.items())[:8]
        ]
        headers = ("inherited by", "pass", "operations", "", "at")
        return Table(headers, cells, _more(len(places), 8))

    def _apart(self) -> str:
        apart = [r for r in self.rows if r.origin == "apart"]
        if not apart:
            return ""
        text = [
            f"the argument {r.module!r} ({count(r)} of {math.prod(r.shape)})"
            if r.phase == "argument"
            else f"{r.operation} in {_module(r.module)} ({r.where})"
            for r in apart[:3]
        ]
        rest = f" and {len(apart) - 3} more" if len(apart) > 3 else ""
        return f"apart, for it never got into the loss or a gradient: {', '.join(text)}{rest}"

    def _headroom(self) -> Table:
        narrow = [r for r in self.rows if r.amax > 0 and r.phase not in ("argument", "constant")]
        least = sorted(narrow, key=lambda r: r.headroom)
        best: dict[tuple[str, str], Row] = {}
        for row in least:
            best.setdefault((row.module, row.phase), row)
        cells = [
            (
                _module(r.module),
                r.operation,
                r.where,
                r.phase,
                r.dtype,
                _number(r.amax),
                f"{r.headroom:.1f} bits",
            )
            for r in list(best.values())[:8]
        ]
        headers = ("least headroom", "operation", "where", "pass", "dtype", "amax", "headroom")
        return Table(headers, cells, _more(len(best), 8))


def count(row: Row) -> str:
    """Returns the number of elements of a row that are not finite, in words."""
    parts = [f"{row.inf} inf"] * bool(row.inf) + [f"{row.nan} NaN"] * bool(row.nan)
    return " and ".join(parts)


def _module(module: str) -> str:
    return module or "(no name)"


def _listed(names: Iterable[str], width: int = 44) -> str:
    known = list(names)
    text, shown = ", ".join(known), len(known)
    while len(text) > width and shown > 1:
        shown -= 1
        text = f"{', '.join(known[:shown])}, +{len(known) - shown}"
    return text


def _more(count: int, shown: int) -> str:
    return f"… and {count - shown} more, in .rows" if count > shown else ""


def _number(x: float) -> str:
    return f"{x:.0f}" if x == int(x) and abs(x) < 1e7 else f"{x:.3g}"


def whole(scale: float) -> str:
    """Returns a loss scale with all of its digits: 16777216, not 1.67772e+07."""
    return f"{scale:.0f}" if scale % 1 == 0 else f"{scale:g}"
