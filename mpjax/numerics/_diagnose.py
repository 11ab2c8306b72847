"""`diagnose`: the operation that made an inf or NaN, its way to the loss, and the fix."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._base.dtypes import short_name
from mpjax._base.errors import PolicyWarning, message
from mpjax._base.foreign_keywords import DIAGNOSIS
from mpjax._base.keywords import names_keywords
from mpjax._base.tree import distance, is_array, leaves_finite
from mpjax._base.typing import PolicySpec
from mpjax._jaxpr.op_rules import PRODUCTS
from mpjax._policies.policy import get_policy, shown_name
from mpjax.numerics import _cause, _subject
from mpjax.numerics._advice import Compared
from mpjax.numerics._clock import Clock, Progress
from mpjax.numerics._follow import Followed, follow, when
from mpjax.numerics._overflow import AMAX, INF, NAN, Overflow
from mpjax.numerics._plan import MeasuredSite, RunPlan
from mpjax.numerics._program import LossProgram, TwinRun, argument_names, check_alive
from mpjax.numerics._report import Report, Row
from mpjax.numerics._subject import Subject
from mpjax.numerics._unscaled import judged


@names_keywords(DIAGNOSIS, "numerics.diagnose", behind="(params, batch)")
def diagnose(
    loss_fn: Callable[..., Any],
    policy: PolicySpec = None,
    *,
    loss_scale: Any = None,
    has_aux: bool = False,
    grads: Any = None,
    progress: Progress = None,
) -> Callable[..., Report]:
    """Returns a function that finds the operation that made the first inf or NaN, and why.

    It runs value and gradients of `loss_fn` under `policy` once more, as a step does, and counts
    the infs and NaNs of each operation. It stores no intermediate array, so it works at full size,
    sharded too. A skipped step leaves everything as it was, so this is the computation of that
    step.

    Args:
      loss_fn: `loss_fn(params, *batch) -> loss`, differentiated by its first argument.
      policy: whatever `get_policy` takes; the program is that of `mpjax.autocast`.
      loss_scale: the step's loss scale, a number or an object (`metrics["loss_scale"]`); None for
        the policy's own.
      has_aux: whether `loss_fn` returns `(loss, aux)`.
      grads: the gradients that a step of your own gave an optimizer in `with_loss_scale`. The
        report then says whether they were taken without the scale, which would stop training.
      progress: whether lines on stderr say what is running; None for yes in a terminal and in a
        notebook. A function is given each line.

    Returns:
      A function of the arguments of `loss_fn` that returns a `Report`. `print(report)` fits a
      screen. `.first` holds the operations that made an inf or NaN from finite operands, `.rows`
      holds all operations. `.cause` says why, and what to type.

    Raises:
      TypeError: `loss_fn` cannot be traced, or an argument is.
      ValueError: an argument was donated to a step, or `grads` have other shapes than parameters.

    Dtypes:
      Those of the step. Counts are taken on the bits of each value, in the dtype that it has.

    Transforms:
      None: it is for people. What `loss_fn` does inside may be any of JAX's.

    Example:
      >>> loss = lambda w, x: jnp.sum(jnp.square(x @ w))
      >>> report = mpjax.numerics.diagnose(loss, "16-mixed")(
      ...     jnp.full((8, 4), 200.0), jnp.full((2, 8), 60.0)
      ... )
      >>> report.first[0].operation, report.first[0].dtype, report.cause.kind
      ('dot_general', 'f16', 'range')

    References:
      Micikevicius et al., Mixed Precision Training, 2018, https://arxiv.org/abs/1710.03740
    """
    where = "numerics.diagnose"
    subject, scale = _subject.of_loss(loss_fn, policy, loss_scale, has_aux=has_aux, where=where)
    Clock(where, progress)  # a mistake is said here

    def run(*args: Any) -> Report:
        names, clock = argument_names(loss_fn, len(args)), Clock(where, progress)
        report = examine(subject, names, args, scale.loss_scale, clock)
        if grads is None:
            return report
        program = _program(subject, subject.policy, ["loss_scale", *names], args, clock)
        return judged(report, program, [jnp.float32(scale.loss_scale), *args], grads, where)

    return run


def diagnose_step(
    subject: Subject,
    names: Sequence[str],
    args: Sequence[Any],
    loss_scale: Any,
    metrics: Mapping[str, Any] | None,
    progress: Progress,
) -> Report:
    """Returns the report of a train step's state and batch; `metrics` are those of a step."""
    clock = Clock(subject.where, progress)
    if metrics is None:
        return examine(subject, names, args, loss_scale, clock)
    _check_metrics(metrics, subject.where)
    report = examine(subject, names, args, metrics["loss_scale"], clock)
    if bool(metrics["grads_finite"]):
        return report  # the step was not skipped: its state is not the one that it started from
    loss, same = float(metrics["loss"]), True
    if np.isfinite(loss) and np.isfinite(report.loss):
        same = abs(loss - report.loss) <= 0.02 * max(abs(loss), abs(report.loss), 1e-3)
    if not report.finite and same:
        return report
    got = f"the metrics are of another step: they say loss {loss:.6g} and a step that was skipped; "
    got += f"this state and batch give loss {report.loss:.6g}"
    got += " and finite gradients." if report.finite else "."
    fix = "Pass the batch and the metrics of the step that skipped, and the state it returned:"
    raise ValueError(message(subject.where, got, fix, "step.diagnose(state, batch, metrics)."))


