"""Draws the pictures of these pages: `python docs/figures.py` writes them into docs/images/.

`attention.png` shows what attention keeps for its backward pass (attention_figure.py).
`gpu.png`, `gpu.txt` and `gpu_shares.txt` show a GPU's time (clocked_figure.py).
`formats.png` shows the bits of the three formats, `eight_bits.png` what 8 bits can hold.
`block.png` shows what autocast does with each operation of a transformer block in Flax, from what
`mpjax.explain(...).to_dict()` tells; `explained.txt` is what `print` shows of it. `beside.png`
shows the shares that the tables in benchmarks/results/ give, and `saves.png`, with its numbers in
`saves.txt`, what they come to; `optimizers.png` shows how training goes with weights and moments in
fewer bits. `pod_report.png` is `pod_report.txt` with notes; the text is what
`python examples/train_pod.py tpu_configs/v5e-256.yaml --check` prints with libtpu. With `--page`
the blocks of numerics.md are run, and page_figures.py draws what they find.
"""

import argparse
import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any

import attention_figure
import clocked_figure
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import page_figures
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

import mpjax

PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")
KINDS = {  # label and colour, in the order of the legend
    "product": ("product: bfloat16 operands, float32 sums", "#0072b2"),
    "stored": ("rounded once, stored in bfloat16", "#9bd0f0"),
    "fused": ("float32, fused between bfloat16 values", "#dddddd"),
    "full": ("float32, asked for", "#e69f00"),
}


class Block(nn.Module):
    """A block as a user has it: no dtype anywhere."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nn.make_causal_mask(x[:, :, 0])
        y = nn.LayerNorm(name="norm1")(x)
        x = x + nn.MultiHeadDotProductAttention(4, name="attention")(y, mask=mask)
        y = nn.LayerNorm(name="norm2")(x)
        y = nn.gelu(nn.Dense(256, name="up")(y))
        return x + nn.Dense(64, name="down")(y)


class Model(nn.Module):
    """Three blocks behind a layer: what the middle one reads and writes is typical."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(64, name="embed")(x)
        for i in range(3):
            x = Block(name=f"block_{i}")(x)
        return x


def explained() -> Any:
    """Returns what autocast does with the model."""
    x = jax.ShapeDtypeStruct((8, 128, 64), jnp.float32)
    variables = jax.eval_shape(Model().init, jax.random.key(0), x)
    return mpjax.explain(Model().apply, "bf16-mixed")(variables, x)


def kind(row: dict[str, Any]) -> str:
    if row["operation"] in PRODUCTS:
        return "product"
    if row["dtype"] == "bf16":
        return "stored"
    return "fused" if row["reason"].startswith("fused") else "full"


def box(axes: Axes, x: float, y: float, width: float, color: str, text: str) -> None:
    style = "round,pad=0,rounding_size=0.08"
    patch = FancyBboxPatch((x, y - 0.36), width, 0.72, boxstyle=style, facecolor=color, linewidth=0)
    axes.add_patch(patch)
    light = color in (KINDS["product"][1], "#444444", "#d55e00")
    style = {"ha": "center", "va": "center", "fontsize": 8, "color": "white" if light else "black"}
    axes.text(x + width / 2, y, text, **style)


def draw_block(rows: list[dict[str, Any]], path: Path) -> None:
    """Draws the modules of the middle block from top to bottom, their operations to the right."""
    inside = "Model/block_1"
    mine = [row for row in rows if row["module"].startswith(inside)]
    modules = list(dict.fromkeys(row["module"] for row in mine))
    figure = Figure(figsize=(12, 0.42 * len(modules) + 1.1), dpi=120, layout="constrained")
    axes = figure.subplots()
    end = 0.0
    for y, module in enumerate(modules):
        name = module.removeprefix(inside).strip("/") or "the block itself"
        axes.text(-0.15, y, name, ha="right", va="center", fontsize=9, family="monospace")
        x = 0.0
        for row in (row for row in mine if row["module"] == module):
            text = row["operation"] + (f" ×{row['count']}" if row["count"] > 1 else "")
            width = 0.11 * len(text) + 0.25
            box(axes, x, y, width, KINDS[kind(row)][1], text)
            x += width + 0.08
        end = max(end, x)
    axes.set(xlim=(-4.2, end), ylim=(len(modules) - 0.4, -1.5))
    step = (end + 4.2) / len(KINDS)
    for i, (label, color) in enumerate(KINDS.values()):
        box(axes, -4.2 + i * step, -1.0, 0.4, color, "")
        axes.text(-3.7 + i * step, -1.0, label, va="center", fontsize=8.5)
    axes.set_axis_off()
    figure.savefig(path)


