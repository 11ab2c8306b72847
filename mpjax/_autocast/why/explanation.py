"""The result of `explain`, shown on one screen, whatever the number of layers.

Layers whose names differ only in a number share their lines, and so do siblings with the same
decisions. Within these, operations of one dtype and one reason are one line.
"""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mpjax._autocast.known import scopes
from mpjax._autocast.why.provenance import FUSED, ROUNDED
from mpjax._base.dtypes import short_name
from mpjax._base.shown import Shown, html_table, size
from mpjax._jaxpr.op_rules import PRODUCTS
from mpjax._policies.recipes import DTYPES as EIGHT_BIT

_WIDTH, _REASON_WIDTH = 120, 62
_HEADERS = ("operations", "dtype", "why", "where")
_PRODUCTS = PRODUCTS | {"attention", "attention_backward"}
_LOW = frozenset(map(short_name, (*EIGHT_BIT.values(), "bfloat16", "float16")))


@dataclass(frozen=True)
class Row:
    """One distinct decision: an operation in a module, its dtype, and why."""

    module: str  # the path of `jax.named_scope`s; empty outside of any
    operation: str
    count: int
    dtype: str  # of the operands of a product, of the result of any other operation
    reason: str
    where: str  # the first source line
    cause: str = ""  # the operation whose float32 result this one follows, if it does
    cause_module: str = ""


@dataclass(frozen=True)
class Casts:
    """The casts of one kind in the program after autocast; a loop's body counts once."""

    source: str
    target: str
    count: int
    bytes: int  # of their results


@dataclass(frozen=True, repr=False)
class Explanation(Shown):
    """The result of `explain`: a table in `print` and in a notebook; rich colours it.

    `rows` and `to_dict()` hold every decision of every module; the table shows alike ones once.
    """

    function: str
    policy: str
    rows: tuple[Row, ...]
    casts: tuple[Casts, ...]

    def warnings(self) -> list[str]:
        """Returns the function's own roundings that may make a result wrong under any policy.

        Example: `p.astype(jnp.bfloat16)`, and then `jnp.log1p(-p)`, which is -inf where `p` rounds
        to 1.
        """
        return [
            f"{scopes.short(row.where)}: the function itself asks for {row.dtype}, though "
            f"{row.reason.removeprefix(ROUNDED)}. It may be silently wrong under any policy: leave "
            "that dtype out, or cast behind the operation."
            for row in self.rows
            if row.reason.startswith(ROUNDED)
        ]

    def to_dict(self) -> dict[str, Any]:
        """Returns all rows and casts as dicts and lists, for JSON."""
        return {
            "function": self.function,
            "policy": self.policy,
            "rows": [asdict(row) for row in self.rows],
            "casts": [asdict(cast) for cast in self.casts],
        }

    def _title(self) -> str:
        return f"{self.function} under {self.policy}"

    def _headline(self) -> str:
        return "; ".join([self._title(), *self.summary()])

    def summary(self) -> list[str]:
        """Returns the totals as lines: products, other operations, casts."""
        products = [r for r in self.rows if r.operation in _PRODUCTS]
        fused = [r for r in self.rows if r.reason == FUSED]
        others = [r for r in self.rows if r.operation not in _PRODUCTS and r.reason != FUSED]
        casts = [f"{c.count} {c.source} to {c.target} ({size(c.bytes)})" for c in self.casts]
        between = sum(row.count for row in fused)
        return [
            f"products: {_shares(products)}",
            f"other operations: {_shares(others)}" + f", {between} fused" * bool(between),
            f"casts: {', '.join(casts) or 'none'}",
            *self.warnings(),
        ]

    def __str__(self) -> str:
        grouped = _groups(self.rows)
        lines = [line for group in grouped for line in group.lines]
        cells = (_HEADERS, *(line.cells for line in lines))
        widths = [max(len(row[i]) for row in cells) for i in range(len(_HEADERS))]
        widths[2] = min(widths[2], _REASON_WIDTH)
        widths[0] = max(len(_HEADERS[0]), min(widths[0], _WIDTH - 8 - sum(widths[1:])))
        text = [self._title(), "", *_wrapped(_HEADERS, widths)]
        for group in grouped:
            text.append(group.title)
            for line in group.lines:
                text += _wrapped(line.cells_within(widths[0]), widths)
        return "\n".join([*text, "", *self.summary()])

    def _repr_html_(self) -> str:
        rows: list[str | tuple[str, ...]] = []
        for group in _groups(self.rows):
            rows += [group.title, *(line.cells for line in group.lines)]
        return html_table(self._title(), _HEADERS, rows, self.summary())

    def __rich__(self) -> Any:
        from rich import box  # only for who prints with rich
        from rich.table import Table

        table = Table(
            *_HEADERS,
            title=self._title(),
            caption="\n".join(self.summary()),
            box=box.SIMPLE_HEAD,
            caption_justify="left",
            padding=(0, 1, 0, 0),
        )
        for group in _groups(self.rows):
            table.add_row(group.title, style="bold")
            for line in group.lines:
                style = "green" if line.dtype in _LOW else ""
                table.add_row("  " + line.cells[0], *line.cells[1:], style=style)
        return table


