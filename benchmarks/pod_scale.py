"""One job on up to 4096 chips, on paper: what `train_pod.py --check` says of memory and step time.

python benchmarks/pod_scale.py            # compiles what is missing, writes results/pod_scale.*
python benchmarks/pod_scale.py --again    # compiles all of it: minutes each
python benchmarks/pod_scale.py --plot     # only draws docs/images/pod_scale.png again

The job is tpu_configs/v5p-128.yaml with a batch of 1024 sequences, whatever the number of chips.
"""

import argparse
import json
import pathlib
import subprocess
import sys
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from measure import machine

ROOT = pathlib.Path(__file__).parents[1]
CONFIG = "tpu_configs/v5p-128.yaml"
BATCH = 1024
RESULTS = ROOT / "benchmarks/results/pod_scale.json"
PICTURE = ROOT / "docs/images/pod_scale.png"
# Chips, the slice's name (which counts TensorCores, two a chip), and how they are arranged: weights
# shared by 256 chips at most; 4096 chips for 1024 sequences split the heads too.
SLICES = {
    16: ("v5p-32", {"data": 1, "fsdp": 16, "tensor": 1}),
    64: ("v5p-128", {"data": 1, "fsdp": 64, "tensor": 1}),
    256: ("v5p-512", {"data": 1, "fsdp": 256, "tensor": 1}),
    1024: ("v5p-2048", {"data": 4, "fsdp": 256, "tensor": 1}),
    4096: ("v5p-8192", {"data": 4, "fsdp": 256, "tensor": 4}),
}
TIMES = {"compute": "#0072b2", "hbm": "#e69f00", "network": "#d55e00"}
LABELS = {"compute": "products", "hbm": "memory traffic", "network": "links"}
HEAD = """\
# One job on more and more chips, on paper

`python benchmarks/pod_scale.py`: {config} (6.4 billion parameters in bf16-mixed) with a batch of
{batch} sequences of 2048 bytes, on slices of v5p, by `examples/train_pod.py --check`. Nothing ran:
memory is the compiler's, times are counts of the compiled program over the table of peak rates.

| chips | data x fsdp x tensor | sequences a chip | peak GB of {limit:.1f} \
| compute · HBM · links, ms | bound by | findings |
| ---: | --- | ---: | ---: | --- | --- | --- |
"""


def checked(chips: int) -> dict[str, Any]:
    """Returns a row: what the check says of the job on so many chips."""
    name, mesh = SLICES[chips]
    sets = [f"accelerator={name}", f"global_batch_size={BATCH}"]
    sets += [f"mesh.{axis}={size}" for axis, size in mesh.items()]
    script = [sys.executable, str(ROOT / "examples/train_pod.py"), str(ROOT / CONFIG)]
    script += ["--check", "--json", *(part for text in sets for part in ("--set", text))]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, check=False)
    if not done.stdout.startswith("{"):
        raise SystemExit(f"{name}: {done.stderr}")
    return row(chips, json.loads(done.stdout))


def row(chips: int, report: dict[str, Any]) -> dict[str, Any]:
    name, mesh = SLICES[chips]
    memory = report["memory"] or {"peak": None, "limit": None}
    return {
        "chips": chips,
        "topology": name,
        "mesh": mesh,
        "peak": memory["peak"],
        "limit": memory["limit"],
        "times": {name: report["times"][name] for name in TIMES},
        "findings": [finding["what"] for finding in report["findings"]],
        "compile_seconds": round(report["compile_seconds"]),
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines: list[str] = []
    for row in rows:
        times = row["times"]
        bound = max(times, key=lambda name: times[name])
        mesh = " x ".join(str(size) for size in row["mesh"].values())
        milliseconds = " · ".join(f"{times[name] * 1e3:.0f}" for name in TIMES)
        each = f"{BATCH / row['chips'] if row['chips'] > BATCH else BATCH // row['chips']}"
        peak = f"{row['peak'] / 1e9:.1f}" if row["peak"] else "refused"
        found = "; ".join(row["findings"]) or "none"
        cells = (row["chips"], mesh, each, peak, milliseconds, LABELS[bound], found)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


# -- the picture -----------------------------------------------------------------------------------


def draw(rows: list[dict[str, Any]], path: pathlib.Path) -> None:
    rows = [row for row in rows if row["peak"]]
    chips = [row["chips"] for row in rows]
    figure = Figure(figsize=(11, 4.2), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, color in TIMES.items():
        values = [row["times"][name] * 1e3 for row in rows]
        left.plot(chips, values, "o-", color=color, label=LABELS[name])
    left.set(title="a step takes at least", ylabel="milliseconds", yscale="log")
    left.legend(frameon=False)
    right.plot(chips, [row["peak"] / 1e9 for row in rows], "o-", color="#444444")
    right.axhline(rows[0]["limit"] / 1e9, color="#444444", linestyle="--", linewidth=1)
    right.annotate("what a chip has", (chips[-1], rows[0]["limit"] / 1e9), (0, -14),
                   textcoords="offset points", ha="right")  # fmt: skip
    right.set(title="memory at the worst moment", ylabel="GB a chip", ylim=(0, None))
    for axes in (left, right):
        label(axes, chips)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def label(axes: Axes, chips: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(chips, [str(n) for n in chips])
    axes.set_xlabel("v5p chips")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#dddddd")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--again", action="store_true", help="compile what was compiled before too")
    parser.add_argument("--plot", action="store_true", help="compile nothing")
    arguments = parser.parse_args()
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() and not arguments.again else []
    rows = {row["chips"]: row for row in kept}
    for chips in () if arguments.plot else sorted(set(SLICES) - set(rows)):
        rows[chips] = checked(chips)
        print(rows[chips], flush=True)
        RESULTS.write_text(json.dumps([rows[n] for n in sorted(rows)], indent=1) + "\n")
    ordered = [rows[chips] for chips in sorted(rows)]
    draw(ordered, PICTURE)
    if not arguments.plot:
        limit = next(row["limit"] for row in ordered if row["limit"]) / 1e9
        head = HEAD.format(config=CONFIG, batch=BATCH, limit=limit)
        foot = f"\n{machine.made()}.\n"
        RESULTS.with_suffix(".md").write_text(head + table(ordered) + foot)


if __name__ == "__main__":
    main()
