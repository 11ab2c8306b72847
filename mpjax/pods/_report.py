"""The report of `check`: numbers, collectives and findings, as text, table or JSON."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from mpjax._base.shown import Shown, html_table
from mpjax.pods._collectives import Collective
from mpjax.pods._findings import CHECKS, Finding, Memory, Times

_NESTED = (*("findings", "collectives", "memory", "times", "uncounted", "open_loops", "unjudged"),)
_HEADERS = ("sent", "kind", "dtype", "axes", "arrays", "MB a step", "largest")


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Report(Shown):
    """The result of `mpjax.pods.check`; `print` or a notebook shows it, `report.ok` decides.

    Example:
      >>> step = jax.jit(lambda state, x: (state - 0.1 * x, x.sum()), donate_argnums=0)
      >>> report = mpjax.pods.check(step, (jnp.ones(8), jnp.ones(8)), "cpu:1")
      >>> report.ok, report.exit_code, report.findings
      (True, 0, ())
    """

    topology: str
    num_devices: int
    mesh: dict[str, int]
    compute_dtype: str  # of most products; of the policy, if one was given
    findings: tuple[Finding, ...]
    collectives: tuple[Collective, ...]
    memory: Memory | None  # None where the program was not compiled
    flops: dict[str, int]  # products of a step and device, by dtype, loops multiplied
    hbm_bytes: int  # memory traffic of a step and device, loops multiplied
    cost_analysis_bytes: int | None  # XLA's own "bytes accessed": each loop's body once
    uncounted: tuple[str, ...]  # library calls whose flops are not in `flops`
    open_loops: tuple[str, ...]  # lines of loops whose trips are not known: each counts once
    unjudged: tuple[str, ...]  # keys of CHECKS that had nothing to look at
    times: Times
    fingerprint: str  # of the lowered program; equal on all processes of a job
    hash_seeds: int  # under how many seeds of Python's hashes it was traced; `check_job` tries two
    compile_seconds: float

    @property
    def ok(self) -> bool:
        """Whether no finding is an error."""
        return not any(finding.severity == "error" for finding in self.findings)

    @property
    def exit_code(self) -> int:
        """0 without findings, 1 with warnings, 2 with errors: for CI."""
        if not self.ok:
            return 2
        return 1 if self.findings else 0

    def found(self, check: str) -> tuple[Finding, ...]:
        """Returns the findings of one check, by its key in `CHECKS`."""
        return tuple(finding for finding in self.findings if finding.check == check)

    def sent(self, role: str) -> dict[str, int]:
        """Returns the bytes of collectives of one role by dtype, loops multiplied."""
        total: dict[str, int] = {}
        for collective in self.collectives:
            if collective.role == role:
                dtype = collective.dtype
                total[dtype] = total.get(dtype, 0) + collective.total_bytes
        return total

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain values, for JSON."""
        memory = self.memory
        values = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in _NESTED
        }
        return values | {
            "ok": self.ok,
            "exit_code": self.exit_code,
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
            "collectives": [collective.to_dict() for collective in self.collectives],
            "memory": memory and dataclasses.asdict(memory) | {"headroom": memory.headroom},
            "times": dataclasses.asdict(self.times) | {"bound": self.times.bound},
            "uncounted": list(self.uncounted),
            "open_loops": list(self.open_loops),
            "unjudged": list(self.unjudged),
        }

    def to_json(self) -> str:
        """Returns `to_dict()` as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        return _as_text(self)

    def _headline(self) -> str:
        first = [f": {finding}".splitlines()[0] for finding in self.findings[:1]]
        return _title(self) + "".join(first)

    def _repr_html_(self) -> str:
        lines = [line.strip() for line in _summary(self)]
        checks = [f"{mark} {text}" for mark, text in _check_rows(self)]
        rows = _collective_rows(self.collectives) or [("nothing", *[""] * (len(_HEADERS) - 1))]
        notes = [*lines, *checks, *(str(finding) for finding in self.findings)]
        return html_table(_title(self), _HEADERS, rows, notes)

    def __rich__(self) -> Any:
        return _as_table(self)


# -- for people -----------------------------------------------------------------------------------


def _as_text(report: Report) -> str:
    """Returns the report as lines of text."""
    rows = [_HEADERS, *_collective_rows(report.collectives)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADERS))]
    table = [
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    checks = [f"  {mark} {text}" for mark, text in _check_rows(report)]
    findings = [f"  {line}" for finding in report.findings for line in str(finding).splitlines()]
    sent = table if report.collectives else ["  nothing is sent between devices"]
    return "\n".join([_title(report), *_summary(report), *checks, *findings, *sent])


def _as_table(report: Report) -> Any:
    """Returns the report as a group that rich prints."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    colours = {"ok": "green", "!!": "red", "??": "yellow", "--": "dim"}
    checks = [Text(f"  {mark} {text}", style=colours[mark]) for mark, text in _check_rows(report)]
    styles = {"error": "red", "warning": "yellow"}
    findings = [Text(f"  {finding}", style=styles[finding.severity]) for finding in report.findings]
    table = Table(*_HEADERS, title="between devices", title_justify="left")
    for row in _collective_rows(report.collectives):
        table.add_row(*map(Text, row))
    head = Text(_title(report), style="bold")
    lines = [Text(line) for line in _summary(report)]
    return Group(head, *lines, *checks, *findings, *([table] if report.collectives else []))


