"""Figures of matplotlib that a notebook shows by itself: once, at their size, light and dark."""

from __future__ import annotations

import base64
import contextlib
import functools
import io
from collections.abc import Generator
from typing import Any

_DARK = "#e0e0e0", "#1c1c1c"  # ink and paper
_SHARP = 2  # pixels of a picture for one of the page


def new_figure(width: float, height: float) -> Any:
    """Returns an empty figure of a size in inches.

    It is none of pyplot's, which would show it a second time and hold it until it is closed.
    """
    return _kind()(figsize=(width, height), layout="constrained")


@functools.cache
def _kind() -> type:
    from matplotlib.figure import Figure  # optional: only drawing needs it

    class NotebookFigure(Figure):
        """A figure with a picture for a light page and one for a dark page."""

        def _repr_html_(self) -> str:
            width = round(self.get_figwidth() * 96)  # a page has 96 pixels an inch
            light = _picture(self)
            with _colours(self, *_DARK):
                dark = _picture(self)
            style = f"width: {width}px; max-width: 100%"
            return (
                f'<picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
                f'<img src="{light}" style="{style}"></picture>'
            )

    return NotebookFigure


def _picture(figure: Any) -> str:
    """Returns a figure as the address of a PNG that is written in the page itself."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=96 * _SHARP)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


@contextlib.contextmanager
def _colours(figure: Any, ink: str, paper: str) -> Generator[None]:
    """Draws in a `with` block words, ticks and frames in `ink`, the background in `paper`."""
    from matplotlib.lines import Line2D
    from matplotlib.spines import Spine
    from matplotlib.text import Text

    legends = [a.get_legend().get_frame() for a in figure.axes if a.get_legend()]
    behind = [figure.patch, *(a.patch for a in figure.axes), *legends]
    ticks = [t for a in figure.axes for t in (*a.get_xticklines(), *a.get_yticklines())]
    written = [*figure.findobj(Text), *(t for t in ticks if isinstance(t, Line2D))]
    frames = figure.findobj(Spine)
    before = (
        [(x.set_color, x.get_color()) for x in written]
        + [(x.set_edgecolor, x.get_edgecolor()) for x in frames]
        + [(x.set_facecolor, x.get_facecolor()) for x in behind]
    )
    for x in written:
        x.set_color(ink)
    for x in frames:
        x.set_edgecolor(ink)
    for x in behind:
        x.set_facecolor(paper)
    try:
        yield
    finally:
        for put, colour in before:
            put(colour)