FORMATS = {  # sign, exponent and mantissa bits; what that means
    "float32": (1, 8, 23, "10⁻³⁸ to 10³⁸, 7 digits"),
    "bfloat16": (1, 8, 7, "10⁻³⁸ to 10³⁸, 2 to 3 digits"),
    "float16": (1, 5, 10, "6·10⁻⁵ to 65504 (down to 6·10⁻⁸ with fewer bits), 3 to 4 digits"),
}


def draw_formats(path: Path) -> None:
    figure = Figure(figsize=(11, 1.9), dpi=120, layout="constrained")
    axes = figure.subplots()
    for y, (name, (*bits, meaning)) in enumerate(FORMATS.items()):
        axes.text(-0.4, y, name, ha="right", va="center", fontsize=10, family="monospace")
        x = 0
        parts = zip(
            bits, ("", "exponent", "mantissa"), ("#444444", "#d55e00", "#9bd0f0"), strict=True
        )
        for count, part, color in parts:
            box(axes, x + 0.05, y, count - 0.1, color, f"{part} {count}" if part else "±")
            x += count
        axes.text(x + 0.4, y, meaning, va="center", fontsize=9)
    axes.set(xlim=(-4.5, 46), ylim=(2.6, -0.6))
    axes.set_axis_off()
    figure.savefig(path)


EIGHT_BITS = {  # dtype: its largest value, and what to say of it
    "int8": (127.0, "254 steps of one size: what is small is lost"),
    "float8_e4m3fn": (448.0, "3 bits of mantissa: off by up to 6 %, over 18 powers of two"),
    "float8_e5m2": (57344.0, "2 bits of mantissa: off by up to 12 %, over 32 powers of two"),
}


def draw_eight_bits(path: Path) -> None:
    """Draws every value of each 8-bit dtype, scaled so that its largest is 1, as powers of two."""
    figure = Figure(figsize=(11, 2.6), dpi=120, layout="constrained")
    axes = figure.subplots()
    for y, (name, (largest, text)) in enumerate(EIGHT_BITS.items()):
        values = np.arange(256, dtype=np.uint8).view(jnp.dtype(name)).astype(np.float64)
        held = np.unique(values[(values > 0) & (values <= largest)]) / largest
        axes.vlines(np.log2(held), y - 0.28, y + 0.28, color="#0072b2", linewidth=0.8)
        axes.text(-32.5, y, name, ha="right", va="center", family="monospace", fontsize=9)
        axes.text(0.4, y, text, va="center", fontsize=8.5)
    axes.set(xlim=(-38, 17), ylim=(2.6, -0.6), yticks=[])
    axes.set_xticks(range(-32, 1, 4), [f"2$^{{{x}}}$" for x in range(-32, 1, 4)], fontsize=8.5)
    axes.set_xlabel("what each can hold, beside the largest value under one scale", fontsize=9)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    figure.savefig(path)


RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
TARGETS = {"h100": "H100", "a100": "A100", "v5e": "TPU v5e"}
VARIANTS = {"f32": "#999999", "autocast": "#0072b2"}
COUNTS = {  # marker and label
    "bytes_accessed": ("o", "bytes accessed"),
    "hbm_traffic": ("D", "bytes to and from HBM (TPU, no loops)"),
    "temporaries": ("^", "temporaries"),
}


def bf16_rows(table: str) -> list[dict[str, Any]]:
    rows = json.loads((RESULTS / f"{table}.json").read_text())["rows"]
    return [row for row in rows if row["dtype"] == "bf16"]


