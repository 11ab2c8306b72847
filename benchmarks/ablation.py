"""Leaves out one of autocast's hints at a time, and writes what each saves.

    python benchmarks/ablation.py --networks llama,resnet50 --hints masks,merged --target h100

Networks are of size "medium": a compilation takes seconds, and what a hint saves in two layers it
saves in twelve. A program that is lowered to the same text without a hint is not compiled again.
"""

import argparse
import contextlib
import datetime
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import jax
from measure import compiled, machine, tables, targets
from measure.options import words
from measure.store import Store
from measure.variants import DTYPES, value_and_grad
from networks import JUDGES, NETWORKS, SIZES
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mpjax._autocast.speed import hints

COUNTS = ("bytes_accessed", "hbm_traffic", "temporaries", "converts")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--networks", type=words(NETWORKS), default=list(NETWORKS), help=", ".join(NETWORKS))
    add("--hints", type=words(hints.HINTS), default=list(hints.HINTS), help=", ".join(hints.HINTS))
    add("--target", choices=targets.NAMES, default="h100")
    add("--dtype", choices=DTYPES, default="bf16")
    add("--recipe", choices=("float8", "int8"), help="whose products are quantised")
    add("--size", choices=SIZES, default="medium")
    add("--out", type=pathlib.Path, help="Markdown to write, and a .json of its numbers")
    return parser.parse_args()


class Ablation:
    """The programs of one network: cast by hand, with all hints, and without one."""

    def __init__(self, name: str, options: argparse.Namespace, store: Store):
        self.network = NETWORKS[name](options.size)
        self.ours = options.recipe or "autocast"
        self.target = targets.get_target(options.target)
        column = f"{name} {options.recipe}" if options.recipe else name
        self.key = ("ablation", options.target, options.dtype, options.size, column)
        self.dtype = options.dtype
        self.store = store
        self.text = ""

    def measure(self, variant: str, hint: str = "") -> None:
        """Compiles a variant, unless leaving out a hint changed nothing."""
        without = hints.without(hint) if hint else contextlib.nullcontext()
        with without:
            step = value_and_grad(variant, self.network, self.dtype)
            args = (self.network.params, self.network.batch)
            text = lowered(step, self.target, *args)
            if hint and text == self.text:
                return self.put(hint, self.store.rows[(*self.key, "autocast")])
            found = vars(compiled.compile_for(step, self.target, *args))
        if variant == self.ours and not hint:
            self.text = text
        return self.put(hint or ("autocast" if variant == self.ours else variant), found)

    def put(self, name: str, found: dict[str, Any]) -> None:
        """Keeps the counts of a variant, or of all without a hint."""
        self.store.put(*self.key, name, **{count: found[count] for count in COUNTS})


def lowered(fun: Any, target: targets.Target, *args: Any) -> str:
    """Returns the program of a function as XLA gets it."""
    jax.clear_caches()
    return jax.jit(fun).trace(*target.specs(args)).lower().as_text()


def run(options: argparse.Namespace, store: Store, console: Console) -> None:
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(options.networks) * (2 + len(options.hints)))
        for name in options.networks:
            ablation = Ablation(name, options, store)
            store.drop(*ablation.key)
            whole = (("hand-cast", ""), (ablation.ours, ""))
            for variant, hint in (*whole, *((ablation.ours, hint) for hint in options.hints)):
                progress.update(task, description=f"{name}: {hint and 'no '}{hint or variant}")
                ablation.measure(variant, hint)
                progress.advance(task)
            if options.out:  # after each, so that a run that is stopped leaves what it found
                options.out.write_text(document(store))


def document(store: Store) -> str:
    """Returns the result file."""
    head = "# What each hint saves\n\nMade by these commands:\n\n"
    body = "\n".join(grid.markdown() for grid in grids(store))
    return head + tables.commands(store) + "\n\n" + body


def grids(store: Store) -> Iterator[tables.Grid]:
    """Yields a table of each count for each target."""
    for place in dict.fromkeys(map(place_of, store.part("ablation"))):
        for count, unit in (("bytes_accessed", "bytes accessed"), ("temporaries", "temporaries")):
            yield grid(store, place, count, unit)


def place_of(row: dict[str, Any]) -> tuple[str, ...]:
    """Returns what rows of one table share; a network's recipe stands behind its name."""
    return row["target"], row["dtype"], row["size"], row["network"].partition(" ")[2]


def grid(store: Store, place: tuple[str, ...], count: str, unit: str) -> tables.Grid:
    """Returns one count without each hint, beside that with all and that of the hand cast."""
    found: dict[str, dict[str, float]] = {}
    for row in store.part("ablation"):
        if place_of(row) == place:
            name = row["network"].partition(" ")[0]
            found.setdefault(row["variant"], {})[name] = row[count]
    hand, ours = found.pop("hand-cast"), found.pop("autocast")
    networks = [name for name in NETWORKS if name in ours]
    rows = [("all hints × hand-cast", "", *(f"{ours[n] / hand[n]:.2f}" for n in networks))]
    for name, hint in hints.HINTS.items():
        if name in found:
            cells = (change(found[name].get(n), ours[n]) for n in networks)
            rows.append((f"without {name}", hint.platforms, *cells))
    note = (
        f"Ratio of {unit}: in the first row of autocast to hand-cast, below of autocast without "
        "one hint to autocast with all. Above 1 the hint helps. An empty cell is 1: the same "
        "program, or the same count; a question mark is not measured. "
        f"Judges, by which no hint is tuned: {', '.join(JUDGES)}."
    )
    recipe = f", products in {place[3]}" if place[3] else ""
    title = f"{unit}, {', '.join(place[:2])}, size {place[2]}{recipe}"
    return tables.Grid(title, note, ("", "platforms", *networks), rows)


def change(value: float | None, of: float) -> str:
    shown = "?" if value is None else f"{value / of:.3f}"
    return "" if shown == "1.000" else shown


def main() -> None:
    options = arguments()
    console = Console(width=None if sys.stdout.isatty() else 200)
    targets.quiet_environment()
    store = Store.read(options.out.with_suffix(".json") if options.out else None)
    store.begin(
        command=" ".join(["python", "benchmarks/ablation.py", *sys.argv[1:]]),
        date=datetime.date.today().isoformat(),
        commit=machine.commit(),
        versions=machine.versions(),
        cpu=machine.cpu(),
    )
    run(options, store, console)
    for found in grids(store):
        found.show(console)


if __name__ == "__main__":
    main()
