"""Shows reports: as tables in print and in notebooks, in one line at a prompt and in a log."""

import dataclasses
import html
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from mpjax._base.foreign_attributes import REPORT_ATTRIBUTES
from mpjax._base.foreign_errors import attribute_error

WIDTH = 118
_NEVER_BROKEN = 12  # letters: a number such as 3.9e-03 would break at its hyphen


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of a report: it prints as aligned columns, and a notebook draws it.

    Example:
      >>> print(Table(("layer", "error"), [("head", "0.1"), ("norm", "0.02")]))
      layer             error
      head              0.1
      norm              0.02
    """

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""  # a line below

    def __str__(self) -> str:
        return table(self.headers, self.rows) + (f"\n{self.note}" if self.note else "")

    def html(self) -> str:
        """Returns it as HTML, without a title."""
        return html_table("", self.headers, self.rows, [self.note] if self.note else [])


class Shown:
    """A report: `print` shows all of it, `repr` one line of it, and notebooks draw its tables.

    A subclass gives `_blocks`: texts and tables, of which the first is a title. Or it has a
    `__str__` and a `_repr_html_` of its own.
    """

    __slots__ = ()

    if not TYPE_CHECKING:  # or an editor would believe that there is any attribute
        __getattr__ = attribute_error(REPORT_ATTRIBUTES)

    def _blocks(self) -> Sequence[str | Table]:
        """Returns texts and tables in their order."""
        raise NotImplementedError

    def _headline(self) -> str:
        """Returns the text of `repr`: the title, and the most important number."""
        return str(self._blocks()[0])

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._headline()}; print it to see all>"

    def __str__(self) -> str:
        return "\n\n".join(str(block) for block in self._blocks())

    def _repr_html_(self) -> str:
        title, *blocks = self._blocks()
        return f"<p><b>{_lines(str(title))}</b></p>" + "".join(
            block.html() if isinstance(block, Table) else f"<p>{_lines(block)}</p>"
            for block in blocks
        )


def _lines(text: str) -> str:
    return "<br>".join(html.escape(line) for line in text.splitlines())


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns lines of aligned cells; if a line is too long, the first column is shortened."""
    cells = [tuple(headers), *(tuple(row) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headers))]
    most = WIDTH - sum(widths[1:]) - 2 * len(widths)
    widths[0] = min(widths[0], max(most, len(headers[0]), 16))
    lines: list[str] = []
    for row in cells:
        fitting = (_fitted(c, w) for c, w in zip(row, widths, strict=True))
        padded = (c.ljust(w) for c, w in zip(fitting, widths, strict=True))
        lines.append("  ".join(padded).rstrip()[:WIDTH])
    return "\n".join(lines)


def _fitted(text: str, width: int) -> str:
    """Returns a path, or, if it does not fit, its end, which names the layer."""
    return text if len(text) <= width else f"…{text[len(text) - width + 1 :]}"


def html_table(
    title: str,
    headers: Sequence[str],
    rows: Sequence[Sequence[str] | str],
    notes: Sequence[str] = (),
) -> str:
    """Returns an HTML table.

    Args:
      title: stands above it; empty for none.
      headers: one a column.
      rows: cells; a single text is the title of the rows that follow, across all columns.
      notes: lines below it.
    """
    body = "".join(
        _row(f'<th colspan="{len(headers)}" style="text-align: left">{html.escape(row)}</th>')
        if isinstance(row, str)
        else _row("".join(map(_cell, row)))
        for row in rows
    )
    head = _row("".join(f'<th style="text-align: left">{html.escape(h)}</th>' for h in headers))
    above = f"<p><b>{html.escape(title)}</b></p>" * bool(title)
    below = "<br>".join(map(html.escape, notes))
    shown = f"{above}<table><thead>{head}</thead><tbody>{body}</tbody></table>"
    return shown + f"<p>{below}</p>" * bool(notes)


def _row(cells: str) -> str:
    return f"<tr>{cells}</tr>"


def _cell(text: str) -> str:
    whole = "; white-space: nowrap" * (len(text) <= _NEVER_BROKEN)
    return f'<td style="text-align: left{whole}">{html.escape(text)}</td>'


def size(count: Any) -> str:
    """Returns a number of bytes in a unit that keeps it below five digits, a formula as it is."""
    if not isinstance(count, int):
        return f"{count} B"
    for unit in ("B", "kB", "MB"):
        if count < 10_000:
            return f"{count} {unit}"
        count //= 1000
    return f"{count} GB"
