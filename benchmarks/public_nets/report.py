"""The tables of public models, from the rows that were measured."""

import math
import statistics
from typing import Any

from measure.store import Row, Store
from measure.tables import ON_A_TPU, Grid, commands
from measure.targets import TPUS

from . import MODELS

SWITCH, AUTOCAST, PLAIN = "own switch", "autocast", "f32"
VARIANTS = (PLAIN, SWITCH, AUTOCAST)
NONE = "–"  # there is no such thing
HEAD = "# Models that others wrote\n\nMade by these commands:\n\n"


def grids(store: Store) -> list[Grid]:
    """Returns every table that the store has rows for."""
    targets = dict.fromkeys(row["target"] for row in store.part("counts"))
    made = [errors_grid(store), *(counts_grid(store, target) for target in targets)]
    return [grid for grid in made if grid.rows]


def document(store: Store) -> str:
    """Returns the result file."""
    body = "\n".join(grid.markdown() for grid in grids(store))
    short = "\n".join(f"- {line}" for line in summary(store))
    return f"{HEAD}{commands(store)}\n\n## In short\n\n{short}\n\n{body}"


def sentence(store: Store) -> str:
    """Returns what the landing page says of it."""
    models, packages, _ = tried(store)
    ratios = [ratio for name in MODELS if (ratio := gradient_ratio(store, name)) is not None]
    size = counts_beside(store, "h100", SWITCH, "bytes_accessed")
    memory = counts_beside(store, "h100", SWITCH, "temporaries")
    return (
        f"{models} models of {packages} other packages run unedited. {len(ratios)} of them have "
        f"their own switch to bfloat16. mpjax's gradients have {_mean(ratios):.2f} times the error "
        f"of that switch on average ({_ends(ratios)}). Compiled for an H100, {len(size)} of them "
        f"move on average {_mean(size):.2f} times its bytes ({_ends(size)}) and need "
        f"{_mean(memory):.2f} times its temporary memory ({_ends(memory)})."
    )


def _ends(ratios: list[float]) -> str:
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def tried(store: Store) -> tuple[int, int, list[str]]:
    """Returns how many models and packages were measured, and which models raised."""
    names = {row["network"] for row in store.rows.values()}
    failed = sorted({row["network"] for row in store.rows.values() if "error" in row})
    return len(names), len({MODELS[name].package for name in names}), failed


def summary(store: Store) -> list[str]:
    """Returns what all rows come to, in sentences; each says of how many models it is the mean."""
    models, packages, failed = tried(store)
    end = f"failed: {', '.join(failed)}." if failed else "none raised."
    lines = [f"{models} models of {packages} packages, unedited; {end}"]
    ratios = {name: ratio for name in MODELS if (ratio := gradient_ratio(store, name)) is not None}
    if ratios:
        least, most = (pick(ratios, key=ratios.__getitem__) for pick in (min, max))
        lines.append(
            f"Gradient errors are {ratios[least]:.2f} ({least}) to {ratios[most]:.2f} ({most}) "
            f"times those of the package's own switch to bfloat16, {_mean(ratios.values()):.2f} in "
            f"the mean of {len(ratios)}."
        )
    for target in dict.fromkeys(row["target"] for row in store.part("counts")):
        for base, what in ((SWITCH, "those of the package's own switch"), (PLAIN, "float32's")):
            field, bytes_ = traffic(target)
            size, count = mean_count(store, target, base, field)
            memory, _ = mean_count(store, target, base, "temporaries")
            if count:
                text = f"Compiled for {target}: {size:.2f} of the {bytes_} and {memory:.2f} of the"
                lines.append(f"{text} temporaries, beside {what} (mean of {count}).")
    return lines


def traffic(target: str) -> tuple[str, str]:
    """Returns the count of bytes that a target's programs are compared by, and its name.

    XLA's count for a TPU takes what lies in the chip's own memory for accessed too.
    """
    if target in TPUS:
        return "hbm_traffic", "bytes to and from HBM"
    return "bytes_accessed", "bytes"


def mean_count(store: Store, target: str, base: str, field: str) -> tuple[float, int]:
    """Returns the geometric mean of autocast's counts over another variant's, and of how many."""
    known = counts_beside(store, target, base, field)
    return (_mean(known) if known else math.nan), len(known)


def counts_beside(store: Store, target: str, base: str, field: str) -> list[float]:
    """Returns autocast's counts as shares of another variant's, of all models that have both."""
    ratios = [count_ratio(store, target, model, base, field) for model in MODELS]
    return [ratio for ratio in ratios if ratio is not None]


def gradient_ratio(store: Store, name: str) -> float | None:
    """Returns autocast's gradient error over the switch's: the geometric mean over seeds."""
    ours, theirs = (_row(store, "errors", "cpu", name, v) for v in (AUTOCAST, SWITCH))
    if not (ours and theirs and "gradient_errors" in ours and "gradient_errors" in theirs):
        return None
    pairs = zip(ours["gradient_errors"], theirs["gradient_errors"], strict=True)
    return _mean(a / b for a, b in pairs)


