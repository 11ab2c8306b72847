"""Draws what attention's forward pass keeps for its backward pass, without a kernel and with one.

Each square is an array, and as large as it. What is kept is asked of autocast, of one layer of 16
heads over 8 × 1024 tokens; nothing is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import mpjax
from mpjax._autocast.speed import hints

BATCH, TIME, HEADS, SIZE = 8, 1024, 16, 64
PAIRS, ROWS = "queries × keys", "a number for each row"
COLORS = {PAIRS: "#d55e00", ROWS: "#009e73", "tokens": "#0072b2"}
LABEL = 3.6  # as wide as what is written below a square
PANELS = {"as XLA runs it": True, "in one kernel": False}  # whether without the hint


def layer(query: jax.Array, key: jax.Array, value: jax.Array, out: jax.Array) -> jax.Array:
    """Returns causal attention as anyone writes it, and the product that reads it."""
    logits = jnp.einsum("bqhd,bkhd->bhqk", query, key) * SIZE**-0.5
    logits = jnp.where(jnp.tril(jnp.ones((TIME, TIME), bool)), logits, -1e9)
    y = jnp.einsum("bhqk,bkhd->bhqd", jax.nn.softmax(logits), value)
    return jnp.einsum("bhqd,hde->bqe", y, out)


def kept(*, as_xla: bool) -> list[Any]:
    """Returns the arrays that autocast's forward pass keeps, the weight of `out` left out."""
    heads = jax.ShapeDtypeStruct((BATCH, TIME, HEADS, SIZE), jnp.float32)
    out = jax.ShapeDtypeStruct((HEADS, SIZE, HEADS * SIZE), jnp.float32)

    def pull(*args: Any) -> Callable[..., Any]:
        return jax.vjp(mpjax.autocast(lambda *xs: layer(*xs), "bf16-mixed"), *args)[1]

    if as_xla:
        with hints.without("attended"):
            leaves = jax.tree.leaves(jax.eval_shape(pull, heads, heads, heads, out))
    else:
        leaves = jax.tree.leaves(jax.eval_shape(pull, heads, heads, heads, out))
    return [x for x in leaves if BATCH in x.shape]


def kind(x: Any) -> str:
    if x.shape[-2:] == (TIME, TIME) and HEADS in x.shape:
        return PAIRS
    return ROWS if x.size == BATCH * HEADS * TIME else "tokens"


def size(x: Any) -> int:
    """Returns the bytes of an array."""
    return math.prod(x.shape) * x.dtype.itemsize


def panels() -> dict[str, list[Any]]:
    """Returns by its title what each panel shows, the largest array first."""
    found = {}
    for title, as_xla in PANELS.items():
        arrays = sorted(kept(as_xla=as_xla), key=size, reverse=True)
        found[f"{title}: {_megabytes(sum(map(size, arrays)))} are kept"] = arrays
    return found


def text() -> str:
    """Returns what the picture shows, a line an array."""
    lines = []
    for title, arrays in panels().items():
        shown = [f"  {kind(x)}: {x.dtype}{list(x.shape)}, {_megabytes(size(x))}" for x in arrays]
        lines += [title, *shown]
    return "\n".join(lines)


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.0f} MB" if count >= 1e6 else f"{count / 1e6:.1f} MB"


def draw(path: Path) -> None:
    """Draws the panels side by side, on one scale."""
    figure = Figure(figsize=(11, 3.2), dpi=120, layout="constrained")
    axes = figure.subplots()
    left = 0.0
    for title, arrays in panels().items():
        right = _draw_arrays(axes, left, arrays)
        axes.text((left + right) / 2, 18.5, title, ha="center", fontsize=11)
        left = right + 3 * LABEL
    axes.set(xlim=(0, left - 3 * LABEL), ylim=(-2, 20), aspect="equal")
    axes.set_axis_off()
    patches = [Rectangle((0, 0), 1, 1, color=color) for color in COLORS.values()]
    figure.legend(patches, COLORS, loc="outside lower center", ncols=len(COLORS), frameon=False)
    figure.savefig(path, metadata={"Description": text()})


def _draw_arrays(axes: Axes, left: float, arrays: list[Any]) -> float:
    """Draws a square for each array, its area in MB, and returns where the last one ends."""
    for array in arrays:
        side = math.sqrt(size(array) / 1e6)
        width = max(side, LABEL)
        middle = left + width / 2
        axes.add_patch(Rectangle((middle - side / 2, 0), side, side, color=COLORS[kind(array)]))
        axes.text(middle, -0.5, _megabytes(size(array)), ha="center", va="top", fontsize=8)
        left += width + 1
    return left - 1