def _check_metrics(metrics: Any, where: str) -> None:
    wanted = ("loss", "loss_scale", "grads_finite")
    if isinstance(metrics, Mapping) and all(name in metrics for name in wanted):
        return
    got = f"metrics must be those that the step returned; got {type(metrics).__name__}"
    got += f" with {sorted(metrics)}." if isinstance(metrics, Mapping) else "."
    fix = "Type state, metrics = step(state, batch), then step.diagnose(state, batch, metrics)."
    raise TypeError(message(where, got, fix))


def examine(
    subject: Subject, names: Sequence[str], args: Sequence[Any], loss_scale: Any, clock: Clock
) -> Report:
    """Returns the report of a subject on arguments."""
    check_alive(args, names, subject.where)
    names = ["loss_scale", *names]
    program = _program(subject, subject.policy, names, args, clock)
    used = float(loss_scale)

    twin_run = program.read(Overflow(), [jnp.float32(used), *args])
    bad_outputs = [not ok for ok in twin_run.finite]
    followed = follow(program.plan, twin_run.values, twin_run.index, bad_outputs)
    rows = _rows(program.plan, twin_run, followed)
    again = _again(subject, program, names, args, used, clock)
    cause = _cause.decide(subject, program.plan, twin_run, followed, rows, used, again)
    ordered = sorted(rows, key=lambda r: when(program.plan.sites[r], r, twin_run.index[r]))
    bad = [p for p, ok in zip(program.gradient_paths, twin_run.finite[1:], strict=True) if not ok]
    return Report(
        function=subject.name,
        policy=shown_name(subject.policy),
        loss_scale=used if subject.scaled else 1.0,
        loss=twin_run.loss,
        bad_gradients=tuple(bad),
        gradients=len(program.gradient_paths),
        rows=tuple(rows[r] for r in ordered),
        first=tuple(rows[r] for r in followed.born),
        leaves=tuple(rows[r] for r in followed.leaves),
        cause=cause,
        seconds=dict(clock.seconds),
    )


def _again(
    subject: Subject,
    program: LossProgram,
    names: Sequence[str],
    args: Sequence[Any],
    used: float,
    clock: Clock,
) -> _cause.Again:
    """Returns the further runs that a cause is tested with."""

    @functools.cache
    def in_float32() -> LossProgram:
        given = [jnp.float32(1), *args]
        return LossProgram(subject.make(_cause.FLOAT32), given, names, subject.where, clock)

    @functools.cache
    def exact() -> list[Any]:
        return in_float32().outputs([jnp.float32(1), *args])

    def compared(policy: Any) -> Compared:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PolicyWarning)  # of a policy that is only tried
            other = _program(subject, get_policy(policy), names, args, clock)

        def at(scale: float) -> Compared:
            return _compared(other.outputs([jnp.float32(scale), *args]), exact())

        seen = at(used if subject.scaled else 1.0)
        for lower in (2.0**10, 1.0) if subject.scaled else ():  # a dynamic scale would get there
            if seen.agrees:
                break
            seen = at(lower)
        return seen

    return _cause.Again(
        read=lambda factor: program.read(Overflow(), [jnp.float32(factor), *args]),
        finite_in_float32=lambda: bool(np.all(np.asarray(leaves_finite(exact())))),
        written=lambda row: _is_written(in_float32(), row),
        rounded_before=lambda row: _rounded_before(in_float32().plan, row),
        operand=lambda number: _narrow_operand(program.plan, number),
        compared=compared,
    )


