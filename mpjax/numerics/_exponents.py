"""`exponents`: how weights, activations and gradients are spread over powers of two, by module."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from mpjax._base.errors import message
from mpjax._base.foreign_keywords import DIAGNOSIS
from mpjax._base.keywords import names_keywords
from mpjax._base.shown import Shown, Table
from mpjax._base.typing import PolicySpec
from mpjax._policies.policy import shown_name
from mpjax.numerics import _subject
from mpjax.numerics._clock import Clock, Progress, spent
from mpjax.numerics._figure import new_figure
from mpjax.numerics._formats import EXPONENTS, FORMATS, Format, Histogram, Lost, format_of
from mpjax.numerics._histogram import BINS, Exponents
from mpjax.numerics._plan import BACKWARD, RECOMPUTED, RunPlan
from mpjax.numerics._program import LossProgram, argument_names, check_alive
from mpjax.numerics._report import whole

WEIGHT, ACTIVATION, GRADIENT, WGRAD = "weight", "activation", "gradient", "wgrad"
KINDS = (WEIGHT, ACTIVATION, GRADIENT, WGRAD)


@dataclasses.dataclass(frozen=True)
class Spread:
    """The values of one kind in one module, before they are scaled."""

    module: str  # of a weight and its gradient, the path of the leaf; without a name, the line
    kind: str  # 'weight', 'activation', 'gradient' (of activations) or 'wgrad' (of weights)
    histogram: Histogram

    def to_dict(self) -> dict[str, Any]:
        """Returns it with Transformer Engine's names, as plain values."""
        histogram = self.histogram
        named = {
            "module": self.module,
            "kind": self.kind,
            "size": histogram.size,
            "amax_exponent": histogram.highest,
            "dynamic_range": histogram.dynamic_range,
            "zeros%": 100.0 * histogram.zeros / max(histogram.size, 1),
            "inf": histogram.inf,
            "nan": histogram.nan,
        }
        for dtype in FORMATS:
            lost = histogram.lost(dtype)
            named[f"{dtype}_underflows%"] = lost.underflows
            named[f"{dtype}_overflows%"] = lost.overflows
        return named


@dataclasses.dataclass(frozen=True, repr=False)
class ExponentReport(Shown):
    """The result of `exponents`; `print` it, or `.plot()` it."""

    function: str
    policy: str
    loss_scale: float  # under which gradients were computed; histograms are of unscaled ones
    spreads: tuple[Spread, ...]
    seconds: dict[str, float] = dataclasses.field(default_factory=dict[str, float], compare=False)

    def of(self, kind: str, module: str | None = None) -> Histogram:
        """Returns the values of a kind together, of one module or of all.

        Raises:
          ValueError: there is no such kind, or no such module has it.
        """
        spreads = [s for s in self.spreads if s.kind == kind and module in (None, s.module)]
        if not spreads:
            known = sorted({s.module for s in self.spreads if s.kind == kind})
            got = f"no {kind!r} in module {module!r}." if known else f"no kind {kind!r}."
            allowed = f"Allowed: {', '.join(map(repr, known[:8] or KINDS))}."
            raise ValueError(message("exponents.of", got, allowed))
        total = spreads[0].histogram
        for spread in spreads[1:]:
            total = total + spread.histogram
        return total

    def lost(self, kind: str, dtype: str, scale: float = 1.0) -> Lost:
        """Returns the losses of a dtype, of all values of a kind, times a scale."""
        return self.of(kind).lost(dtype, scale)

    @property
    def suggested_loss_scale(self) -> float:
        """The largest power of two that leaves float16 gradients a bit of headroom.

        1 where gradients are all zero.
        """
        highest = self.of(GRADIENT).highest if self._has(GRADIENT) else None
        if highest is None:
            return 1.0
        return 2.0 ** min(max(FORMATS["float16"].largest - 1 - highest, 0), 24)

    def _has(self, kind: str) -> bool:
        return any(s.kind == kind for s in self.spreads)

    def to_dict(self) -> dict[str, Any]:
        """Returns all of it as plain values, for JSON."""
        return {
            "function": self.function,
            "policy": self.policy,
            "loss_scale": self.loss_scale,
            "suggested_loss_scale": self.suggested_loss_scale,
            "spreads": [s.to_dict() for s in self.spreads],
            "seconds": self.seconds,
        }

    def _headline(self) -> str:
        lost = {k: self.lost(k, "float16").underflows for k in KINDS if self._has(k)}
        shares = ", ".join(f"{share:.1f}% of {kind}s" for kind, share in lost.items())
        return f"{self.function} under {self.policy}: float16 would make 0 of {shares}"

    def _blocks(self) -> list[str | Table]:
        scale = self.suggested_loss_scale
        headers = ("module", "kind", "2^", "zeros", "f16→0", f"f16→0 ×{whole(scale)}", "f16→inf")
        headers = (*headers, "e4m3→0", "e4m3→NaN", "e5m2→0")
        cells = [_cells(s, scale) for s in self._worst(24)]
        rest = len(self.spreads) - len(cells)
        more = f"… and {rest} more, in .spreads" if rest > 0 else ""
        title = f"{self.function} under {self.policy}: exponents, and the share that would be lost"
        advice = f"loss scale for float16 gradients: {whole(scale)}"
        blocks: list[str | Table] = [title, Table(headers, cells, more), advice]
        return [*blocks, spent(self.seconds)] if self.seconds else blocks

    def _worst(self, count: int) -> list[Spread]:
        """Returns the spreads in which float16 loses most, in their order."""
        by_loss = sorted(self.spreads, key=lambda s: -sum(_shares(s.histogram.lost("float16"))))
        chosen = set(map(id, by_loss[:count]))
        return [s for s in self.spreads if id(s) in chosen]

    def plot(
        self,
        axis: Any = None,
        *,
        kinds: Sequence[str] = KINDS,
        loss_scale: float = 1.0,
        formats: Sequence[str] = ("float16", "float8_e5m2", "float8_e4m3fn"),
    ) -> Any:
        """Returns a matplotlib figure: a line a kind, and where formats end. A notebook shows it.

        Args:
          axis: of matplotlib, to draw on; None for a figure of its own.
          kinds: the kinds to draw, of 'weight', 'activation', 'gradient' and 'wgrad'.
          loss_scale: with which gradients are drawn once more; 1 for not.
          formats: the formats whose ends to draw; also 'bfloat16'.

        Raises:
          ValueError: there is no such kind, or no such format.
        """
        figure = axis.figure if axis is not None else new_figure(8, 4)
        axis = figure.subplots() if axis is None else axis
        shown = [kind for kind in kinds if self._has(kind) or kind not in KINDS]
        moved = [kind for kind in shown if kind in (GRADIENT, WGRAD) and loss_scale != 1]
        for kind, scale in (*((k, 1.0) for k in shown), *((k, loss_scale) for k in moved)):
            histogram = self.of(kind)
            share = 100 * histogram.counts / max(histogram.counts.sum(), 1)
            name = kind if scale == 1 else f"{kind} × {whole(scale)}"
            label = f"{name}: {histogram.lost('float16', scale).underflows:.1f}% are 0 in float16"
            axis.step(EXPONENTS + round(np.log2(scale)), share, where="mid", label=label)
        for name in formats:
            _draw_end(axis, format_of(name, "ExponentReport.plot(formats)"))
        seen = [h for h in map(self.of, shown) if h.highest is not None]
        if seen:
            low = min(h.lowest for h in seen if h.lowest is not None)
            high = max(h.highest for h in seen if h.highest is not None)
            reach = round(np.log2(loss_scale)) if moved else 0
            axis.set_xlim(max(low, -60) - 2, high + max(reach, 0) + 2)
        axis.set(xlabel="exponent of two", ylabel="% of non-zero values")
        axis.legend(fontsize=8)
        return figure