def table_rows(table: str) -> list[dict[str, Any]]:
    """Returns the rows of a table in bfloat16 but for size "medium", which has no float32."""
    return [row for row in bf16_rows(table) if row["size"] != "medium"]


def largest_rows(table: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Returns rows in bfloat16 by network and variant, of the largest size of each network."""
    rows = bf16_rows(table)
    full = {row["network"] for row in rows if row["size"] == "full"}
    return {
        (row["network"], row["variant"]): row
        for row in rows
        if (row["size"] == "full") == (row["network"] in full)
    }


def save(figure: Figure, path: Path, told: str) -> None:
    """Writes a picture with the numbers that it draws, by which a test holds it to the tables."""
    figure.savefig(path, metadata={"Description": told})


def beside_text() -> str:
    """Returns the shares that `beside.png` draws, a line a network and target."""
    lines = []
    for target in TARGETS:
        found = largest_rows(target)
        for network in sorted({name for name, _ in found}):
            cells = []
            for variant, name in itertools.product(VARIANTS, COUNTS):
                pair = [found.get((network, v), {}).get(name) for v in (variant, "hand-cast")]
                cells.append(f"{pair[0] / pair[1]:.2f}" if all(pair) else "")
            lines.append(f"{target} {network}: {' '.join(cells)}")
    return "\n".join(lines)


def draw_beside(path: Path) -> None:
    """Draws what networks cost in float32 and under autocast, as shares of hand-cast's."""
    figure = Figure(figsize=(11, 5.5), dpi=120, layout="constrained")
    panels = figure.subplots(1, len(TARGETS), sharey=True)
    tables = {target: largest_rows(target) for target in TARGETS}
    networks = sorted({network for found in tables.values() for network, _ in found}, reverse=True)
    for axes, (target, title) in zip(panels, TARGETS.items(), strict=True):
        found = tables[target]
        axes.axvline(1, color="black", linewidth=0.8)
        for (variant, color), name in itertools.product(VARIANTS.items(), COUNTS):
            marker, label = COUNTS[name]
            pairs = [
                [found.get((n, v), {}).get(name) for v in (variant, "hand-cast")] for n in networks
            ]
            shares = [mine / hand if mine and hand else math.nan for mine, hand in pairs]
            style = {"color": color, "alpha": 0.8, "label": f"{variant}: {label}"}
            axes.plot(shares, networks, marker, **style)
        axes.set(title=title, xlabel="hand-cast = 1", xlim=(0.4, 2.5))
        axes.grid(axis="y", alpha=0.3)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    save(figure, path, beside_text())


WAYS = {  # variant of the tables: what readers call it, and its colour
    "f32": ("float32", "#b8b8b8"),
    "hand-cast": ("cast by hand", "#d9d9d9"),
    "torch autocast bf16": ("torch.autocast", "#f3c677"),
    "autocast": ("mpjax", "#56b4e9"),
}


THREE = ("f32", "hand-cast", "autocast")
BASES = {"torch autocast bf16": "torch f32"}  # a peer's own float32; ours for the others


@dataclasses.dataclass(frozen=True)
class Saving:
    """One comparison: what is counted, of which networks, and each variant's share of float32's."""

    title: str
    networks: list[str]
    shares: dict[str, float]
    without: list[str]  # measured, but not in float32

    @property
    def counted(self) -> str:
        """How many networks the mean is of."""
        of = f" of {len(self.networks) + len(self.without)}" if self.without else ""
        return f"{len(self.networks)}{of} networks"


def saving(title: str, table: str, count: str, variants: tuple[str, ...] = THREE) -> Saving:
    """Returns the geometric means, over all networks that a table has in these variants."""
    rows = {(r["network"], r["variant"]): r[count] for r in bf16_rows(table) if r.get(count)}
    found = {(r["network"], r["variant"]): r[count] for r in table_rows(table) if r.get(count)}
    names = sorted({n for n, _ in found if all((n, variant) in found for variant in variants)})
    shares = {
        v: math.exp(
            sum(math.log(found[n, v] / found[n, BASES.get(v, "f32")]) for n in names) / len(names)
        )
        for v in variants
    }
    left = {n for n, _ in rows} - set(names) if variants == THREE else set()
    return Saving(title, names, shares, sorted(left))


def savings() -> list[Saving]:
    return [
        saving("kept for the backward pass", "residuals", "activations"),
        saving("bytes moved on an H100", "h100", "bytes_accessed"),
        saving("time of a step on a CPU", "cpu", "seconds"),
        saving("the same, beside PyTorch", "cpu", "seconds", tuple(WAYS)),
    ]


def draw_saves(found: list[Saving], path: Path) -> None:
    """Draws what a network costs in each way, float32 being 100 %, large enough for a phone."""
    figure = Figure(figsize=(11.5, 2.9), dpi=160, layout="constrained")
    for axes, each in zip(figure.subplots(1, len(found)), found, strict=True):
        for y, (variant, share) in enumerate(each.shares.items()):
            name, color = WAYS[variant]
            axes.barh(y, share, color=color, height=0.82)
            bold = "bold" if variant == "autocast" else "normal"
            style = {"va": "center", "fontsize": 13, "fontweight": bold}
            axes.text(0.03, y, f"{name}  {share:.0%}", **style)
        axes.set_title(f"{each.title}\n({each.counted})", fontsize=13)
        axes.set(xlim=(0, 1.2 * max(each.shares.values())), ylim=(3.5, -0.5))
        axes.set_axis_off()
    save(figure, path, saves_text(found))


def saves_text(found: list[Saving]) -> str:
    """Returns the same as a table in Markdown, narrow enough for a phone, and the networks."""
    ways = [v for v in reversed(WAYS) if v != "f32"]
    lines = ["| share of float32's | " + " | ".join(WAYS[v][0] for v in ways) + " |"]
    lines.append("| --- |" + " ---: |" * len(ways))
    for each in found:
        cells = [f"{each.shares[v]:.0%}" if v in each.shares else "–" for v in ways]
        cells[0] = f"**{cells[0]}**"
        lines.append(f"| {each.title} ({each.counted}) | " + " | ".join(cells) + " |")
    means = "Geometric means in bfloat16 over the networks that were measured in all these ways. "
    for each in found:
        if each.without:
            means += f"{each.counted}: the other {len(each.without)} have no count in float32. "
    means += "torch.autocast is a share of PyTorch's own float32, the others of JAX's."
    lines += ["", means, "", "The networks:", ""]
    for each in found:
        line = f"- {each.title}: {', '.join(each.networks)}"
        left = ", ".join(each.without)
        lines.append(
            f"{line}; not measured in float32, and left out: {left}." if left else f"{line}."
        )
    return "\n".join(lines) + "\n"


FORMS = {  # of benchmarks/results/low_precision_optimizers.json: colour
    "float32": "#999999",
    "bf16-mixed": "#56b4e9",
    "nearest": "#d55e00",
    "stochastic": "#0072b2",
    "kahan": "#009e73",
    "24 bits + int8 moments": "#e69f00",
    "stochastic + int8 moments": "#000000",
}
LIMITS = (0.97, 1.05)
HEIGHTS = {"mlp": (0.0, 22.0), "digits": (0.9, 2.4), "lm": LIMITS, "small lm": LIMITS}


def optimizer_tasks() -> dict[str, Any]:
    known = json.loads((RESULTS / "low_precision_optimizers.json").read_text())["tasks"]
    return {name: known[name] for name in HEIGHTS}


def optimizers_text() -> str:
    """Returns where each curve of `optimizers.png` ends, of float32's."""
    lines = []
    for name, entry in optimizer_tasks().items():
        ends = {f: mean_curve(entry["runs"][f])[-1] for f in FORMS if f in entry["runs"]}
        lines += [f"{name} {form}: {end / ends['float32']:.4f}" for form, end in ends.items()]
    return "\n".join(lines)


def draw_optimizers(path: Path) -> None:
    """Draws how far each form's training loss is from float32's, the mean over the seeds."""
    tasks = optimizer_tasks()
    figure = Figure(figsize=(11, 3.8), dpi=120, layout="constrained")
    for axes, (name, entry) in zip(figure.subplots(1, len(tasks)), tasks.items(), strict=True):
        base = mean_curve(entry["runs"]["float32"])
        for form in (form for form in FORMS if form in entry["runs"]):
            curve = mean_curve(entry["runs"][form])
            x = [entry["chunk"] * (i + 1) for i in range(len(curve))]
            style = {"color": FORMS[form], "label": form, "linewidth": 1.4}
            axes.plot(x, [a / b for a, b in zip(curve, base, strict=True)], **style)
        axes.set(title=name, xlabel="step", ylim=HEIGHTS[name])
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.supylabel("training loss, of float32's", fontsize=10)
    lines = {line.get_label(): line for axes in figure.axes for line in axes.lines}
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=4, fontsize=8)
    save(figure, path, optimizers_text())


