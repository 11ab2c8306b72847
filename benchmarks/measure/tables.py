"""The tables of a result file, and the same ones on a terminal."""

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable

from rich.console import Console
from rich.table import Table

from .store import Row, Store
from .targets import GPUS, TPUS

ON_A_TPU = {"operands_accessed": "GB but for prefetches", "hbm_traffic": "GB to and from HBM"}


@dataclasses.dataclass(frozen=True)
class Grid:
    """A table with its title and what its columns mean."""

    title: str
    note: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]

    def markdown(self) -> str:
        """Returns the table as Markdown, names to the left and numbers to the right."""
        rule = ["---" if i < 2 else "---:" for i in range(len(self.columns))]
        lines = [self.columns, rule, *self.rows]
        body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return f"## {self.title}\n\n{self.note}\n\n{body}\n"

    def show(self, console: Console) -> None:
        """Prints the table."""
        table = Table(title=self.title, caption=self.note, title_justify="left")
        for i, column in enumerate(self.columns):
            table.add_column(column, justify="left" if i < 2 else "right")
        last = None
        for row in self.rows:
            if last not in (None, row[0]):
                table.add_section()
            last = row[0]
            table.add_row(*row)
        console.print(table)


def grids(store: Store) -> list[Grid]:
    """Returns every table that the store has rows for."""
    found = [
        *_by(store.part("counts"), ("target", "dtype", "size"), _counts),
        *_by(store.part("residuals"), ("dtype", "size"), _residuals),
        *_by(store.part("errors"), ("target", "dtype", "size"), _errors),
        *_by(store.part("timings"), ("dtype", "size"), _timings),
    ]
    return [grid for grid in found if grid.rows]


def document(store: Store) -> str:
    """Returns the result file."""
    head = "# autocast beside hand-cast and float32\n\nMade by these commands:\n\n"
    body = "\n".join(grid.markdown() for grid in grids(store))
    return head + commands(store) + "\n\nRatios in brackets are to hand-cast.\n\n" + body


def commands(store: Store) -> str:
    """Returns the commands that made what is in a store, numbered."""
    return "\n".join(
        f"{number}. `{run['command']}`\n   {run['date']}; commit {run['commit']}; "
        f"{run['versions']}; on {run['cpu']}."
        for number, run in store.used_runs()
    )


def _by(rows: list[Row], keys: tuple[str, ...], make: Callable[..., Grid]) -> Iterable[Grid]:
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[k] for k in keys), []).append(row)
    for values, group in groups.items():
        yield make(_with_yardstick(group), **dict(zip(keys, values, strict=True)))


def _with_yardstick(rows: list[Row]) -> list[tuple[Row, Row]]:
    """Returns each row with the hand-cast row of its network, or with itself."""
    hand = {row["network"]: row for row in rows if row["variant"] == "hand-cast"}
    return [(row, hand.get(row["network"], {})) for row in rows]


def _ratio(row: Row, hand: Row, name: str, unit: float) -> str:
    value, yardstick = row.get(name), hand.get(name)
    if value is None:
        return "not available"
    shown = _number(value / unit)
    if not yardstick or row["variant"] == "hand-cast":
        return shown
    return f"{shown} ({value / yardstick:.2f})"


def _number(x: float) -> str:
    """Returns three digits, without an exponent."""
    return f"{x:.0f}" if x >= 100 else f"{x:.3g}"


