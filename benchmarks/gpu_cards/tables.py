"""`gpu.md`: what the rows say, what is wrong or slower than expected first."""

from collections.abc import Iterator
from typing import Any

from measure.store import Store

from .jobs import FAILURES, Row
from .plans import CARDS

PRODUCT = "bf16 product"  # of card 0
SLOWER = 1.02  # than a cast by hand, beyond what samples differ by: to be mended
BESIDE_TORCH = 1.1  # times as fast as torch.compile with autocast is expected
SAVES_TIME, SAVES_MEMORY = 0.99, 0.98  # a hint that saves neither on two networks goes
ATTENTION_NOTE = (
    "The models write attention as two products and a softmax. Autocast runs it in cuDNN's kernel, "
    "float32 and the cast by hand as it is written. 'cuDNN': that cast asks for the same kernel."
)
PEERS_NOTE = (
    "PyTorch's models call `scaled_dot_product_attention`, which chooses its kernel. "
    "The optimizer and the sizes are those of card 2. "
)


def document(store: Store) -> str:
    """Returns the file, a part for each device."""
    devices = dict.fromkeys(run["device"] for run in store.runs)
    parts = [_of_device(store, name) for name in devices]
    return "\n".join(["# On the device, by the clock", "", *parts])


def _of_device(store: Store, name: str) -> str:
    rows = with_shares([row for row in store.rows.values() if row["target"] == name])
    found = list(findings(rows))
    lines = [f"## {name}", "", "### Wrong, failed, or slower than expected", ""]
    lines += [f"- {line}" for line in found] or ["Nothing."]
    lines.append("")
    for number, title in CARDS.items():
        mine = [row for row in rows if row["part"] == f"card {number}"]
        if mine:
            lines += [f"### {number}. {title}", "", *_notes(number), *_table(mine), ""]
    used = {i for i, _ in store.used_runs()}
    mine = [(i, run) for i, run in enumerate(store.runs, start=1) if run["device"] == name]
    runs = [(i, run) for i, run in mine if i in used or run["left"]]
    lines += ["### Made by", "", *(_made(i, run) for i, run in runs), ""]
    return "\n".join(lines)


def with_shares(rows: list[Row]) -> list[Row]:
    """Returns the rows, those with products beside card 0's bf16 product, which is the peak."""
    peaks = {r["size"]: r["tflops"] for r in rows if r["variant"] == PRODUCT and "tflops" in r}

    def beside(row: Row) -> Row:
        peak = peaks.get("tiny" if row["size"] == "tiny" else "full")
        is_asked = peak and row["part"] != "card 0" and "tflops" in row
        return {**row, "share": row["tflops"] / peak} if is_asked else row

    return [beside(row) for row in rows]


def _made(number: int, run: dict[str, Any]) -> str:
    of = f"commit {run['commit']}, " if run["commit"] else ""
    driver = ", ".join(f"{k} {v}" for k, v in run["driver"].items())
    left = "".join(f"\n   Left out: {line}." for line in run.get("left", ()))
    return (
        f"{number}. `{run['command']}`\n   {run['date']}; {of}tree {run['tree']}; "
        f"{run['versions']}; {run['platform_version']}; {driver or 'no nvidia-smi'}; "
        f"on {run['host']}; XLA_FLAGS {run['xla_flags'] or 'none'}.{left}"
    )


def _notes(number: int) -> list[str]:
    notes = {
        2: "ms: median of samples in turns, and their range. float32: products as the device does "
        "them by default (TF32 on a GPU); highest: in full float32. peak: arguments, results and "
        "temporaries of the program. TFLOP/s: of the products as written; of the peak: "
        "beside card 0's bf16 product. compiled in s: of two programs at a time, quicker where XLA "
        "has chosen the same kernels before. "
        + ATTENTION_NOTE
        + " kernels_ms: milliseconds of a step by kind of kernel, from JAX's profiler.",
        3: PEERS_NOTE + "peak: what was allocated at most in one step.",
        4: "Loss and gradients. Beside all hints: below 1 it is faster, or smaller, without. busy: "
        + "in kernels, from JAX's profiler: a small program also waits for the host.",
    }
    return [notes[number], ""] if number in notes else []


# -- tables --------------------------------------------------------------------------------------

_COLUMNS = {  # a field of a row: its heading, its unit, its places
    "ms": ("ms", 1, 3),
    "busy_ms": ("busy ms", 1, 3),
    "per_second": ("a second", 1, 0),
    "tflops": ("TFLOP/s", 1, 1),
    "share": ("of the peak", 1, 3),
    "gb_s": ("GB/s", 1, 0),
    "peak_bytes": ("peak GB", 1e9, 2),
    "bytes_a_parameter": ("bytes a parameter", 1, 2),
    "compile_s": ("compiled in s", 1, 1),
}
_SPOKEN = ("ms", "low", "high", "samples", "steps", "part", "target", "dtype", "size", "network")
_SPOKEN += ("variant", "code", "run", "took_s", "jax", "temporaries", "trace_s", "flops", "bytes")
_SPOKEN += ("unit", *_COLUMNS)