def _draw_end(axis: Any, form: Format) -> None:
    """Draws a line at the end of a format's range, below which all is 0; bins are centred."""
    at = form.zero_below - 0.5
    axis.axvline(at, color="#777777", linewidth=1, linestyle=":")
    style = {"rotation": 90, "fontsize": 7, "va": "top", "ha": "right"}
    words = f"{form.name.removeprefix('float8_').removesuffix('fn')}: 0 left of this"
    place = ("data", "axes fraction")
    text = axis.annotate(words, (at, 0.98), xycoords=place, annotation_clip=True, **style)
    text.set_in_layout(False)  # no room is made for the end of a format outside of the picture


@names_keywords(DIAGNOSIS, "numerics.exponents", behind="(params, batch)")
def exponents(
    loss_fn: Callable[..., Any],
    policy: PolicySpec = None,
    *,
    loss_scale: Any = None,
    has_aux: bool = False,
    progress: Progress = None,
) -> Callable[..., ExponentReport]:
    """Returns a function that counts exponents of weights, activations and gradients, by module.

    One histogram shows what every format would lose under every scale. For example, magnitudes
    below 2⁻²⁵, half the smallest number, become 0 in float16; in float8_e5m2 the limit is 2⁻¹⁷, in
    float8_e4m3fn 2⁻¹⁰.

    Args:
      loss_fn: `loss_fn(params, *batch) -> loss`, differentiated by its first argument.
      policy: the policy of the run; "float32" shows the values before any loss.
      loss_scale: the loss scale for the gradients, None for the policy's own. The histograms are of
        unscaled gradients. A power of two is exact.
      has_aux: whether `loss_fn` returns `(loss, aux)`.
      progress: whether lines on stderr say what is running; None for yes in a terminal and in a
        notebook. A function is given each line.

    Returns:
      A function of the arguments of `loss_fn` that returns an `ExponentReport`: `print` it,
      `.plot()` it. `.of("gradient")` is the histogram of a kind, `.suggested_loss_scale` the
      scale to take, and `.lost("gradient", "float16", 2**15)` what a dtype would lose.

    Raises:
      TypeError, ValueError: as `diagnose`.

    Dtypes:
      Counted on bits, of each operation's result in the dtype that it has.

    Transforms:
      None: it is for people.

    Example:
      >>> loss = lambda w, x: jnp.mean(jnp.tanh(x @ w)) * 2.0**-30
      >>> report = mpjax.numerics.exponents(loss, "float32")(jnp.ones((4, 4)), jnp.ones((2, 4)))
      >>> report.lost("gradient", "float16").underflows, report.lost("weight", "float16").underflows
      (100.0, 0.0)

    References:
      Transformer Engine, precision debug tools (`underflows%`, `overflows%`, `dynamic_range`)
    """
    where = "numerics.exponents"
    Clock(where, progress)  # a mistake is said here
    subject, scale = _subject.of_loss(loss_fn, policy, loss_scale, has_aux=has_aux, where=where)

    def run(*args: Any) -> ExponentReport:
        names = argument_names(loss_fn, len(args))
        check_alive(args, names, where)
        factor, clock = float(scale.loss_scale), Clock(where, progress)
        given, named = [jnp.float32(factor), *args], ["loss_scale", *names]
        program = LossProgram(subject.make(subject.policy), given, named, where, clock)
        read = program.read(Exponents(), given)
        spreads = _spreads(program.plan, read.values, names[0], factor if subject.scaled else 1.0)
        paths = [f"{names[0]}/{p}" if p else names[0] for p in program.gradient_paths]
        for path, counted in zip(paths, read.outputs[1:], strict=True):
            spreads.append(Spread(path, WGRAD, Histogram.of_row(counted)))
        policy = shown_name(subject.policy)
        return ExponentReport(subject.name, policy, factor, tuple(spreads), dict(clock.seconds))

    return run


