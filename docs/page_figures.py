"""Draws the pictures of numerics.md from what its own code blocks find, run as they stand there.

`python docs/figures.py --page` writes them into docs/images/. They are to be read on a telephone:
at a width of 420 pixels the smallest letter is 9 pixels high.
"""

import contextlib
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ORANGE, BLUE, GREY = "#d55e00", "#0072b2", "#777777"
WIDTH, DPI = 5.25, 160  # inches; 840 pixels, twice a telephone's 420
SMALL = 8.5  # points


def drawn(folder: Path) -> list[str]:
    """Runs the blocks of the page in turn, draws where a picture follows, and returns its names."""
    page = (Path(__file__).parent / "numerics.md").read_text()
    names: dict[str, Any] = {}
    made = []
    parts = re.findall(r"```python\n(.*?)```|^```\{image\} images/(\S+)$", page, re.DOTALL | re.M)
    for block, picture in parts:
        if picture:
            PICTURES[picture](names).savefig(folder / picture, dpi=DPI)
            made.append(picture)
            continue
        with contextlib.redirect_stdout(None):
            exec(block, names)
    return made


def _panels(height: float, columns: int = 1) -> tuple[Figure, Any]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots(1, columns, sharey=True)
    for each in np.ravel(axes):
        each.spines[["top", "right"]].set_visible(False)
        each.tick_params(labelsize=SMALL)
    return figure, axes


def draw_overflow(names: dict[str, Any]) -> Figure:
    """Draws the largest magnitude of each operation to the first inf, and who inherited that."""
    rows = [r for r in names["report"].rows if r.phase == "forward" and r.module and r.shape]
    rows = [r for r in rows if r.operation != "convert_element_type"]
    first = next(i for i, row in enumerate(rows) if row.origin == "born here")
    labels = [f"{r.module}: {r.operation} {r.dtype}" for r in rows[: first + 1]]
    inherited = [r.module for r in rows[first + 1 :] if r.inf or r.nan]
    figure, axes = _panels(0.26 * (first + 1 + len(set(inherited))) + 0.7)
    for y, row in enumerate(rows[:first]):
        axes.barh(y, math.log2(row.amax) + 4, left=-4, color=BLUE, height=0.75)
    axes.barh(first, 20, left=-4, color=ORANGE, height=0.75)
    axes.text(-3.5, first, f"{rows[first].inf} inf, born here", color="white", **_middle())
    for y, module in enumerate(dict.fromkeys(inherited), first + 1):
        labels.append(f"{module}: {inherited.count(module)} more")
        axes.barh(y, 20, left=-4, color=ORANGE, alpha=0.25, height=0.75)
        axes.text(-3.5, y, "inherited", **_middle())
    axes.axvline(16, color="black", linewidth=1)
    axes.text(16.4, 0, "65504, the\nlargest\nfloat16", va="top", fontsize=SMALL)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_xticks(range(0, 25, 4), [f"2$^{{{x}}}$" for x in range(0, 25, 4)])
    axes.set(xlim=(-4, 24), ylim=(len(labels) - 0.5, -0.5))
    axes.set_xlabel("largest finite magnitude", fontsize=SMALL)
    return figure


def _middle() -> dict[str, Any]:
    return {"va": "center_baseline", "fontsize": SMALL}


def draw_norm(names: dict[str, Any]) -> Figure:
    """Draws a norm's weights over the steps, rounded in three ways."""
    figure, axes = _panels(3.0)
    ways = {
        "float32 (bf16-mixed)": ("float32", GREY, 3.5),
        "bfloat16, rounded to nearest: 1.0 stays": ("nearest", ORANGE, 2),
        "bfloat16, rounded stochastically": ("stochastic", BLUE, 0.7),
    }
    for label, (name, color, width) in ways.items():
        lines = axes.plot(names["curves"][name], color=color, linewidth=width)
        lines[0].set_label(label)
    axes.axhline(0.7, color="black", linewidth=1, linestyle=":")
    axes.text(0, 0.705, "where the loss is lowest", fontsize=SMALL)
    axes.set_xlabel("step of Adam at a learning rate of 0.001", fontsize=SMALL)
    axes.set_ylabel("weights of a norm", fontsize=SMALL)
    axes.set_ylim(0.67, 1.02)
    axes.legend(fontsize=SMALL, frameon=False, loc="upper right", bbox_to_anchor=(1, 0.95))
    for line in axes.get_legend().get_lines():
        line.set_linewidth(2.5)
    return figure


def draw_errors(names: dict[str, Any]) -> Figure:
    """Draws both errors of each layer, of the forward pass and of the backward pass."""
    figure, panels = _panels(2.9, 2)
    for axes, phase in zip(panels, ("forward", "backward"), strict=True):
        found = {e.module: e for e in names["report"].modules if e.module and e.phase == phase}
        ordered = [found[module] for module in sorted(found)]
        axes.bar(range(len(ordered)), [e.local for e in ordered], color=ORANGE, label="local")
        style = {"color": BLUE, "label": "accumulated", "markersize": 5}
        axes.plot([e.accumulated for e in ordered], "o-", **style)
        axes.set_yscale("log")
        axes.set_xticks(range(len(ordered)))
        arrow = "layer →" if phase == "forward" else "← layer"
        axes.set_xlabel(arrow, fontsize=SMALL + 1)
        axes.set_title(f"{phase} pass", fontsize=SMALL + 1)
        worst = max(range(len(ordered)), key=lambda i: ordered[i].local)
        style = {"rotation": 90, "ha": "center", "color": "white", "fontsize": SMALL}
        axes.text(worst, 6e-4, "cast to 8 bits", **style)
    panels[0].set_ylabel("relative error", fontsize=SMALL)
    panels[0].set_ylim(5e-4, 0.4)
    panels[0].legend(fontsize=SMALL, frameon=False, loc="upper left")
    return figure


def draw_exponents(names: dict[str, Any]) -> Figure:
    figure, axes = _panels(3.4)
    names["report"].plot(axes)
    _enlarge(axes)
    return figure


def _enlarge(axes: Axes) -> None:
    """Sets the texts of a plot to the size of the others, its legend above it."""
    for text in (*axes.texts, axes.xaxis.label, axes.yaxis.label):
        text.set_fontsize(SMALL)
    style = {"fontsize": SMALL, "frameon": False, "ncols": 2, "columnspacing": 1.0}
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), **style)


PICTURES: dict[str, Callable[[dict[str, Any]], Figure]] = {
    "overflow.png": draw_overflow,
    "norm.png": draw_norm,
    "errors.png": draw_errors,
    "exponents.png": draw_exponents,
}