def _title(report: Report) -> str:
    """Returns the first line: where, and whether all is well."""
    errors = sum(finding.severity == "error" for finding in report.findings)
    warnings = len(report.findings) - errors
    counts = [
        f"{n} {word}{'s' * (n > 1)}" for n, word in ((errors, "error"), (warnings, "warning"))
    ]
    state = ", ".join(c for c in counts if not c.startswith("0")) or "nothing wrong"
    return f"{report.topology}: {state}"


def _parts(memory: Memory) -> str:
    """Returns the parts of the peak; not all temporaries of a step need live at one moment."""
    rest = memory.peak - memory.arguments
    if rest < 0:
        return f"arguments {_gb(memory.arguments)}, some of which are not counted in it"
    return f"arguments {_gb(memory.arguments)}, all else {_gb(rest)}"


def _summary(report: Report) -> list[str]:
    """Returns the lines of numbers."""
    mesh = ", ".join(f"{name} {size}" for name, size in report.mesh.items()) or "one device"
    lines = [f"  mesh      {mesh}; products read {report.compute_dtype or 'nothing'}"]
    memory = report.memory
    if memory is None:
        return [*lines, "  memory    unknown: the program was not compiled"]
    of = f" of {_gb(memory.limit)}, {memory.headroom:.0%} left" if memory.limit else ""
    lines.append(f"  memory    peak {_gb(memory.peak)}{of} ({_parts(memory)})")
    flops = ", ".join(f"{n / 1e12:.3g} TFLOP in {d}" for d, n in report.flops.items()) or "none"
    lines.append(f"  products  {flops}; {_gb(report.hbm_bytes)} of memory traffic")
    if report.uncounted:
        lines.append(f"            without {', '.join(report.uncounted)}")
    lines += [f"            a loop of unknown trips counts once: {x}" for x in report.open_loops]
    times = report.times
    if times.bound != "unknown":
        each = f"compute {_ms(times.compute)}, HBM {_ms(times.hbm)}, network {_ms(times.network)}"
        lines.append(f"  at least  {each} at peak rates: bound by {times.bound}")
    lines.append(
        f"  program   {report.fingerprint[:16]}, compiled in {report.compile_seconds:.0f} s"
    )
    return lines


def _check_rows(report: Report) -> list[tuple[str, str]]:
    """Returns a mark and a sentence for each check: ok, !! an error, ?? a warning, -- not made."""
    rows: list[tuple[str, str]] = []
    for check, text in CHECKS.items():
        findings = report.found(check)
        if any(finding.severity == "error" for finding in findings):
            mark = "!!"
        elif findings:
            mark = "??"
        elif not _is_judged(report, check):
            mark = "--"
        else:
            mark = "ok"
        rows.append((mark, text))
    return rows


def _is_judged(report: Report, check: str) -> bool:
    if check in ("callbacks", "agreement"):
        return True
    if check == "hashing":
        return report.hash_seeds > 1
    if check == "precision":
        return not report.topology.startswith("cpu")
    return (
        check not in report.unjudged
        and report.memory is not None
        and (check != "memory" or report.memory.limit > 0)
    )


def _collective_rows(collectives: tuple[Collective, ...]) -> list[tuple[str, ...]]:
    """Returns one row for each role, kind, dtype and axes, the largest first."""
    groups: dict[tuple[str, ...], list[Collective]] = {}
    for c in collectives:
        groups.setdefault((c.role, c.kind, c.dtype, ",".join(c.axes)), []).append(c)
    sizes = {key: sum(c.total_bytes for c in group) for key, group in groups.items()}
    rows: list[tuple[str, ...]] = []
    for key in sorted(groups, key=lambda key: -sizes[key]):
        largest = max(groups[key], key=lambda c: c.total_bytes)
        least = ">= " if any(c.at_least for c in groups[key]) else ""
        arrays = f"{least}{sum(c.count for c in groups[key])}"
        dims = ",".join(map(str, largest.shape))
        where = f"[{dims}] {largest.path or largest.source}"
        rows.append((*key, arrays, f"{least}{sizes[key] / 1e6:.1f}", where))
    return rows


def _gb(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e7 else f"{count / 1e6:.2f} MB"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
