"""The 872-million-parameter decoder, checked for a TPU slice or GPUs that need not be here.

python benchmarks/pods.py v5e:4x4 --rows 4       # one report
python benchmarks/pods.py v5e:16x16 --rows 1 --json
python benchmarks/pods.py                        # compiles what is missing of results/pods.json,
                                                 # and writes the table, results/pods.md
python benchmarks/pods.py --again                # compiles all of them
"""

import argparse
import json
import pathlib
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P
from measure import machine
from networks.decoder import Decoder

import mpjax.pods

RESULTS = pathlib.Path(__file__).parent / "results" / "pods.json"
# Topology, sequences of 2048 tokens a device, policy.
CASES = (
    ("v5e:4x4", 4, "32-true"),
    ("v5e:4x4", 4, "bf16-mixed"),
    ("v5e:16x16", 1, "bf16-mixed"),
    ("8xh100", 4, "32-true"),
    ("8xh100", 4, "bf16-mixed"),
)
HEAD = """\
# The decoder on pods, ahead of time

`python benchmarks/pods.py`: 872 million parameters (width 2048, 16 layers, hidden 8192, vocabulary
32000, sequences of 2048), AdamW, FSDP under `shard_map`, scanned and rematerialised layers, as in
`benchmarks/networks/decoder.py`. Compiled for hardware that was not there; nothing ran. Memory and
times are the compiler's and the table's of peak rates, not a clock's. All numbers are those of one
device and step.

* gathered, reduced: GB of weights that go out and of gradients that come back, in each dtype.
* accessed: XLA's own count, which takes the body of a loop once; it has none for GPUs.
* traffic: ours, with loops multiplied.
* at least: what the step takes if only products, memory or links counted.

| topology | sequences a device | policy | findings | gathered | reduced \
| peak GB | GB accessed | GB traffic | at least: compute · HBM · links, ms |
| --- | ---: | --- | --- | --- | --- | ---: | ---: | ---: | --- |
"""
FOOT = """
Softmax is normalised behind the product with the values. Written with `jax.nn.softmax` the same
model in bf16-mixed on v5e:4x4 had a peak of 4.08 GB, 35.6 GB accessed and 333 GB of traffic
(2026-11-21): the compiler keeps the quotients in float32.

{made}.
"""


def check(name: str, rows: int, layers: int, policy: str) -> mpjax.pods.Report:
    topology = mpjax.pods.get_topology(name)
    mesh = topology.make_mesh({"fsdp": -1})
    decoder = Decoder(layers=layers, policy=policy)
    tx = optax.adamw(1e-3)
    tokens = jax.ShapeDtypeStruct((rows * topology.num_devices, decoder.time + 1), jnp.int32)
    args = mpjax.pods.with_sharding(
        (decoder.state_shapes(tx), tokens), (decoder.state_specs(tx), P("fsdp")), mesh
    )
    return mpjax.pods.check(decoder.train_step(tx, mesh), args, topology)


# -- the table -------------------------------------------------------------------------------------


def checked(case: tuple[str, int, str]) -> dict[str, Any]:
    """Returns the report of one case as a row, from a process of its own: compilers take memory."""
    name, rows, policy = case
    script = [sys.executable, __file__, name, "--rows", str(rows), "--policy", policy, "--json"]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    if not done.stdout.startswith("{"):
        raise SystemExit(f"{name}: {done.stderr}")
    return row(case, json.loads(done.stdout))


def row(case: tuple[str, int, str], report: dict[str, Any]) -> dict[str, Any]:
    sent: dict[str, dict[str, int]] = {"weights": {}, "gradients": {}}
    for collective in report["collectives"]:
        if collective["role"] in sent:
            total, dtype = sent[collective["role"]], collective["dtype"]
            total[dtype] = total.get(dtype, 0) + collective["bytes"] * collective["count"]
    return {
        "case": list(case),
        "findings": [finding["what"] for finding in report["findings"]],
        "sent": sent,
        "peak": report["memory"]["peak"],
        "accessed": report["cost_analysis_bytes"],
        "traffic": report["hbm_bytes"],
        "flops": report["flops"],
        "times": {key: report["times"][key] for key in ("compute", "hbm", "network")},
        "compile_seconds": round(report["compile_seconds"]),
    }


def line(row: dict[str, Any]) -> str:
    sent = {
        role: ", ".join(f"{dtype} {count / 1e9:.2f}" for dtype, count in by_dtype.items())
        for role, by_dtype in row["sent"].items()
    }
    accessed = f"{row['accessed'] / 1e9:.1f}" if row["accessed"] else "not available"
    times = " · ".join(f"{seconds * 1e3:.0f}" for seconds in row["times"].values())
    found = "; ".join(row["findings"]) or "none"
    memory = (f"{row['peak'] / 1e9:.2f}", accessed, f"{row['traffic'] / 1e9:.0f}")
    cells = (*row["case"], found, sent["weights"], sent["gradients"], *memory, times)
    return f"| {' | '.join(map(str, cells))} |\n"


def write(again: bool) -> None:
    """Compiles the cases that have no row yet, or all, and writes the table."""
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() and not again else []
    known = {tuple(row["case"]): row for row in rows}
    for case in CASES:
        if case not in known:
            known[case] = checked(case)
            RESULTS.write_text(json.dumps(list(known.values()), indent=1) + "\n")
    table = "".join(line(known[case]) for case in CASES)
    RESULTS.with_suffix(".md").write_text(HEAD + table + FOOT.format(made=machine.made()))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("topology", nargs="?", help="v5e:4x4, v5e-256, 8xh100, cpu:8 ...")
    parser.add_argument("--rows", type=int, default=4, help="sequences of 2048 tokens a device")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--policy", default="bf16-mixed")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--again", action="store_true", help="compile what was compiled before too")
    args = parser.parse_args()
    if args.topology is None:
        write(args.again)
        return 0
    jax.config.update("jax_platforms", "cpu")
    report = check(args.topology, args.rows, args.layers, args.policy)
    print(report.to_json() if args.json else report)
    return report.exit_code


if __name__ == "__main__":
    sys.exit(main())