def _counts(pairs: list[tuple[Row, Row]], target: str, dtype: str, size: str) -> Grid:
    on_tpu = target in TPUS
    rows = [
        (
            row["network"],
            row["variant"],
            _ratio(row, hand, "bytes_accessed", 1e9),
            *(_ratio(row, hand, name, 1e9) for name in ON_A_TPU if on_tpu),
            _ratio(row, hand, "flops", 1e9),
            _ratio(row, hand, "temporaries", 1e6),
            str(row["converts"]),
            _ratio(row, hand, "trace_s", 1),
            _ratio(row, hand, "total_s", 1),
            _ratio(row, hand, "elapsed_s", 1),
        )
        for row, hand in pairs
    ]
    note = (
        "Loss and gradients, compiled; XLA's own cost analysis of the optimised module with loop "
        "bodies counted as often as they run; converts between floating dtypes in that module; "
        "the fastest of as many compilations as the command asks for, variants taking turns: "
        "processor seconds (threads add up), and elapsed ones."
    )
    if on_tpu:
        note += (
            " The first count is XLA's: it takes what lies in the chip's own memory for accessed "
            "too, and a slice for the whole. The second leaves out what the compiler moves into "
            "the chip ahead of its reader; the third is what moves between chip and HBM, for "
            "programs without loops."
        )
    if target in GPUS:
        note += " Convolutions are calls of cuDNN: their operands, results and flops are added."
    columns = ("network", "variant", "GB accessed")
    columns += tuple(ON_A_TPU.values()) if on_tpu else ()
    columns += ("Gflop", "temporaries MB", "converts", "trace s", "trace + lower + compile s")
    columns += ("elapsed s",)
    return Grid(f"{target}, {dtype}, size {size}", note, columns, rows)


def _residuals(pairs: list[tuple[Row, Row]], dtype: str, size: str) -> Grid:
    plain = {row["network"]: row for row, _ in pairs if row["variant"] == "f32"}
    rows = [
        (
            row["network"],
            row["variant"],
            _ratio(row, hand, "activations", 1e6),
            f"{row['activations'] / plain[row['network']]['activations']:.2f}"
            if row["network"] in plain
            else "",
            _number(row["weights"] / 1e6),
            str(row["converts"]),
        )
        for row, hand in pairs
    ]
    note = (
        "What `jax.vjp` keeps for the backward pass, inputs not counted: MB that depend on the "
        "batch, and apart from them MB of weights' low copies. Casts between floating dtypes in "
        "the jaxpr of loss and gradients, loop bodies once."
    )
    columns = ("network", "variant", "residuals MB", "× f32", "weights' copies MB", "casts")
    return Grid(f"Residuals, {dtype}, size {size}", note, columns, rows)


def _errors(pairs: list[tuple[Row, Row]], target: str, dtype: str, size: str) -> Grid:
    rows: list[tuple[str, ...]] = []
    for row, hand in pairs:
        ratio = ""
        if hand and row["variant"] != "hand-cast":
            ratio = _paired(row["errors"], hand["errors"])
        median = f"{statistics.median(row['errors']):.2e}"
        rows.append((row["network"], row["variant"], median, ratio))
    note = (
        "‖g − g64‖ / ‖g64‖ over all parameters on this CPU: the median over seeds, and the "
        "geometric mean of the ratio to hand-cast, seed by seed, with its standard error. Compiled "
        "without excess precision, so that every rounding that is written takes place. The loss is "
        "multiplied by 2¹⁰, the gradients divided by it."
    )
    whose = dtype
    if target != "cpu":
        whose = f"{target}, {dtype}"
        note += (
            " The program is the one that JAX lowers for that platform; a product of 16-bit values "
            "with a float32 result is run on the same values in float32."
        )
    columns = ("network", "variant", "gradient error", "× hand-cast")
    return Grid(f"Gradients against float64, {whose}, size {size}", note, columns, rows)


def _paired(errors: list[float], yardstick: list[float]) -> str:
    """Returns the mean ratio of errors over the seeds that both rows have: each counts from 0."""
    logs = [math.log(e / y) for e, y in zip(errors, yardstick, strict=False)]
    mean, deviation = math.exp(statistics.mean(logs)), statistics.stdev(logs)
    return f"{mean:.3f} ± {mean * deviation / len(logs) ** 0.5:.3f}"


def _timings(pairs: list[tuple[Row, Row]], dtype: str, size: str) -> Grid:
    rows = [
        (row["network"], row["variant"], _ratio(row, hand, "seconds", 1e-3), str(row["rounds"]))
        for row, hand in pairs
    ]
    note = (
        "Median milliseconds for loss and gradients on this CPU, variants taking turns. Other work "
        "on the machine makes the milliseconds wander; the ratios are what to read."
    )
    columns = ("network", "variant", "ms a step", "rounds")
    return Grid(f"Time on this CPU, {dtype}, size {size}", note, columns, rows)
