"""Draws what a GPU's clock says of training steps, from benchmarks/results/gpu.json: `gpu.png`.

`gpu.txt` holds the same numbers, and `gpu_shares.txt` what the first pages say of them.
"""

from __future__ import annotations

import functools
import json
import textwrap
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "gpu.json"
HAND, CUDNN, TORCH = "cast by hand", "by hand, cuDNN", "torch.compile"
WAYS = {  # what readers call it: card and variant of the table, and colour
    "float32": ("card 2", "float32 highest", "#b8b8b8"),
    "float32, TF32": ("card 2", "float32", "#cfcfcf"),
    HAND: ("card 2", "hand cast bf16", "#dedede"),
    CUDNN: ("card 2", "hand cast bf16, cuDNN", "#c9dbe6"),
    TORCH: ("card 3", "autocast bf16, compiled", "#f3c677"),
    "mpjax": ("card 2", "autocast bf16", "#56b4e9"),
}
NETWORKS = {  # what the sizes for a GPU are
    "transformer": "GPT-2 medium",
    "llama": "Llama, 8 layers",
    "bert": "BERT-large",
    "vit": "ViT-B/16",
    "resnet50": "ResNet-50",
    "unet": "U-Net",
    "lstm": "LSTM",
    "mlp": "MLP",
}
WIDE = 0.25  # from the least to the largest sample, as a share of the median: told in words
WIDTH = 116  # of a line of text on the first pages
HAND_CAST = "In a hand cast the author wrote bfloat16 into the model."
COMPILED = "torch.compile is PyTorch's compiled autocast of a model of the same size."
JOINED = "2026-11-27T00:01+00:00"  # since then one kernel checks the gradients of four like layers
OLDER = (
    "These times are older than a change that cut the kernels of the finiteness check and the "
    "gradient norm from 424 to 37 (ViT-B/16)."
)
COUNTS = {"ms a step": ("ms", 1.0), "peak memory, GB": ("peak_bytes", 1e9)}

Way = dict[str, Any]  # the row of each way that was measured, by name


@functools.cache
def steps() -> tuple[str, dict[str, Way]]:
    """Returns the newest GPU, and of each network on it the rows by way."""
    known = json.loads(RESULTS.read_text())
    rows = [row for row in known["rows"] if row["part"] in ("card 2", "card 3") and "ms" in row]
    device = known["runs"][max(row["run"] for row in rows) - 1]["device"]
    names = {(card, variant): way for way, (card, variant, _) in WAYS.items()}
    table: dict[str, Way] = {network: {} for network in NETWORKS}
    for row in rows:
        way = names.get((row["part"], row["variant"]))
        if row["target"] == device and way and row["network"] in table:
            table[row["network"]][way] = row
    return device, {name: ways for name, ways in table.items() if "mpjax" in ways}


def text() -> str:
    """Returns the numbers as a table in Markdown."""
    device, networks = steps()
    lines = [f"| on one {device} | " + " | ".join(WAYS) + " |"]
    lines.append("| --- |" + " ---: |" * len(WAYS))
    for network, ways in networks.items():
        for title, (field, unit) in COUNTS.items():
            cells = [f"{ways[w][field] / unit:.1f}" if w in ways else "–" for w in WAYS]
            cells[-1] = f"**{cells[-1]}**"
            lines.append(f"| {NETWORKS[network]}: {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def shares_text() -> str:
    """Returns what the first pages say: mpjax's shares as a table in Markdown, and what to know."""
    lines = ["| mpjax's share | of a hand cast's time | of its memory | of torch.compile's time |"]
    lines.append("| --- | ---: | ---: | ---: |")
    for network, ways in steps()[1].items():
        cells = [
            share(ways, *column) for column in ((HAND, "ms"), (HAND, "peak_bytes"), (TORCH, "ms"))
        ]
        lines.append(f"| {NETWORKS[network]} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", textwrap.fill(sentence(), WIDTH)]) + "\n"


def share(ways: dict[str, Way], way: str, field: str) -> str:
    """Returns mpjax's share of what a way takes of a network, if that was measured."""
    return f"{ways['mpjax'][field] / ways[way][field]:.2f}" if way in ways else "–"


def sentence() -> str:
    """Returns what has to be known beside the shares."""
    _, networks = steps()
    told = [f"Below 1 is better. {HAND_CAST} {COMPILED}"]
    for network, ways in networks.items():
        name, row = NETWORKS[network].split(",")[0], ways.get(TORCH)
        if CUDNN in ways:
            slower = ways["mpjax"]["ms"] > ways[CUDNN]["ms"]
            told.append(
                f"If the hand cast of {name} also calls cuDNN's attention, mpjax takes "
                f"{share(ways, CUDNN, 'ms')} of its time, {'so it is slower, ' * slower}"
                f"and {share(ways, CUDNN, 'peak_bytes')} of its memory."
            )
        if row and row["high"] - row["low"] > row["ms"] * WIDE:
            varied = (row["high"] - row["low"]) / row["ms"]
            told.append(
                f"{name}'s {share(ways, TORCH, 'ms')} is uncertain: PyTorch's own times varied by "
                f"{varied:.0%}.".replace("%", " %")
            )
    runs = json.loads(RESULTS.read_text())["runs"]
    if min(runs[ways["mpjax"]["run"] - 1]["date"] for ways in networks.values()) < JOINED:
        told.append(OLDER)
    return " ".join(told)


def missing() -> str:
    """Returns the networks that no run has reached yet, and those that PyTorch's have not."""
    _, networks = steps()
    without = [NETWORKS[n] for n in NETWORKS if n not in networks]
    beside = [NETWORKS[n] for n, ways in networks.items() if TORCH not in ways]
    return f"Not yet measured: {', '.join(without)}; PyTorch's {', '.join(beside)}."


def draw(path: Path) -> None:
    """Draws a step's time and memory, a group of bars for each network."""
    device, networks = steps()
    figure = Figure(figsize=(10, 1.0 + 1.55 * len(networks)), dpi=150, layout="constrained")
    panels = figure.subplots(1, len(COUNTS), sharey=True)
    for axes, (title, (field, unit)) in zip(panels, COUNTS.items(), strict=True):
        ticks: dict[float, str] = {}
        y = 0.0
        for network, ways in networks.items():
            top = y
            for way in (way for way in WAYS if way in ways):
                value = ways[way][field] / unit
                axes.barh(y, value, color=WAYS[way][2], height=0.9)
                bold = "bold" if way == "mpjax" else "normal"
                style = {"va": "center", "fontsize": 12, "fontweight": bold}
                axes.text(value, y, f" {way} {value:.1f}", **style)
                y += 1
            ticks[(top + y - 1) / 2] = NETWORKS[network]
            y += 0.7
        longest = max(row[field] for ways in networks.values() for row in ways.values()) / unit
        axes.set(xlim=(0, 1.45 * longest), ylim=(y - 0.8, -0.7))
        axes.set_title(title, fontsize=13)
        axes.set_yticks(list(ticks), list(ticks.values()), fontsize=13)
        axes.set_xticks([])
        axes.tick_params(length=0)
        for side in ("top", "right", "bottom"):
            axes.spines[side].set_visible(False)
    figure.suptitle(f"A training step on one {device}", fontsize=13)
    figure.savefig(path, metadata={"Description": text()})