def mean_curve(runs: list[dict[str, Any]]) -> list[float]:
    looks = zip(*(run["curve"] for run in runs), strict=True)
    return [sum(look) / len(look) for look in looks]


MARKS = {"ok": "#009e73", "!!": "#d55e00", "??": "#e69f00", "--": "#999999"}
NOTES = {  # the first words of a line of the report: what to look for there
    "memory": "fits, with room for a larger batch",
    "products": "of one step and chip, loops multiplied",
    "at least": "the longest is what to work on",
    "program": "the same on all hosts, or they hang",
    "ok weights": "bf16: half of what float32 sends",
    "ok gradients": "256 addends: bf16 would round each sum",
    "ok the state": "else old and new state are there at once",
    "gradients": "each layer's once a step",
    "weights": "each layer's twice: forward and backward",
    "scalars": "the loss, the norm, are all finite",
}


def draw_report(lines: list[str], path: Path) -> None:
    """Draws a report of `mpjax.pods.check` as it stands in a terminal, with notes behind lines."""
    figure = Figure(figsize=(9.6, 0.205 * len(lines) + 0.2), dpi=120, layout="constrained")
    axes = figure.subplots()
    notes = dict(NOTES)
    for y, line in enumerate(lines):
        mark = line[2:4]
        style = {"family": "monospace", "fontsize": 8.5, "va": "center"}
        weight = "bold" if y == 0 else "normal"
        axes.text(0, y, line, color=MARKS.get(mark, "black"), fontweight=weight, **style)
        words = next((key for key in notes if line.strip().startswith(key)), None)
        if words is not None:
            note = f"← {notes.pop(words)}"
            axes.text(105, y, note, fontsize=8.5, va="center", color="#0072b2")
    axes.set(xlim=(0, 147), ylim=(len(lines) - 0.4, -0.6))
    axes.set_axis_off()
    figure.savefig(path)