def _shares(rows: Iterable[Row]) -> str:
    """Returns the number of operations in each dtype, as '12 bf16, 3 f32'."""
    counts: dict[str, int] = {}
    for row in rows:
        counts[row.dtype] = counts.get(row.dtype, 0) + row.count
    ordered = sorted(counts.items(), key=lambda pair: (pair[0] not in _LOW, pair[0]))
    return ", ".join(f"{count} {dtype}" for dtype, count in ordered) or "none"


# -- lines ---------------------------------------------------------------------------------------


@dataclass
class _Line:
    """A line of the table: operations of a group of modules, of one dtype and one reason."""

    dtype: str
    reason: str
    where: str
    counts: dict[str, int] = field(default_factory=dict)  # by operation

    @property
    def cells(self) -> tuple[str, ...]:
        return ", ".join(self._operations()), self.dtype, self.reason, self.where

    def cells_within(self, width: int) -> tuple[str, ...]:
        """Returns the cells, with no more operations than fit."""
        operations = self._operations()
        text, shown = ", ".join(operations), len(operations)
        while len(text) > width and shown > 1:
            shown -= 1
            text = f"{', '.join(operations[:shown])}, +{len(operations) - shown}"
        return text, *self.cells[1:]

    def _operations(self) -> list[str]:
        return [f"{n} ×{c}" if c > 1 else n for n, c in self.counts.items()]


@dataclass
class _Group:
    """Modules with the same decisions, which share their lines."""

    paths: list[str]  # with * for a number that differs between modules
    modules: int
    lines: list[_Line]

    @property
    def title(self) -> str:
        if self.paths == [""]:
            return "(outside of any named scope)"
        parents = {path.rpartition("/")[0] for path in self.paths}
        names = [path.rpartition("/")[2] for path in self.paths]
        (parent,) = parents
        text = names[0] if len(names) == 1 else "{" + ", ".join(names) + "}"
        many = f"  ({self.modules} modules)" if self.modules > 1 else ""
        return (f"{parent}/{text}" if parent else text) + many

    def decided(self) -> tuple[Any, ...]:
        """Returns a key: siblings with equal keys share their lines."""
        parent = self.paths[0].rpartition("/")[0]
        lines = [(line.dtype, line.reason, tuple(line.counts.items())) for line in self.lines]
        return parent, self.paths[0] == "", self.modules, tuple(lines)


def _groups(rows: Iterable[Row]) -> list[_Group]:
    """Returns the rows in groups: by pattern of module path, siblings with equal lines together."""
    by_pattern: dict[str, list[Row]] = {}
    for row in rows:
        by_pattern.setdefault(re.sub(r"\d+", "*", row.module), []).append(row)
    merged: dict[tuple[Any, ...], _Group] = {}
    for pattern, members in by_pattern.items():
        modules = {row.module for row in members}
        path = pattern if len(modules) > 1 else members[0].module
        group = _Group([path], len(modules), _lines(members))
        same = merged.setdefault(group.decided(), group)
        if same is not group:
            same.paths += group.paths
            for line, other in zip(same.lines, group.lines, strict=True):
                line.counts = {n: c + other.counts[n] for n, c in line.counts.items()}
    for group in merged.values():
        group.modules *= len(group.paths)
    return list(merged.values())


def _lines(rows: Iterable[Row]) -> list[_Line]:
    lines: dict[tuple[str, str], _Line] = {}
    for row in rows:
        reason = row.reason
        if row.cause and row.cause_module != row.module:
            name = re.sub(r"\d+", "*", row.cause_module.rpartition("/")[2])
            reason = f"after {row.cause} of {name}" if name else f"after {row.cause}"
        key = (row.dtype, reason)
        line = lines.setdefault(key, _Line(row.dtype, reason, scopes.short(row.where)))
        line.counts[row.operation] = line.counts.get(row.operation, 0) + row.count
    return list(lines.values())


def _wrapped(cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    """Returns a line of the table, and more for a cell that is wider than its column."""
    columns = [textwrap.wrap(cell, width) for cell, width in zip(cells, widths, strict=True)]
    lines = itertools.zip_longest(*columns, fillvalue="")
    padded = (map(str.ljust, line, widths) for line in lines)
    return [f"  {'  '.join(line)}".rstrip() for line in padded]
