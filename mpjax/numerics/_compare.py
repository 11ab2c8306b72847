"""`compare`: the error that each module adds, beside the error that has piled up after it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from mpjax._base.dtypes import require_x64, short_name
from mpjax._base.errors import message
from mpjax._base.foreign_keywords import DIAGNOSIS
from mpjax._base.keywords import names_keywords
from mpjax._base.shown import Shown, Table
from mpjax._base.typing import PolicySpec
from mpjax._policies.policy import shown_name
from mpjax.numerics import _subject
from mpjax.numerics._clock import Clock, Progress, spent
from mpjax.numerics._plan import RECOMPUTED, RunPlan
from mpjax.numerics._program import LossProgram, argument_names, check_alive
from mpjax.numerics._shadow import LOCAL, LOCAL_SIZE, SUM, TERMS, TOTAL, TOTAL_SIZE, Shadow

_REFERENCES = ("float32", "float64")
_CANCELS = 2.0**-10  # a sum is rounding alone if its terms' errors exceed this share of them
_PASS_ON = frozenset({"convert_element_type", "reduce_precision", "mul", "div", "psum", SUM})


@dataclasses.dataclass(frozen=True)
class Errors:
    """The errors of a module in one pass, relative, in the L1 norm."""

    module: str  # empty for what has no name: then a row for each source line
    phase: str  # forward or backward
    local: float  # that its operations add, largest first counted; against the same operands
    accumulated: float  # of its results, against a run in the reference dtype
    operation: str  # the one that adds most
    where: str
    dtype: str
    operations: int


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison(Shown):
    """The result of `compare`; `print` shows the worst modules first."""

    function: str
    policy: str
    reference: str
    modules: tuple[Errors, ...]  # by local error, largest first
    gradients: dict[str, float]  # accumulated error by leaf; of those in `noise`, of their terms
    loss: float  # accumulated error
    noise: tuple[str, ...] = ()
    """Gradients that are 0 but for rounding, as that of the bias of an attention's keys.

    Their terms cancel, and no digit of the sum is correct. Their errors are relative to the terms.
    """
    seconds: dict[str, float] = dataclasses.field(default_factory=dict[str, float], compare=False)

    @property
    def gradient(self) -> float:
        """The largest error of a gradient leaf."""
        return max(self.gradients.values(), default=0.0)

    def to_dict(self) -> dict[str, Any]:
        """Returns all of it as dicts and lists, for JSON."""
        return dataclasses.asdict(self)

    def _headline(self) -> str:
        worst = next((e for e in self.modules), None)
        most = f"; most is added in {worst.module or worst.where!r}" if worst else ""
        return f"{self._title()}: gradients off by {self.gradient:.1e} at most{most}"

    def _title(self) -> str:
        return f"{self.function} under {self.policy}, against {self.reference}: relative errors"

    def _blocks(self) -> list[str | Table]:
        headers = ("module", "pass", "local", "accumulated", "mostly by", "where", "dtype")
        cells = [
            (
                e.module or "(no name)",
                e.phase,
                f"{e.local:.1e}",
                f"{e.accumulated:.1e}",
                e.operation,
                e.where,
                e.dtype,
            )
            for e in self.modules[:16]
        ]
        more = len(self.modules) - 16
        rest = f"… and {more} more, in .modules" if more > 0 else ""
        worst = sorted(self.gradients.items(), key=lambda pair: -pair[1])[:6]
        grads = [(f"{path}{self._mark(path)}", f"{error:.1e}") for path, error in worst]
        blocks: list[str | Table] = [
            self._title(),
            Table(headers, cells, rest),
            Table(("gradients, worst first", "error"), grads, f"loss: {self.loss:.1e}"),
        ]
        return [*blocks, spent(self.seconds)] if self.seconds else blocks

    def _mark(self, path: str) -> str:
        return "  (0 but for rounding: of its terms)" if path in self.noise else ""


@names_keywords(DIAGNOSIS, "numerics.compare", behind="(params, batch)")
def compare(
    loss_fn: Callable[..., Any],
    policy: PolicySpec = None,
    *,
    reference: str = "float32",
    loss_scale: Any = None,
    has_aux: bool = False,
    progress: Progress = None,
) -> Callable[..., Comparison]:
    """Returns a function that measures the rounding error that each module adds.

    It runs the program twice, once in the reference dtype. The *local* error of an operation
    compares it with the same operation in the reference dtype on the operands that it had: it names
    the culprit. The *accumulated* error compares it with the second run: it grows with depth,
    whichever module caused it. Where terms cancel, and where a loop adds to a sum in 16 bits, each
    local error is ordinary, and the module in which the accumulated one leaps is the culprit.

    Args:
      loss_fn: `loss_fn(params, *batch) -> loss`, differentiated by its first argument.
      policy: the policy to judge; whatever `get_policy` takes.
      reference: 'float32' or 'float64'.
      loss_scale: the loss scale for the gradients; None for the policy's own.
      has_aux: whether `loss_fn` returns `(loss, aux)`.
      progress: whether lines on stderr say what is running; None for yes in a terminal and in a
        notebook. A function is given each line.

    Returns:
      A function of the arguments of `loss_fn` that returns a `Comparison`.

    Raises:
      ValueError: another reference, or 'float64' with 64-bit types off.
      TypeError: as `diagnose`.

    Dtypes:
      It measures roundings to fewer bits than the reference has: casts, products on low operands,
      `reduce_precision`. Operations that contain a program with dtypes of its own (`lax.reduce`),
      and foreign kernels, count as exact.

    Transforms:
      None: it is for people.

    Example:
      >>> loss = lambda w, x: jnp.sum(jnp.tanh(x @ w))
      >>> report = mpjax.numerics.compare(loss, "bf16-mixed")(jnp.eye(4) / 3, jnp.ones((2, 4)))
      >>> 0 < report.gradient < 2**-7
      True

    References:
      PyTorch, `torch.ao.ns` (numeric suite)
    """
    where = "numerics.compare"
    Clock(where, progress)  # a mistake is said here

    def run(*args: Any) -> Comparison:
        return compare_now(*args, clock=Clock(where, progress))

    compare_now = compared(loss_fn, policy, reference, loss_scale, has_aux=has_aux, where=where)
    return run


def compared(
    loss_fn: Callable[..., Any],
    policy: Any,
    reference: str,
    loss_scale: Any,
    *,
    has_aux: bool,
    where: str,
) -> Callable[..., Comparison]:
    """Returns the function that `compare` returns; `where` is the name in its messages."""
    if reference not in _REFERENCES:
        got = f"unknown reference {reference!r}."
        raise ValueError(message(f"{where}(reference)", got, "Allowed: 'float32', 'float64'."))
    require_x64(jnp.dtype(reference), f"{where}(reference)")
    subject, scale = _subject.of_loss(loss_fn, policy, loss_scale, has_aux=has_aux, where=where)

    def run(*args: Any, clock: Clock) -> Comparison:
        names = argument_names(loss_fn, len(args))
        check_alive(args, names, where)
        given = [jnp.float32(float(scale.loss_scale)), *args]
        program = LossProgram(
            subject.make(subject.policy), given, ["loss_scale", *names], where, clock
        )
        read = program.read(Shadow(reference), given)
        errors = _Relative(program.plan, read.values, float(jnp.finfo(reference).eps))
        loss, *rest = [_ratio(*pair) for pair in read.outputs]
        sums = [errors.cancelled(node) for node in program.plan.outputs[1:]]
        rest = [
            e if s is None else errors.of_terms(s, TOTAL) for e, s in zip(rest, sums, strict=True)
        ]
        return Comparison(
            subject.name,
            shown_name(subject.policy),
            reference,
            tuple(_modules(program.plan, errors)),
            dict(zip(program.gradient_paths, rest, strict=True)),
            loss,
            tuple(p for p, s in zip(program.gradient_paths, sums, strict=True) if s is not None),
            dict(clock.seconds),
        )

    return run


def _ratio(error: float, size: float) -> float:
    return 0.0 if error == 0 else float(error) / float(size) if size else float("inf")


class _Relative:
    """Errors of rows, relative to the result, or to the terms of a sum where these cancel.

    A sum such as 1 - 1 that is 0 but for the rounding of its terms has no correct digit in the
    reference either.
    """

    def __init__(self, plan: RunPlan, values: Any, eps: float) -> None:
        self._plan, self._values, self._eps = plan, values, eps
        self._node = {row: node for node, row in plan.row_of.items()}
        self._known: dict[int, int | None] = {}

    def local(self, row: int) -> float:
        if self._cancels(row):
            return self.of_terms(row, LOCAL)
        return _ratio(self._values[row][LOCAL], self._values[row][LOCAL_SIZE])

    def accumulated(self, row: int) -> float:
        summed = self.cancelled(self._node.get(row))
        if summed is not None:
            return self.of_terms(summed, TOTAL)
        return _ratio(self._values[row][TOTAL], self._values[row][TOTAL_SIZE])

    def of_terms(self, row: int, column: int) -> float:
        """Returns the error of a sum, relative to its terms."""
        return _ratio(self._values[row][column], self._values[row][TERMS])

    def cancelled(self, node: int | None) -> int | None:
        """Returns the row of a sum whose terms cancel, if a value is that sum, scaled or cast."""
        if node is None:
            return None
        if node not in self._known:
            # Set before the recursion: a loop's carry reads itself.
            self._known[node] = None
            row = self._plan.row_of.get(node)
            if row is not None and self._cancels(row):
                self._known[node] = row
            elif row is None or self._plan.sites[row].operation in _PASS_ON:
                rows = (self.cancelled(n) for n in self._plan.reads[node])
                self._known[node] = next((row for row in rows if row is not None), None)
        return self._known[node]

    def _cancels(self, row: int) -> bool:
        size, terms = self._values[row][TOTAL_SIZE], self._values[row][TERMS]
        return self._plan.sites[row].operation == SUM and terms * self._eps > size * _CANCELS


def _modules(plan: RunPlan, errors: _Relative) -> list[Errors]:
    rows: dict[tuple[str, str, str], list[int]] = {}
    for row, site in enumerate(plan.sites):
        if site.phase not in ("argument", "constant", RECOMPUTED):
            line = "" if site.module else site.where
            rows.setdefault((site.module, site.phase, line), []).append(row)
    return sorted(
        (_errors(plan, errors, *key[:2], members) for key, members in rows.items()),
        key=lambda e: -e.local if np.isfinite(e.local) else -np.inf,
    )


def _errors(plan: RunPlan, errors: _Relative, module: str, phase: str, rows: list[int]) -> Errors:
    local = [errors.local(r) for r in rows]
    worst = rows[int(np.argmax(np.nan_to_num(local, nan=np.inf)))]
    return Errors(
        module,
        phase,
        local=float(max(local)),
        accumulated=errors.accumulated(rows[-1]),
        operation=plan.sites[worst].operation,
        where=plan.sites[worst].where,
        dtype=short_name(plan.sites[worst].dtype),
        operations=len(rows),
    )
