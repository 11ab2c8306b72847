"""Measures what autocast does for models that others wrote: unedited, beside their own switch.

    pip install -r benchmarks/public_models.txt
    python benchmarks/public_models.py --out benchmarks/results/public_models.md
    python benchmarks/public_models.py --models bert,unet --parts errors,step

errors: loss and gradients against float64, at a tiny size on this CPU. step: a train step in
float16. counts: bytes, temporaries and compile time, compiled ahead of time for the targets;
`measure/targets.py` says what to install for these. A row that OUT has already, of the same code,
is not measured again; a model that raises is a row with its error.

Exit codes: 0 measured · 1 a model raised: its row says what · 2 a wrong argument, or a package is
not installed.
"""

import argparse
import datetime
import functools
import os
import pathlib
import shlex
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from measure import compiled, machine, targets
from measure.options import words
from measure.store import Store
from networks import Network
from public_nets import MODELS, measured, report
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import mpjax

PARTS = ("errors", "step", "counts")
VARIANTS = f"of counts: {', '.join(report.VARIANTS)}"
MODE = ("bf16-mixed", jnp.bfloat16)
Job = tuple[tuple[str, ...], Callable[[], dict[str, Any]]]  # its key in the store, what measures


def seeds(text: str) -> int:
    """Parses a number of seeds."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} measures nothing; give 1 or more")
    return int(text)


def arguments() -> argparse.Namespace:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    add = parser.add_argument
    add("--models", type=words(MODELS), default=list(MODELS), help=", ".join(MODELS))
    add("--parts", type=words(PARTS), default=list(PARTS), help=", ".join(PARTS))
    add("--variants", type=words(report.VARIANTS), default=list(report.VARIANTS), help=VARIANTS)
    add("--targets", type=words(targets.NAMES), default=["cpu"], help=", ".join(targets.NAMES))
    add("--seeds", type=seeds, default=8, help="parameters and batches for errors (default: 8)")
    add("--out", type=pathlib.Path, help="Markdown to write, and a .json of its numbers")
    options = parser.parse_args()
    missing = {MODELS[name].package for name in options.models if not MODELS[name].is_installed}
    if missing:
        there = [name for name in options.models if MODELS[name].package not in missing]
        text = f"not installed: {', '.join(sorted(missing))}.\n"
        text += "  Type pip install -r benchmarks/public_models.txt"
        parser.error(text + (f", or --models {','.join(there)}" if there else ""))
    return options


def losses(name: str, network: Network) -> dict[str, Callable[[], Any]]:
    """Returns the ways of running a model that are compared; each is made when it is asked for."""
    policy, dtype = MODE
    ways: dict[str, Callable[[], Any]] = {report.PLAIN: lambda: network.loss}
    if MODELS[name].switch:
        ways[report.SWITCH] = lambda: network.hand_cast(dtype)
    ways[report.AUTOCAST] = lambda: mpjax.autocast(network.loss, policy)
    return ways


def jobs(options: argparse.Namespace) -> Iterator[Job]:
    """Yields what to measure, one model after another."""
    for name in options.models:
        model = MODELS[name]
        for part, size in (("errors", "tiny"), ("step", "tiny"), ("counts", "small")):
            if part in options.parts:
                make = functools.partial(model.make, size)
                yield from part_jobs(options, part, name, make, size)


def part_jobs(
    options: argparse.Namespace, part: str, name: str, make: Callable[[], Network], size: str
) -> Iterator[Job]:
    made: list[Network] = []

    def network() -> Network:
        if not made:
            made.append(make())
        return made[0]

    def loss(variant: str) -> Any:
        return losses(name, network())[variant]()

    if part == "step":
        key = ("step", "cpu", "f16", size, name, report.AUTOCAST)
        yield key, lambda: measured.float16_step(network())
        return
    has_switch = bool(MODELS[name].switch)
    variants = [v for v in report.VARIANTS if v != report.SWITCH or has_switch]
    if part == "errors":
        for variant in variants[1:]:
            key = ("errors", "cpu", "bf16", size, name, variant)
            yield key, lambda v=variant: measured.errors(loss(v), network(), options.seeds)
        return
    for target in options.targets if MODELS[name].is_counted else ():
        for variant in (v for v in variants if v in options.variants):
            key = ("counts", target, "bf16", size, name, variant)
            yield key, lambda v=variant, t=target: counts(loss(v), network(), t)


def counts(loss: Any, network: Network, target: str) -> dict[str, Any]:
    """Returns what loss and gradients cost, compiled for a target."""
    step = jax.value_and_grad(loss)
    device = targets.get_target(target)
    found = compiled.compile_for(step, device, network.params, network.batch)
    return {**vars(found), "total_s": found.total_s}


def attempt(job: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns what a job measured, or its error: in a model of others anything may raise."""
    try:
        return job()
    except Exception as error:  # noqa: BLE001 - its row says it
        first = str(error).strip().splitlines() or [""]
        return {"error": f"{type(error).__name__}: {first[0][:120]}"}


def run(options: argparse.Namespace, store: Store, console: Console) -> bool:
    """Measures what is missing; returns whether all models ran."""
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    todo = list(jobs(options))
    is_sound = True
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(todo))
        for key, job in todo:
            progress.update(task, description=" ".join((key[4], key[0], key[1], key[5])))
            module = f"benchmarks/public_nets/{MODELS[key[4]].module}.py"
            code = machine.tree_hash("mpjax", "benchmarks/public_nets/measured.py", module)
            row = store.rows.get(key)
            if row is None or row.get("code") != code or "error" in row:
                store.put(*key, **attempt(job), code=code)
                if options.out:  # after each, so that a run that is stopped leaves what it found
                    options.out.write_text(report.document(store))
            if "error" in store.rows[key]:
                is_sound = False
                console.print(f"{' '.join(key)}: {store.rows[key]['error']}")
            progress.advance(task)
    return is_sound


def main() -> int:
    options = arguments()
    console = Console(width=None if sys.stdout.isatty() else 160)
    targets.quiet_environment()
    if "counts" not in options.parts:  # programs that run for a moment: they compile sooner
        os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    if "counts" in options.parts:
        for name in options.targets:
            try:
                targets.get_target(name)
            except targets.UnavailableError as error:
                print(f"target {error}", file=sys.stderr)
                return 2
    store = Store.read(options.out.with_suffix(".json") if options.out else None)
    store.begin(
        command=shlex.join(["python", "benchmarks/public_models.py", *sys.argv[1:]]),
        date=datetime.date.today().isoformat(),
        commit=machine.commit(),
        versions=machine.versions(),
        cpu=machine.cpu(),
    )
    is_sound = run(options, store, console)
    console.print("\n".join(report.summary(store)))
    for grid in report.grids(store):
        grid.show(console)
    if options.out:
        console.print(f"written: {options.out}")
    return 0 if is_sound else 1


if __name__ == "__main__":
    sys.exit(main())
