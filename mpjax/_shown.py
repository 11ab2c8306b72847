"""How a report is shown where its reader is: at a prompt as text, in a notebook as a table."""

import html
from collections.abc import Sequence
from typing import Any


class Shown:
    """A report: `repr` is its table, so that a prompt shows it, and notebooks draw it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def html_table(
    title: str,
    headers: Sequence[str],
    rows: Sequence[Sequence[str] | str],
    notes: Sequence[str] = (),
) -> str:
    """Returns an HTML table.

    Args:
      title: stands above it.
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
    below = "<br>".join(map(html.escape, notes))
    return (
        f"<table><caption>{html.escape(title)}</caption>"
        f"<thead>{head}</thead><tbody>{body}</tbody></table>" + f"<p>{below}</p>" * bool(notes)
    )


def _row(cells: str) -> str:
    return f"<tr>{cells}</tr>"


def _cell(text: str) -> str:
    return f'<td style="text-align: left">{html.escape(text)}</td>'


def size(count: Any) -> str:
    """Returns a number of bytes in a unit that keeps it below five digits, a formula as it is."""
    if not isinstance(count, int):
        return f"{count} B"
    for unit in ("B", "kB", "MB"):
        if count < 10_000:
            return f"{count} {unit}"
        count //= 1000
    return f"{count} GB"
