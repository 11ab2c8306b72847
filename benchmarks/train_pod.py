"""What examples/train_pod.py learns on eight virtual devices, in three precisions and three seeds.

python benchmarks/train_pod.py

Every run is the example itself, with `--simulate 8` and tpu_configs/cpu-smoke.yaml. Finished runs
are kept under --runs, so that an interrupted benchmark goes on; the table is written at the end.
"""

import argparse
import itertools
import json
import math
import pathlib
import shutil
import statistics
import subprocess
import sys
from typing import Any

import numpy as np
from measure import machine

ROOT = pathlib.Path(__file__).parents[1]
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")
EVERY = 20  # steps between two reports
SMOOTHED = 5  # reports
HEAD = """\
# What the pod trainer learns

`python benchmarks/train_pod.py`, which runs `python examples/train_pod.py --simulate 8` with
tpu_configs/cpu-smoke.yaml once for each row and seed: {steps} steps on the standard library's
sources, every twentieth file held out.

* held out: bits a byte on files that were not learnt from, computed in float32 whatever was trained
  in; mean ± standard deviation over seeds.
* trigram: those of a byte-trigram model (Witten and Bell's), counted on the files that were learnt
  from and asked for the same bytes.
* off: how far the mean lies from float32's, in standard deviations (sd) of float32's own seeds.
* curve: how far the training curve (bits a byte, mean of {smoothed} reports) is at most from
  float32's of the same seed. Two seeds of float32 are up to {seeds:.3f} apart.
* skipped: steps that dynamic loss scaling skipped, over all seeds.

| precision | seeds | held out | trigram | below it | off | curve | skipped |
| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |
"""


def command(precision: str, seed: int, steps: int, folder: pathlib.Path) -> list[str]:
    """Returns the command of one run."""
    sets = {"precision": precision, "seed": seed, "steps": steps, "log_every": EVERY}
    sets |= {"checkpoint.every": steps, "checkpoint.folder": folder / "checkpoints"}
    script = [sys.executable, str(ROOT / "examples" / "train_pod.py"), "--simulate", "8"]
    script += ["--out", str(folder)]
    return script + [part for key, value in sets.items() for part in ("--set", f"{key}={value}")]


def measured(precision: str, seed: int, steps: int, runs: pathlib.Path) -> list[dict[str, Any]]:
    """Returns what a run reported, after running it if it is not there."""
    folder = runs / f"{precision}-{seed}-{steps}"
    file = folder / "metrics.jsonl"
    if not (file.is_file() and "held_out" in file.read_text()):
        print(f"{precision}, seed {seed}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)  # what an interrupted run has left
        subprocess.run(command(precision, seed, steps, folder), check=True)
    return [json.loads(line) for line in file.read_text().splitlines()]


def curve(rows: list[dict[str, Any]]) -> np.ndarray:
    """Returns the training loss in bits a byte, each the mean of a few reports."""
    losses = [row["loss"] / math.log(2) for row in rows if "loss" in row]
    return np.convolve(losses, np.full(SMOOTHED, 1 / SMOOTHED), mode="valid")


def line(precision: str, found: list[Any], base: list[Any]) -> str:
    """Returns a row of the table: one precision, beside float32."""
    bits = [rows[-1]["held_out"]["bits_per_byte"] for rows in found]
    wide = [rows[-1]["held_out"]["bits_per_byte"] for rows in base]
    trigram = found[0][-1]["held_out"]["trigram_bits_per_byte"]
    skipped = sum(int(rows[-2]["skipped_steps"]) for rows in found)
    cells = [
        precision,
        str(len(found)),
        f"{statistics.mean(bits):.3f} ± {statistics.stdev(bits):.3f}",
    ]
    cells += [f"{trigram:.3f}", f"{1 - statistics.mean(bits) / trigram:.0%}"]
    if precision == PRECISIONS[0]:
        cells += ["", ""]
    else:
        off = (statistics.mean(bits) - statistics.mean(wide)) / statistics.stdev(wide)
        apart = max(
            float(np.abs(curve(a) - curve(b)).max()) for a, b in zip(found, base, strict=True)
        )
        cells += [f"{off:+.2f} sd", f"{apart:.3f}"]
    return "| " + " | ".join([*cells, str(skipped)]) + " |"


def document(results: dict[str, list[Any]]) -> str:
    """Returns the page."""
    base = results[PRECISIONS[0]]
    seeds = max(
        float(np.abs(curve(a) - curve(b)).max()) for a, b in itertools.combinations(base, 2)
    )
    head = HEAD.format(
        steps=base[0][-1]["step"],
        smoothed=SMOOTHED,
        seeds=seeds,
    )
    foot = f"\n{machine.made()}; on {machine.cpu()}.\n"
    rows = [line(name, found, base) for name, found in results.items()]
    return head + "\n".join(rows) + "\n" + foot


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--seeds", type=int, default=3, help="runs of each precision, from 2 (default: 3)")
    add("--steps", type=int, default=800, help="of each run, from 100 (default: 800)")
    add("--runs", type=pathlib.Path, default=pathlib.Path("outputs/train_pod_runs"))
    add("--out", type=pathlib.Path, default=ROOT / "benchmarks" / "results" / "train_pod.md")
    arguments = parser.parse_args()
    if arguments.seeds < 2:
        parser.error(f"--seeds: got {arguments.seeds}; a spread takes at least 2.")
    if arguments.steps < SMOOTHED * EVERY:
        parser.error(f"--steps: got {arguments.steps}; a curve takes at least {SMOOTHED * EVERY}.")
    runs, steps = arguments.runs.resolve(), arguments.steps
    results = {p: [measured(p, s, steps, runs) for s in range(arguments.seeds)] for p in PRECISIONS}
    arguments.out.write_text(document(results))
    print(arguments.out.read_text())


if __name__ == "__main__":
    main()