def _program(
    subject: Subject, policy: Any, names: Sequence[str], args: Sequence[Any], clock: Clock
) -> LossProgram:
    """Returns the program for the types of these arguments, traced once."""
    given = [jnp.float32(1), *args]
    leaves, treedef = jax.tree.flatten(given)
    types = tuple(jax.typeof(x) if is_array(x) else id(x) for x in leaves)
    # Leaves that are no arrays are constants of the program, so they count by identity.
    key = (policy, treedef, types)
    if key not in subject.programs:
        made = LossProgram(subject.make(policy), given, names, subject.where, clock)
        subject.programs[key] = made
    subject.programs[key].clock = clock
    return subject.programs[key]


def _is_written(program: LossProgram, row: Row) -> bool:
    """Returns whether the function asks for the dtype of an operation, whatever the policy.

    The float32 program is traced for that, and not run.
    """
    sites = program.plan.sites
    operations = {(s.operation, s.where, s.phase, short_name(s.dtype)) for s in sites}
    return (row.operation, row.where, row.phase, row.dtype) in operations


def _rounded_before(plan: RunPlan, row: Row) -> str:
    """Returns the line at which a program rounds an operand after the last product; "" if none.

    The float32 program is walked for that: a cast to 16 bits in it is the function's own.
    """
    places = [n for n, r in plan.row_of.items() if _is_row(plan.sites[r], row)]
    seen = set(places)
    while places:
        for node in plan.reads[places.pop()]:
            site = plan.sites[plan.row_of[node]] if node in plan.row_of else None
            if site is not None and _cause.is_narrow(site.dtype):
                return f"to {short_name(site.dtype)} by {site.operation}, {site.where}"
            if node not in seen and (site is None or site.operation not in PRODUCTS):
                seen.add(node)
                places.append(node)
    return ""


def _narrow_operand(plan: RunPlan, number: int) -> int | None:
    """Returns the row of the value of 16 bits that an operation reads, None where there is none."""
    (node,) = (n for n, r in plan.row_of.items() if r == number)
    rows = [plan.row_of[n] for n in plan.reads[node] if n in plan.row_of]
    narrow = [r for r in rows if _cause.is_narrow(plan.sites[r].dtype)]
    return next((r for r in narrow if plan.sites[r].phase not in ("argument", "constant")), None)


def _is_row(site: MeasuredSite, row: Row) -> bool:
    return (site.operation, site.where, site.phase) == (row.operation, row.where, row.phase)


def _compared(outputs: Sequence[Any], exact: Sequence[Any]) -> Compared:
    """Returns a loss and its gradients beside those of float32."""
    (loss, *grads), (wanted, *exact_grads) = (
        [np.asarray(x).astype(np.complex128) for x in outs] for outs in (outputs, exact)
    )
    with np.errstate(all="ignore"):  # inf - inf is NaN, which agrees with nothing
        off, whole = distance(grads, exact_grads)
    error = off / whole if whole else float(off > 0)
    return Compared(float(loss.real), float(wanted.real), error)


def _rows(plan: RunPlan, read: TwinRun, followed: Followed) -> dict[int, Row]:
    """Returns every row, by its number."""
    parts = (
        ("born here", followed.born),
        ("born of inf", followed.turned),
        ("inherited", followed.inherited),
        ("came in", followed.leaves),
        ("apart", followed.apart),
    )
    origin = {row: word for word, rows in parts for row in rows}
    return {row: _row(plan, read, row, origin.get(row, "")) for row in range(len(plan.sites))}


def _row(plan: RunPlan, read: TwinRun, number: int, origin: str) -> Row:
    site, values = plan.sites[number], read.values[number]
    kinds = [level.kind for level in site.levels]
    index = read.index[number].tolist()
    numbers = [(k, i) for k, i in zip(kinds, index, strict=False) if i >= 0]
    amax = float(values[AMAX])
    return Row(
        module=site.module,
        operation=site.operation,
        where=site.where,
        phase=site.phase,
        dtype=short_name(site.dtype),
        shape=tuple(site.shape),
        inf=int(values[INF]),
        nan=int(values[NAN]),
        amax=amax,
        headroom=headroom(site.dtype, amax),
        origin=origin,
        iteration=tuple(i for k, i in numbers if k != "shard_map"),
        shard=next((i for k, i in numbers if k == "shard_map"), None),
        branch=site.branch,
        library=site.library,
    )


def headroom(dtype: Any, amax: float) -> float:
    """Returns the bits between a magnitude and the largest number of a dtype."""
    if amax == 0:
        return float("inf")
    return float(np.log2(float(jnp.finfo(dtype).max)) - np.log2(amax))
