"""In which kernels a step spends its time, from JAX's profiler."""

import collections
import functools
import gzip
import json
import pathlib
import re
import tempfile
from typing import Any

import jax

from .clock import Timed
from .jobs import Row, attempted

STEPS = 3
MOST = 12  # kinds of kernels that a row shows; the others are one sum
KINDS = {  # the first that a kernel's name matches; any other kind is the name without its numbers
    "attention": "fmha|flash|sdpa|cudnn.*attn",
    "products": "gemm|nvjet|cutlass|xmma|cublas|conv.*(fprop|dgrad|wgrad)|ynn",
    "copies": "memcpy|memset|copy",
}


def by_kind(timed: Timed) -> dict[str, float]:
    """Returns the milliseconds of a step by kind of kernel, the longest first.

    Raises:
      ValueError: the profiler saw no kernel.
    """
    timed.open()
    try:
        timed.run(1)
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                timed.run(STEPS)
            paths = list(pathlib.Path(folder).rglob("*.trace.json.gz"))
            events = [e for path in paths for e in _events(path)]
    finally:
        timed.close()
    return summed(events)


def add_busy(rows: dict[str, Row], prepared: dict[str, Timed]) -> None:
    """Writes into each row that has a time how many milliseconds of a step kernels run."""
    for name in (name for name in prepared if "ms" in rows.get(name, ())):
        spent = attempted(functools.partial(by_kind, prepared[name]))
        if isinstance(spent, Exception):  # the clock's times stand without the profiler's
            rows[name]["profiler"] = str(spent)
        else:
            rows[name]["busy_ms"] = sum(spent.values())


def _events(path: pathlib.Path) -> list[dict[str, Any]]:
    with gzip.open(path) as file:
        return json.load(file)["traceEvents"]


def summed(events: list[dict[str, Any]]) -> dict[str, float]:
    """Returns the milliseconds of a step by kind, of the events of `STEPS` steps."""
    threads = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"
    }
    # On a GPU a stream's kernels are also shown by operation and by line: they would count thrice.
    streams = {place for place, name in threads.items() if name.startswith("Stream")}
    total: collections.Counter[str] = collections.Counter()
    for e in events:
        place = e.get("pid"), e.get("tid")
        is_here = place in streams if streams else "hlo_op" in e.get("args", ())
        if e.get("ph") == "X" and is_here:
            total[kind(e["name"])] += e["dur"] / 1e3 / STEPS
    if not total:
        raise ValueError("the profiler saw no kernel")
    top = dict(total.most_common(MOST))
    rest = sum(total.values()) - sum(top.values())
    return {**top, "others": rest} if len(total) > MOST else top


def kind(name: str) -> str:
    """Returns the kind of a kernel."""
    for title, pattern in KINDS.items():
        if re.search(pattern, name, re.IGNORECASE):
            return title
    return re.sub(r"[_.]?\d+", "", name)[:40]