def count_ratio(store: Store, target: str, name: str, base: str, field: str) -> float | None:
    """Returns a count of autocast over that of another variant."""
    ours, other = (_row(store, "counts", target, name, v) for v in (AUTOCAST, base))
    if not (ours and other and ours.get(field) and other.get(field)):
        return None
    return ours[field] / other[field]


def errors_grid(store: Store) -> Grid:
    """Returns the table of errors and of a step in float16."""
    rows: list[tuple[str, ...]] = []
    for name, model in MODELS.items():
        found = {v: _row(store, "errors", "cpu", name, v) for v in VARIANTS}
        step = _row(store, "step", "cpu", name, AUTOCAST)
        if not (any(found.values()) or step):
            continue
        cells = [name, model.package, f"`{model.switch}`" if model.switch else "none"]
        for field in ("loss_errors", "gradient_errors"):
            cells += [_median(found[v], field) for v in (SWITCH, AUTOCAST)]
        ratio = _ratio_of_errors(found)
        rows.append((*cells, ratio, _step(step)))
    note = (
        "Relative error of the loss and ‖g − g64‖ / ‖g64‖ over all parameters, bfloat16 on this "
        "CPU at a tiny size, medians over seeds; the ratio is a geometric mean, seed by seed, with "
        "its standard error. Compiled without excess precision. Last column: a train step under "
        '"16-mixed", and the loss scale at which it was taken.'
    )
    columns = ("model", "package", "its switch", "loss: switch", "loss: autocast")
    columns += ("gradient: switch", "gradient: autocast", "× switch", "a step in float16")
    return Grid("Errors against float64", note, columns, rows)


def counts_grid(store: Store, target: str) -> Grid:
    """Returns the table of what was compiled for a target."""
    rows: list[tuple[str, ...]] = []
    on_tpu = ("hbm_traffic",) if target in TPUS else ()
    fields = {"bytes_accessed": 1e9, **dict.fromkeys(on_tpu, 1e9), "temporaries": 1e6}
    for name in MODELS:
        found = {v: _row(store, "counts", target, name, v) for v in VARIANTS}
        base = found[SWITCH] or found[PLAIN]
        for variant, row in found.items():
            if row is None:
                continue
            if "error" in row:
                rows.append((name, variant, row["error"], *[NONE] * (len(fields) + 2)))
                continue
            counts = [_against(row, base, field, unit) for field, unit in fields.items()]
            seconds = [_against(row, base, field, 1) for field in ("trace_s", "total_s")]
            rows.append((name, variant, *counts, str(row["converts"]), *seconds))
    note = (
        "Loss and gradients at published widths with two blocks, compiled ahead of time. Ratios in "
        "brackets are to the package's own switch, or to float32 where it has none. Seconds are "
        "processor seconds on a machine with other work."
    )
    if on_tpu:
        note += " XLA's GB accessed count what lies in the chip's own memory too."
    columns = ("model", "variant", "GB accessed", *(ON_A_TPU[field] for field in on_tpu))
    columns += ("temporaries MB", "converts", "trace s", "trace + lower + compile s")
    return Grid(f"Compiled for {target}", note, columns, rows)


def _row(store: Store, part: str, target: str, name: str, variant: str) -> Row | None:
    rows = (
        row
        for row in store.part(part)
        if (row["target"], row["network"], row["variant"]) == (target, name, variant)
    )
    return next(rows, None)


def _median(row: Row | None, field: str) -> str:
    if row is None:
        return NONE
    return row["error"] if "error" in row else f"{statistics.median(row[field]):.1e}"


def _ratio_of_errors(found: dict[str, Row | None]) -> str:
    ours, theirs = found[AUTOCAST], found[SWITCH]
    if not (ours and theirs) or "error" in ours or "error" in theirs:
        return NONE
    pairs = zip(ours["gradient_errors"], theirs["gradient_errors"], strict=True)
    logs = [math.log(a / b) for a, b in pairs]
    mean = math.exp(statistics.mean(logs))
    if len(logs) < 2:
        return f"{mean:.2f}"
    return f"{mean:.2f} ± {mean * statistics.stdev(logs) / len(logs) ** 0.5:.2f}"


def _step(row: Row | None) -> str:
    if row is None:
        return NONE
    if "error" in row:
        return row["error"]
    scale = f"at 2^{math.log2(row['scale']):.0f}"
    if not row["finite"]:
        return f"not finite, {scale}"
    return f"{scale}, after {row['skips']} skipped" if row["skips"] else scale


def _against(row: Row, base: Row | None, field: str, unit: float) -> str:
    value = row[field]
    if value is None:
        return "not available"
    shown = f"{value / unit:.0f}" if value / unit >= 100 else f"{value / unit:.3g}"
    if base is None or base is row or not base.get(field):
        return shown
    return f"{shown} ({value / base[field]:.2f})"


def _mean(ratios: Any) -> float:
    return math.exp(statistics.mean(map(math.log, ratios)))
