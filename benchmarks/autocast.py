"""Measures autocast beside hand-cast and float32 models: compiled, for the gradient, in time.

    python benchmarks/autocast.py --networks mlp,transformer --targets cpu,h100,v5e --dtype bf16

h100, a100, v5e and v5p are compiled for ahead of time and need no device; `measure/targets.py`
says what to install. Without options: every network in its small size, for this CPU.
"""

import argparse
import contextlib
import datetime
import functools
import itertools
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
from measure import compiled, elsewhere, errors, jaxprs, machine, peer, tables, targets, timings
from measure.options import words
from measure.store import Store
from measure.variants import ANYWHERE, DTYPES, INSIDE, VARIANTS, value_and_grad
from networks import NETWORKS, SIZES, Network
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

PARTS = ("counts", "residuals", "errors", "timings")
Job = tuple[str, Callable[[], None]]


def count(text: str) -> int:
    """Parses a number of times that measures something."""
    if (found := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{found} measures nothing; give 1 or more")
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    parts = f"{', '.join(PARTS)} (timings are this CPU's; a GPU's: benchmarks/gpu.py)"
    add("--parts", type=words(PARTS), default=list(PARTS), help=parts)
    add("--networks", type=words(NETWORKS), default=list(NETWORKS), help=", ".join(NETWORKS))
    add("--variants", type=words(VARIANTS), default=ANYWHERE, help=", ".join(VARIANTS))
    add("--targets", type=words(targets.NAMES), default=["cpu"], help=", ".join(targets.NAMES))
    platforms = f"whose programs' gradient errors to measure: {', '.join(elsewhere.PLATFORMS)}"
    add("--platforms", type=words(elsewhere.PLATFORMS), default=["cpu"], help=platforms)
    add("--dtype", type=words(DTYPES), default=["bf16"], help=", ".join(DTYPES))
    add("--size", choices=SIZES, default="small", help="of what is compiled and timed")
    add("--error-size", choices=SIZES, default="tiny", help="of what is compared with float64")
    add("--seeds", type=count, default=12, help="parameters and batches for gradient errors")
    add("--repeats", type=count, default=1, help="compilations of each variant; the fastest counts")
    add("--rounds", type=count, default=15, help="timed steps of each variant")
    add("--torch", metavar="PYTHON", help="an interpreter with PyTorch, timed beside us")
    add("--out", type=pathlib.Path, help="Markdown to write, and a .json of its numbers")
    return parser.parse_args()


@functools.cache
def network_of(name: str, size: str) -> Network:
    """Returns one object a network and size, for what is cached by it."""
    return NETWORKS[name](size)


def jobs(options: argparse.Namespace, store: Store) -> Iterator[Job]:
    """Yields what to measure, one network after another."""
    for name in options.networks:
        for dtype in options.dtype:
            if "residuals" in options.parts:
                yield from residual_jobs(options, store, name, dtype)
            for target in options.targets if "counts" in options.parts else ():
                yield from count_jobs(options, store, name, dtype, target)
            for platform in options.platforms if "errors" in options.parts else ():
                yield from error_jobs(options, store, name, dtype, platform)
            if "timings" in options.parts:
                yield f"{name}: time, {dtype}", timing_job(options, store, name, dtype)


def losses(options: argparse.Namespace) -> list[str]:
    """Returns the variants that differ by their loss."""
    return [v for v in options.variants if v != INSIDE]


def residual_jobs(options: Any, store: Store, name: str, dtype: str) -> Iterator[Job]:
    network = network_of(name, options.size)
    for variant in losses(options):

        def job(variant: str = variant) -> None:
            loss = VARIANTS[variant](network, dtype)
            kept = jaxprs.residuals(loss, network.params, network.batch)
            casts = jaxprs.converts(jax.value_and_grad(loss), network.params, network.batch)
            store.put(
                *("residuals", "", dtype, options.size, name, variant),
                **{"converts": casts, **vars(kept)},
            )

        yield f"{name}: residuals, {dtype} {variant}", job


def count_jobs(options: Any, store: Store, name: str, dtype: str, target: str) -> Iterator[Job]:
    network = network_of(name, options.size)
    taking_turns = itertools.product(range(options.repeats), options.variants)
    for turn, variant in taking_turns:

        def job(turn: int = turn, variant: str = variant) -> None:
            step = value_and_grad(variant, network, dtype)
            device = targets.get_target(target)
            found = compiled.compile_for(step, device, network.params, network.batch)
            row = {**vars(found), "total_s": found.total_s, "repeats": turn + 1}
            key = ("counts", target, dtype, options.size, name, variant)
            before = store.rows[key] if turn else row
            least = {k: min(before[k], row[k]) for k in row if k.endswith("_s")}
            store.put(*key, **{**row, **least})

        yield f"{name}: {target}, {dtype} {variant}", job


def error_jobs(options: Any, store: Store, name: str, dtype: str, platform: str) -> Iterator[Job]:
    network = network_of(name, options.error_size)
    for variant in losses(options):

        def job(variant: str = variant) -> None:
            loss = VARIANTS[variant](network, dtype)
            found = errors.gradient_errors(loss, network, platform, options.seeds)
            key = ("errors", platform, dtype, options.error_size, name, variant)
            store.put(*key, errors=found)

        yield f"{name}: gradient error, {platform} {dtype} {variant}", job


def timing_job(options: Any, store: Store, name: str, dtype: str) -> Callable[[], None]:
    network = network_of(name, options.size)

    def job() -> None:
        steps = {
            v: timings.jax_step(value_and_grad(v, network, dtype), network)
            for v in options.variants
        }
        with contextlib.ExitStack() as stack:
            if options.torch and name in peer.NETWORKS:
                torch = stack.enter_context(peer.Torch(options.torch, name, network.numbers))
                for variant in ("f32", f"autocast {dtype}"):
                    steps[f"torch {variant}"] = functools.partial(torch.step, f"torch {variant}")
            found = timings.interleaved(steps, options.rounds)
        for variant, seconds in found.items():
            key = ("timings", "cpu", dtype, options.size, name, variant)
            store.put(*key, seconds=seconds, rounds=options.rounds)

    return job


def run(options: argparse.Namespace, store: Store, console: Console) -> None:
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    todo = list(jobs(options, store))
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(todo))
        for title, job in todo:
            progress.update(task, description=title)
            job()
            if options.out:  # after each, so that a run that is stopped leaves what it found
                options.out.write_text(tables.document(store))
            progress.advance(task)


def main() -> None:
    options = arguments()
    console = Console(width=None if sys.stdout.isatty() else 160)
    targets.quiet_environment()
    for name in options.targets:
        try:
            console.print(targets.get_target(name).description)
        except targets.UnavailableError as error:
            sys.exit(f"target {error}")
    store = Store.read(options.out.with_suffix(".json") if options.out else None)
    store.begin(
        command=" ".join(["python", "benchmarks/autocast.py", *sys.argv[1:]]),
        date=datetime.date.today().isoformat(),
        commit=machine.commit(),
        versions=machine.versions(),
        cpu=machine.cpu(),
    )
    run(options, store, console)
    for grid in tables.grids(store):
        grid.show(console)
    if options.out:
        console.print(f"written: {options.out}")


if __name__ == "__main__":
    main()
