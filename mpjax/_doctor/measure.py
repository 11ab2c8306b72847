"""`measure`: the time, memory and error of a function under each policy, on the device at hand."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._autocast import autocast
from mpjax._base.errors import message
from mpjax._base.keywords import names_keywords
from mpjax._base.shown import Shown, html_table, size, table
from mpjax._base.tree import (
    all_finite,
    distance,
    is_array,
    is_array_or_shape,
    is_floating,
    is_inexact,
)
from mpjax._policies.order import is_policy
from mpjax._policies.policy import get_policy, shown_name
from mpjax._scaling.grad import get_loss_scale
from mpjax._scaling.loss_scale import NoOpLossScale, StaticLossScale
from mpjax._training.gradients import value_and_grad
from mpjax.numerics._program import check_function

POLICIES = ("32-true", "bf16-mixed", "16-mixed")
SAMPLES, LEAST_SAMPLES = 7, 3  # of each policy's time; fewer than the latter decide nothing
SAMPLE_SECONDS = 0.3  # of many steps, enqueued and waited for once: long beside a clock's error
LATE_SECONDS = 1.0  # for one more round after the budget, if samples are few
_SMALLER = 0.98  # of the memory: below this share a policy is worth it, though no faster
_HALVINGS = 24  # of a loss scale whose gradients overflow
_HEADERS = ("policy", "ms", "from … to", "x", "memory", "x", "loss off", "gradients off")


@dataclasses.dataclass(frozen=True)
class Timing:
    """One policy: times in seconds, bytes, relative errors; or why there are none."""

    policy: str
    samples: tuple[float, ...] = ()  # seconds of a step, in turns with the other policies
    memory: int = 0  # bytes of arguments, results and temporaries, as compiled
    loss_error: float = math.nan  # against the reference; of a function without loss, its value's
    gradient_error: float | None = None  # of all gradients together; None where there are none
    loss_scale: float = 1.0  # with which gradients are finite
    failure: str = ""

    @property
    def seconds(self) -> float:
        """The median of the samples."""
        return statistics.median(self.samples) if self.samples else math.nan


@dataclasses.dataclass(frozen=True, repr=False)
class Measurement(Shown):
    """The result of `measure`: a row a policy, the policy to take, and how sure that is."""

    function: str
    what: str  # 'value and gradient' or 'value'
    device: str
    reference: str  # the dtype that errors are relative to
    rows: tuple[Timing, ...]
    taken: str
    advice: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns all of it as dicts and lists, for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        body = table(_HEADERS, self._cells())
        return "\n".join([f"{self._title()}\n", body, "", *self._notes()])

    def _repr_html_(self) -> str:
        return html_table(self._title(), _HEADERS, self._cells(), self._notes())

    def _headline(self) -> str:
        return "; ".join([self._title(), *self.advice[:1]])

    def _title(self) -> str:
        return f"{self.function}: {self.what}, measured on {self.device}"

    def _notes(self) -> list[str]:
        failures = [f"{row.policy}: {row.failure}" for row in self.rows if row.failure]
        off = f"off: relative to {self.reference}. x: against {self.rows[0].policy}."
        return [off, *failures, *self.advice]

    def _cells(self) -> list[tuple[str, ...]]:
        return [_cells(row, self.rows[0]) for row in self.rows]


def _cells(row: Timing, base: Timing) -> tuple[str, ...]:
    if not row.samples:
        return (row.policy, *[""] * (len(_HEADERS) - 1))
    low, high = 1e3 * min(row.samples), 1e3 * max(row.samples)
    shares = [row.seconds / base.seconds, row.memory / base.memory if base.memory else math.nan]
    times, memory = ("" if math.isnan(share) else f"{share:.2f}" for share in shares)
    gradients = "" if row.gradient_error is None else f"{row.gradient_error:.1e}"
    time_ = (f"{1e3 * row.seconds:.3g}", f"{low:.3g} … {high:.3g}", times)
    return (row.policy, *time_, size(row.memory), memory, f"{row.loss_error:.1e}", gradients)


@names_keywords({"policy": "policies"}, "measure", behind="(params, batch)")
def measure(
    fun: Callable[..., Any],
    policies: Sequence[Any] = POLICIES,
    *,
    budget: float = 60.0,
    track: Callable[[Sequence[Any]], Iterator[Any]] = iter,
) -> Callable[..., Measurement]:
    """Returns a function that runs `fun` under each policy and says which one to take here.

    Each policy is compiled under `jit`, and times are taken in turns: many steps are enqueued and
    waited for once. A policy that fails, or for which memory is short, is a row that says so.

    Args:
      fun: a function of arrays. One that returns a floating scalar, alone or as the first of a
        pair, is a loss: it is differentiated by the arrays of its first argument.
      policies: whatever `get_policy` takes; the others are set beside the first.
      budget: seconds for all of it. What is not compiled by then is left out, and said.
      track: shows progress over the policies.

    Returns:
      A function of the arguments of `fun`, arrays, that returns a report: it prints as a table, and
      has `.rows`, `.taken`, `.advice` and `.to_dict()`.

    Raises:
      TypeError: `fun` is no function.
      ValueError: no policy, an unknown one, or a budget of no time; `fun` fails in the first one.

    Dtypes:
      Errors are relative to a run in float64 where 64-bit types are on, and otherwise in float32
      with products in full precision. float16 gets a loss scale with which gradients are finite.

    Transforms:
      None: it runs and waits.

    Example:
      >>> report = mpjax.measure(lambda w, x: jnp.mean((x @ w) ** 2), budget=5)(
      ...     jnp.ones((4, 2)), jnp.ones((8, 4))
      ... )
      >>> [row.policy for row in report.rows]
      ['32-true', 'bf16-mixed', '16-mixed']

    References:
      autocast
    """
    check_function(fun, "measure", "fun, policies")
    if is_policy(policies) or not isinstance(policies, Iterable) or not policies:
        fix = "Give a sequence, e.g. mpjax.measure(fun, ['32-true', 'bf16-mixed'])."
        raise ValueError(message("measure", f"policies={policies!r} is no list of policies.", fix))
    if not budget > 0:
        got = f"budget={budget!r} leaves no time."
        raise ValueError(message("measure", got, "Give seconds, e.g. budget=60."))
    named = {
        policy if isinstance(policy, str) else shown_name(get_policy(policy)): policy
        for policy in policies
    }
    for policy in policies:
        get_policy(policy)

    def measured(*args: Any) -> Measurement:
        return _measured(_Subject(fun, args), named, time.monotonic() + budget, track)

    return measured


def _measured(
    subject: _Subject, named: dict[str, Any], deadline: float, track: Callable[..., Any]
) -> Measurement:
    exact = subject.exact()
    ready: dict[str, Callable[[], Any]] = {}
    rows: dict[str, Timing] = {}
    for name in track(list(named)):
        if rows and time.monotonic() > deadline:
            rows[name] = Timing(name, failure="left out: the budget was spent")
            continue
        rows[name], run = _prepared(subject, name, named[name], exact)
        if run is not None:
            ready[name] = run
        elif len(rows) == 1:
            got = f"{subject.name} fails under {name!r}: {rows[name].failure}"
            fix = "Call it on these arguments first; give arrays, not shapes."
            raise ValueError(message("measure", got, fix))
    samples = _in_turns(ready, deadline)
    timings = tuple(dataclasses.replace(r, samples=samples.get(n, ())) for n, r in rows.items())
    device = jax.devices()[0].device_kind
    taken, advice = advise(timings)
    told = (subject.name, subject.what, device, subject.reference)
    return Measurement(*told, timings, taken, tuple(advice))


# -- programs ------------------------------------------------------------------------------------


def split(args: Sequence[Any]) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """Returns the arrays (or shapes) among the leaves, and a function that puts others there."""
    leaves, structure = jax.tree.flatten(tuple(args))
    is_traced = [is_array_or_shape(x) for x in leaves]

    def joined(arrays: Sequence[Any]) -> Any:
        values = iter(arrays)
        given = [next(values) if t else x for t, x in zip(is_traced, leaves, strict=True)]
        return structure.unflatten(given)

    return [x for t, x in zip(is_traced, leaves, strict=True) if t], joined


def of_numbers(fun: Callable[..., Any], args: Sequence[Any]) -> tuple[Callable[[Any], Any], Any]:
    """Returns `fun(*args)` as a function of the numbers of its first argument, and these numbers.

    The numbers are that argument with None for all that has no gradient: integers, and what a
    module of Equinox holds beside its arrays.
    """
    first, *rest = args
    numbers = jax.tree.map(lambda x: x if is_array(x) and is_inexact(x) else None, first)

    @functools.wraps(fun, updated=())
    def of_these(numbers: Any) -> Any:
        filled = jax.tree.map(lambda n, x: x if n is None else n, numbers, first, is_leaf=_is_none)
        return fun(filled, *rest)

    return of_these, numbers


def _is_none(x: Any) -> bool:
    return x is None


class _Subject:
    """A function with its arguments: whether it is a loss, and its exact results."""

    def __init__(self, fun: Callable[..., Any], args: Sequence[Any]) -> None:
        self.fun, self.name = fun, getattr(fun, "__name__", type(fun).__name__)
        self.arrays, self.joined = split(args)
        shapes = [x for x in self.arrays if isinstance(x, jax.ShapeDtypeStruct)]
        if shapes:
            got = f"{self.name} cannot run on a shape: {shapes[0]}."
            raise ValueError(message("measure", got, "Give arrays; explain takes shapes."))
        try:
            out = jax.eval_shape(lambda arrays: fun(*self.joined(arrays)), self.arrays)
        except Exception as error:  # whatever the function raises
            got = f"{self.name} fails on these arguments: {_reason(error)}"
            fix = "Check them, and that it can be jitted; it returns arrays or trees of them."
            raise ValueError(message("measure", got, fix)) from error
        self.has_aux = isinstance(out, tuple) and len(out) == 2
        loss: Any = out[0] if self.has_aux else out
        floats = [x for x in jax.tree.leaves(args[:1]) if is_floating(x)]
        is_scalar = getattr(loss, "shape", None) == () and jnp.issubdtype(loss.dtype, jnp.floating)
        self.is_loss = bool(is_scalar and floats)
        self.what = "value and gradient" if self.is_loss else "value"
        self.reference = "float64" if jax.config.read("jax_enable_x64") else "float32"

    def step(self, fun: Callable[..., Any]) -> Callable[[Any, Any], tuple[Any, Any]]:
        """Returns a function that gives the loss, or value, and the gradients, unscaled.

        Its arguments are the arrays and the loss scale, None for no scaling.
        """
        if not self.is_loss:
            return lambda arrays, scale: (fun(*self.joined(arrays)), ())

        def differentiated(arrays: Any, scale: Any) -> tuple[Any, Any]:
            loss_scale = NoOpLossScale() if scale is None else StaticLossScale(scale)
            options: Any = {"has_aux": self.has_aux, "loss_scale": loss_scale}
            of_these, numbers = of_numbers(fun, self.joined(arrays))
            value, grads = value_and_grad(of_these, **options)(numbers)
            return (value[0] if self.has_aux else value), jax.tree.leaves(grads)

        return differentiated

    def exact(self) -> tuple[list[Any], list[Any]]:
        """Returns the leaves of value and gradients, computed in the reference dtype."""
        wide = [
            x.astype(self.reference) if is_floating(x) else x for x in map(jnp.asarray, self.arrays)
        ]
        with jax.default_matmul_precision("highest"):
            return _numbers(jax.jit(self.step(self.fun))(wide, None))


def _numbers(value_and_grads: tuple[Any, Any]) -> tuple[list[Any], list[Any]]:
    """Returns the floating leaves of both, in float64 on the host."""
    value, grads = (
        [np.asarray(x, np.float64) for x in jax.tree.leaves(tree) if is_floating(x)]
        for tree in value_and_grads
    )
    return value, grads


def _prepared(subject: _Subject, name: str, policy: Any, exact: Any) -> tuple[Timing, Any]:
    """Returns the row of a policy without its times, and its program; None for one that fails."""
    fast = autocast(subject.fun, policy)
    start = float(get_loss_scale(policy).loss_scale) if subject.is_loss else 1.0
    scale = None if start == 1 else jnp.float32(start)
    try:
        program = jax.jit(subject.step(fast)).lower(subject.arrays, scale).compile()
        outputs = program(subject.arrays, scale)
        for _ in range(_HALVINGS):
            if scale is None or all_finite(outputs[1]):
                break
            scale = scale / 2  # as dynamic scaling does when a step overflows
            outputs = program(subject.arrays, scale)
        value, grads = _numbers(outputs)
    except Exception as error:  # noqa: BLE001 - what one policy raises is a row; of the first, an error
        return Timing(name, failure=_reason(error)), None
    memory: Any = program.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    gradient_error = _distance(grads, exact[1]) if subject.is_loss else None
    taken = 1.0 if scale is None else float(scale)
    row = Timing(name, (), held, _distance(value, exact[0]), gradient_error, taken)
    return row, functools.partial(program, subject.arrays, scale)


def _reason(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}"
    if "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower():
        return "out of memory"
    return text.strip().partition("\n")[0][:200]


def _distance(leaves: list[Any], exact: list[Any]) -> float:
    """Returns the relative error of all leaves together, in the L2 norm."""
    off, whole = distance(leaves, exact)
    return off / whole if whole else off


def _in_turns(ready: dict[str, Any], deadline: float) -> dict[str, tuple[float, ...]]:
    """Returns the seconds of a step of each program, sample by sample."""
    steps = {}
    share = max(deadline - time.monotonic(), 0.0) / (max(len(ready), 1) * (SAMPLES + 1))
    for name, program in ready.items():
        # The first run warms up, and does not count.
        _timed(program, 1)
        each = max(_timed(program, 2), 1e-6)
        steps[name] = max(1, math.ceil(min(SAMPLE_SECONDS, share) / each))
    samples: dict[str, list[float]] = {name: [] for name in ready}
    took = 0.0
    for turn in range(SAMPLES):
        began = time.monotonic()
        is_late = began > deadline
        if is_late and (turn >= LEAST_SAMPLES or (turn and took > LATE_SECONDS)):
            break
        for name, program in ready.items():
            samples[name].append(_timed(program, steps[name]))
        took = time.monotonic() - began
    return {name: tuple(times) for name, times in samples.items()}


def _timed(program: Callable[[], Any], steps: int) -> float:
    started = time.perf_counter()
    out: Any = None
    for _ in range(steps):
        out = program()
    jax.block_until_ready(out)
    return (time.perf_counter() - started) / steps


# -- advice --------------------------------------------------------------------------------------


def advise(rows: Sequence[Timing]) -> tuple[str, list[str]]:
    """Returns the policy to take, and why: the faster one if all rounds agree, else by memory."""
    base = rows[0]
    usable = [row for row in rows if row.samples and _is_usable(row)]
    lost = [row for row in rows if row.samples and not _is_usable(row)]
    notes = [f"{row.policy!r} gives inf or NaN on these arguments." for row in lost]
    others = [row for row in usable if row is not base]
    if not others:
        return base.policy, [*notes, f"Nothing else to take: stay with {base.policy!r}."]
    if min(len(row.samples) for row in usable) < LEAST_SAMPLES:
        got = f"Not sure: fewer than {LEAST_SAMPLES} samples were taken in this time."
        return base.policy, [*notes, f"{got} Give a larger budget."]
    best = min(usable, key=lambda row: row.seconds)
    alike = [row for row in usable if are_equal(row, best)]
    chosen = min(alike, key=lambda row: (row.memory, row is not base))
    if chosen is not base and not are_equal(chosen, base):
        return chosen.policy, [*_faster(chosen, base), *_needs(chosen), *notes]
    if chosen is not base and chosen.memory < _SMALLER * base.memory:
        less = 1 - chosen.memory / base.memory
        got = f"Take {chosen.policy!r} for memory, {less:.0%} less: in time they are equal here."
        return chosen.policy, [got, *_needs(chosen), *notes]
    return base.policy, [f"Stay with {base.policy!r}: none is faster here.", *notes]


def _faster(row: Timing, base: Timing) -> list[str]:
    times = statistics.median(b / r for r, b in zip(row.samples, base.samples, strict=False))
    rounds = min(len(row.samples), len(base.samples))
    won = _wins(row, base)
    return [f"Take {row.policy!r}: {times:.2f} times as fast, faster in {won} of {rounds} rounds."]


def _needs(row: Timing) -> list[str]:
    if get_policy(row.policy).compute_dtype != jnp.float16:
        return []
    return [f"It needs a loss scale ({row.loss_scale:g} was taken): mpjax.make_train_step."]


def _is_usable(row: Timing) -> bool:
    return math.isfinite(row.loss_error) and math.isfinite(row.gradient_error or 0.0)


def are_equal(a: Timing, b: Timing) -> bool:
    """Returns whether neither is faster in all rounds, or in all but one of seven.

    A round takes a sample of each, so that other work of the machine slows both alike.
    """
    rounds = min(len(a.samples), len(b.samples))
    return max(_wins(a, b), _wins(b, a)) < rounds - rounds // SAMPLES


def _wins(a: Timing, b: Timing) -> int:
    return sum(x < y for x, y in zip(a.samples, b.samples, strict=False))