def main() -> None:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "images")
    parser.add_argument("--page", action="store_true", help="those that numerics.md's blocks draw")
    arguments = parser.parse_args()
    folder = arguments.out
    folder.mkdir(parents=True, exist_ok=True)
    if arguments.page:
        print(f"{', '.join(page_figures.drawn(folder))} are in {folder}.")
        return
    attention_figure.draw(folder / "attention.png")
    clocked_figure.draw(folder / "gpu.png")
    (folder / "gpu.txt").write_text(clocked_figure.text())
    (folder / "gpu_shares.txt").write_text(clocked_figure.shares_text())
    draw_formats(folder / "formats.png")
    draw_eight_bits(folder / "eight_bits.png")
    table = explained()
    draw_block(table.to_dict()["rows"], folder / "block.png")
    (folder / "explained.txt").write_text(f"{table}\n")
    draw_beside(folder / "beside.png")
    draw_saves(savings(), folder / "saves.png")
    draw_optimizers(folder / "optimizers.png")
    (folder / "saves.txt").write_text(saves_text(savings()))
    report = (Path(__file__).parent / "images" / "pod_report.txt").read_text()
    draw_report(report.splitlines(), folder / "pod_report.png")
    drawn = "attention.png, beside.png, block.png, eight_bits.png, explained.txt, formats.png, "
    drawn += "gpu.png, gpu.txt, gpu_shares.txt, optimizers.png, pod_report.png, saves.png and .txt"
    print(f"{drawn} are in {folder}.")


if __name__ == "__main__":
    main()
