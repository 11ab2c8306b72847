"""Says whether a change of the code changes any program: `python benchmarks/golden.py --out FILE`.

    python benchmarks/golden.py --out before.json                  # on the commit before
    python benchmarks/golden.py --out after.json --against before.json

Each line is a SHA-256 of a text: the StableHLO of each network's value and gradients, lowered for a
CPU, a CUDA GPU and a TPU under four policies, the rows of `explain` and of `diagnose`, and the
report of `pods.check`. Nothing is compiled for a device that is not here. A move of code between
files must leave every line as it was. Line numbers of mpjax's own files are in none of them.

Names of inner functions are part of a program's text, and of a kernel's name in a profile.
"""

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import optax
from rich.progress import track

import mpjax
from benchmarks.networks import NETWORKS

PLATFORMS = ("cpu", "cuda", "tpu")
POLICIES = (
    "bf16-mixed",
    "16-mixed",
    "int8_from_mixed_bfloat16",
    "float8_from_mixed_bfloat16",
)
_ROOT = str(Path(__file__).parents[1])
_OWN_LINE = re.compile(r"\S*mpjax/\S+\.py:\d+\S*|compiled in \d+ s")


def digest(text: str) -> str:
    """Returns the SHA-256 of a text without places, of our own code and the checkout, and times."""
    text = _OWN_LINE.sub("mpjax", text).replace(_ROOT, "")
    return hashlib.sha256(text.encode()).hexdigest()


def lowered(name: str, size: str) -> Iterator[tuple[str, str]]:
    """Yields each program of a network, by platform and policy."""
    network = NETWORKS[name](size)
    args = network.params, network.batch
    for policy in POLICIES:
        fun = jax.value_and_grad(mpjax.autocast(network.loss, policy))
        traced = jax.jit(fun).trace(*args)
        for platform in PLATFORMS:
            text = traced.lower(lowering_platforms=(platform,)).as_text()
            yield f"{name}/{policy}/{platform}", digest(text)
        table = mpjax.explain(network.loss, policy)(*args)
        yield f"{name}/{policy}/explain", digest(json.dumps(table.to_dict(), sort_keys=True))


def diagnosed(name: str) -> Iterator[tuple[str, str]]:
    """Yields the rows of a tiny network's diagnosis, without the numbers that rounding may move."""
    network = NETWORKS[name]("tiny")
    report = mpjax.numerics.diagnose(network.loss, "16-mixed")(*network.values())
    rows = [(r.module, r.operation, r.where, r.phase, r.dtype, r.shape) for r in report.rows]
    yield f"{name}/diagnose", digest(repr(rows))


def pod_report() -> Iterator[tuple[str, str]]:
    """Yields the report of a step on a mesh of one device."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.tanh(x @ params["w"]) ** 2)

    step = mpjax.make_train_step(loss, optax.adam(1e-3), "bf16-mixed")
    state = step.init({"w": jnp.ones((8, 8))})
    report = mpjax.pods.check(step, (state, jnp.ones((4, 8))), "cpu:1")
    yield "pods.check", digest(str(report))


def main() -> int:
    """Writes the digests, and compares them."""
    parser = argparse.ArgumentParser(description="Compares the programs of two commits.")
    out = Path("outputs/golden.json")
    parser.add_argument("--out", type=Path, default=out, help=f"a file to write; default: {out}")
    parser.add_argument("--against", type=Path, help="a JSON file of another commit")
    parser.add_argument("--networks", default=",".join(NETWORKS), help="default: all")
    parser.add_argument("--size", default="tiny", help="default: tiny")
    options = parser.parse_args()
    names = options.networks.split(",")
    lines: dict[str, str] = {}
    for name in track(names, description="lowering"):
        lines.update(lowered(name, options.size))
    for name in (n for n in ("mlp", "transformer", "lstm") if n in names):
        lines.update(diagnosed(name))
    lines.update(pod_report())
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(lines, indent=1, sort_keys=True) + "\n")
    if options.against is None:
        return 0
    before = json.loads(options.against.read_text())
    before = {k: v for k, v in before.items() if k.split("/")[0] in (*names, "pods.check")}
    changed = sorted(k for k in lines.keys() | before.keys() if lines.get(k) != before.get(k))
    print(f"{len(changed)} of {len(lines)} differ", *changed, sep="\n  ")
    return bool(changed)


if __name__ == "__main__":
    sys.exit(main())