def _table(rows: list[Row]) -> list[str]:
    columns = [name for name in _COLUMNS if any(name in row for row in rows)]
    heads = ["network", "variant", *(_COLUMNS[name][0] for name in columns), "beside", "and"]
    lines = [f"| {' | '.join(heads)} |", f"| --- | --- |{' ---: |' * len(columns)} ---: | --- |"]
    first: dict[tuple[str, str], Row] = {}
    for row in rows:
        base = first.setdefault((row["network"], row["size"]), row)
        cells = [f"{row['network']}, {row['size']}", row["variant"]]
        cells += [_cell(row, name) for name in columns]
        cells += [_beside(row, base), _rest(row)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _cell(row: Row, name: str) -> str:
    _, unit, places = _COLUMNS[name]
    if row.get(name) is None:
        return ""
    shown = f"{row[name] / unit:.{places}f}"
    if name == "ms":
        return f"{shown} ({row['low']:.{places}f} to {row['high']:.{places}f})"
    return f"{shown} {row['unit']}" if name == "per_second" else shown


def _beside(row: Row, base: Row) -> str:
    """Returns the time beside that of the first variant, or that they are equal."""
    if row is base or "ms" not in row or "ms" not in base:
        return ""
    return f"{row['ms'] / base['ms']:.3f}" + (" (equal)" if are_equal(row, base) else "")


def are_equal(a: Row, b: Row) -> bool:
    """Returns whether two times differ by less than their samples do."""
    return a["low"] <= b["high"] and b["low"] <= a["high"]


def _rest(row: Row) -> str:
    shown = (f"{k} {_plain(v)}" for k, v in row.items() if k not in _SPOKEN)
    return "; ".join(shown).replace("|", "/")


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(map(_plain, value))
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plain(x)}" for name, x in value.items())
    return str(value)


# -- findings ------------------------------------------------------------------------------------


def findings(rows: list[Row]) -> Iterator[str]:
    """Yields what has to be mended, in the order of the cards."""
    for row in rows:
        where = f"{row['part']}, {row['network']}, {row['variant']}"
        if row.get("right") is False:
            yield f"WRONG: {where}: {_rest(row)}"
    yield from _failed(rows)
    yield from _slower(rows)
    yield from _idle_hints(rows)


def _failed(rows: list[Row]) -> Iterator[str]:
    """Yields what could not be measured: variants of a network that have one reason in one line."""
    variants: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        for kind in (kind for kind in FAILURES if kind in row):
            key = (kind, row["part"], row["network"], row[kind])
            variants.setdefault(key, []).append(row["variant"])
    for (kind, part, network, reason), names in variants.items():
        yield f"{kind.replace('_', ' ')}: {part}, {network}, {', '.join(names)}: {reason}"


def _by_network(rows: list[Row], card: int) -> dict[tuple[str, str], dict[str, Row]]:
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        if row["part"] == f"card {card}" and "ms" in row:
            found.setdefault((row["network"], row["size"]), {})[row["variant"]] = row
    return found


def _slower(rows: list[Row]) -> Iterator[str]:
    """Yields the steps that are slower than a cast by hand, than float32, or than PyTorch's."""
    peers = _by_network(rows, 3)
    for place, ours in _by_network(rows, 2).items():
        name = ", ".join(place)
        fast = ours.get("autocast bf16")
        for hand in (ours.get("hand cast bf16"), ours.get("hand cast bf16, cuDNN")):
            if fast and hand and fast["ms"] > SLOWER * hand["ms"] and not are_equal(fast, hand):
                yield f"{name}: autocast takes {fast['ms'] / hand['ms']:.3f} of {hand['variant']}"
        full = ours.get("float32 highest")
        if fast and full and full["ms"] < 2.5 * fast["ms"]:
            yield f"{name}: autocast is {full['ms'] / fast['ms']:.2f} × as fast as float32, not 2.5"
        torch = peers.get(place, {}).get("autocast bf16, compiled")
        if fast and torch and torch["ms"] < BESIDE_TORCH * fast["ms"]:
            times = torch["ms"] / fast["ms"]
            yield f"{name}: {times:.2f} × as fast as compiled torch.autocast, not {BESIDE_TORCH}"


def _idle_hints(rows: list[Row]) -> Iterator[str]:
    """Yields the hints that save neither time nor memory on two networks."""
    saved: dict[str, list[bool]] = {}
    cards = [row for row in rows if row["part"] == "card 4"]
    bases = {(r["network"], r["size"]): r for r in cards if r["variant"] == "all hints"}
    for row in cards:
        base = bases.get((row["network"], row["size"]))
        if not row["variant"].startswith("without ") or base is None or "ms" not in base:
            continue
        if "ms" in row:
            if "busy_ms" in row and "busy_ms" in base:
                faster = base["busy_ms"] < SAVES_TIME * row["busy_ms"]
            else:
                faster = base["ms"] < SAVES_TIME * row["ms"] and not are_equal(row, base)
            smaller = base["peak_bytes"] < SAVES_MEMORY * row["peak_bytes"]
            saved.setdefault(row["variant"], []).append(faster or smaller)
        elif "same_program" in row:
            saved.setdefault(row["variant"], []).append(False)
    for name, found in saved.items():
        if sum(found) < 2:
            tried = f"{sum(found)} of {len(found)} networks, not on two"
            hint = name.removeprefix("without ")
            yield f"hint {hint}: 1 % of time or 2 % of memory is saved on {tried}"