def _spreads(plan: RunPlan, values: Any, params: str, scale: float) -> list[Spread]:
    """Returns the rows by module and kind; one that a checkpoint runs twice counts once."""
    counts: dict[tuple[str, str], Any] = {}
    outputs = _output_rows(plan)
    made = {*outputs, *_read_by(plan, outputs)} if scale != 1 else set(outputs)
    for row, (site, counted) in enumerate(zip(plan.sites, values, strict=True)):
        kind, shifted = ACTIVATION, counted
        if site.phase == "argument" and site.module.partition("/")[0] == params:
            kind = WEIGHT
        elif site.phase in ("argument", "constant", RECOMPUTED):
            continue
        elif not site.shape or row in made:  # a loss, and the number that it is scaled with
            continue  # the gradients are counted below, from their own rows
        elif site.phase == BACKWARD:
            kind, shifted = GRADIENT, unscaled(counted, scale)
        key = (site.module or site.where, kind)
        counts[key] = shifted + counts.get(key, 0)
    spreads = [Spread(m, k, Histogram.of_row(row)) for (m, k), row in counts.items()]
    return sorted(spreads, key=lambda s: KINDS.index(s.kind))


def _output_rows(plan: RunPlan) -> list[int | None]:
    """Returns the row of each gradient; of one without, the row that it is made of."""
    rows: list[int | None] = []
    for node in plan.outputs[1:]:
        seen = node
        while seen is not None and seen not in plan.row_of:
            seen = plan.reads[seen][-1] if plan.reads[seen] else None
        rows.append(None if seen is None else plan.row_of[seen])
    return rows


def _read_by(plan: RunPlan, rows: Sequence[int | None]) -> set[int]:
    """Returns the rows that some rows read: gradients, before they are unscaled."""
    node_of = {row: node for node, row in plan.row_of.items()}
    reads = [n for row in rows if row is not None for n in plan.reads[node_of[row]]]
    return {plan.row_of[n] for n in reads if n in plan.row_of}


def unscaled(counted: Any, scale: float) -> Any:
    """Returns a histogram of values divided by a scale, taken as the nearest power of two."""
    shift = round(np.log2(scale))
    if not shift:
        return counted
    moved = counted.copy()
    moved[:BINS] = 0
    kept = counted[shift:BINS] if shift > 0 else counted[: BINS + shift]
    if shift > 0:
        moved[: BINS - shift] = kept
        # Magnitudes below the lowest exponent count with it.
        moved[0] += counted[:shift].sum()
    else:
        moved[-shift:BINS] = kept
    return moved


def _shares(lost: Lost) -> tuple[float, float]:
    return lost.underflows, lost.overflows


def _cells(spread: Spread, scale: float) -> Sequence[str]:
    histogram = spread.histogram
    half, e4m3, e5m2 = (histogram.lost(d) for d in ("float16", "float8_e4m3fn", "float8_e5m2"))
    scaled = histogram.lost("float16", scale) if spread.kind in (GRADIENT, WGRAD) else half
    reach = "all 0" if histogram.lowest is None else f"{histogram.lowest} … {histogram.highest}"
    zeros = 100.0 * histogram.zeros / max(histogram.size, 1)
    shares = (zeros, half.underflows, scaled.underflows, half.overflows, e4m3.underflows)
    shares = (*shares, e4m3.overflows, e5m2.underflows)
    return (spread.module or "(no name)", spread.kind, reach, *(f"{s:.1f}%" for s in shares))
