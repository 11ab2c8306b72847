"""`suggest`: which modules have to stay in float32, for gradients within a tolerance."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from mpjax._base.dtypes import FLOAT32, short_name
from mpjax._base.errors import message
from mpjax._base.foreign_keywords import DIAGNOSIS
from mpjax._base.keywords import names_keywords
from mpjax._base.shown import Shown, Table
from mpjax._base.typing import PolicySpec
from mpjax._policies.policy import Policy, get_policy
from mpjax._policies.policy_map import PolicyMap
from mpjax._policies.quantized_policy import QuantizedPolicy
from mpjax.numerics import _subject
from mpjax.numerics._clock import Clock, Progress, spent
from mpjax.numerics._compare import compared
from mpjax.numerics._program import argument_names, check_alive
from mpjax.numerics._search import Choice, Search, Tried

_WHERE = "numerics.suggest"


@dataclasses.dataclass(frozen=True, repr=False)
class Suggestion(Shown):
    """The result of `suggest`: use `.policy`; every error in it was measured."""

    function: str
    policy: PolicyMap
    tolerance: float
    error: float  # of the gradients under `policy`, relative, of the worst leaf
    full: tuple[str, ...]  # modules that stay in float32, with all below them
    low: tuple[str, ...]  # modules that may go low
    bytes: dict[str, int]
    """The bytes that a module in float32 adds for the backward pass; with `reverse`, the bytes that
    a low module saves."""
    kept: dict[str, int]  # bytes kept for the backward pass: 'float32', 'low' and 'suggested'
    noise: tuple[str, ...]  # gradients that are rounding in float32 too, and were left out
    reverse: bool
    tried: tuple[Tried, ...]  # in the order in which they were run
    seconds: dict[str, float] = dataclasses.field(default_factory=dict[str, float], compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Returns all of it as plain values, for JSON."""
        return {
            **{f.name: getattr(self, f.name) for f in dataclasses.fields(self)},
            "policy": self.policy.to_dict(),
            "tried": [dataclasses.asdict(t) for t in self.tried],
        }

    def _headline(self) -> str:
        count = "no module" if not self.full else f"{len(self.full)} modules"
        return f"{self.function}: {count} in float32 for gradients within {self.error:.1e}"

    def _blocks(self) -> list[str | Table]:
        title = f"{self.function}: gradients within {self.error:.1e} of float32 "
        title += f"(asked for {self.tolerance:.1e}), measured with"
        rows = _table(self.low, "may go low", "bytes kept less", self.bytes)
        rest = f"in float32: {_named(self.full)}"
        if not self.reverse:
            rows = _table(self.full, "in float32", "bytes kept more", self.bytes)
            rest = f"in low precision: {_named(self.low)}"
        kept = ", ".join(f"{name} {count}" for name, count in self.kept.items())
        blocks = [title, f"  {self.policy!r}", rows, f"{rest}\nbytes kept in all: {kept}"]
        if self.noise:
            blocks.append(f"left out, for they are rounding in float32 too: {_named(self.noise)}")
        run = f"{len(self.tried)} policies run"
        return [*blocks, f"{run}; {spent(self.seconds)}" if self.seconds else run]


def _table(modules: Sequence[str], title: str, what: str, cost: dict[str, int]) -> str | Table:
    if not modules:
        return f"{title}: nothing"
    return Table((title, what), [(m, f"{cost.get(m, 0)}") for m in modules[:20]])


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"{', '.join(names[:8]) or 'nothing'}{more}"


@names_keywords(DIAGNOSIS, "numerics.suggest", behind="(params, batch)")
def suggest(
    loss_fn: Callable[..., Any],
    policy: PolicySpec = None,
    *,
    tolerance: float | None = None,
    reverse: bool = False,
    loss_scale: Any = None,
    has_aux: bool = False,
    progress: Progress = None,
) -> Callable[..., Suggestion]:
    """Returns a function that finds the fewest modules to run in float32 for a tolerance.

    It ranks modules by their local errors (`compare`), finds by bisection how many of that order
    are enough, and then drops each module that is not needed. It runs every policy that it tries.

    A gradient that is 0 but for rounding has no correct digits in float32 either; that of the bias
    of an attention's keys is one. It is recognised by a test: a change of the last bit of every
    other parameter moves it by more than the tolerance. Such gradients do not count, and are listed
    in `.noise`.

    Args:
      loss_fn: `loss_fn(params, *batch) -> loss`, differentiated by its first argument; it names its
        modules, as Flax's do, or `jax.named_scope`.
      policy: the policy of the modules that are not in float32, as 'bf16-mixed'.
      tolerance: relative error of each gradient leaf against float32, in the L1 norm, as a
        fraction: 0.01 for one percent.
      reverse: find the modules of a float32 model that may go low. The map is then "float32" with
        rules for modules that take `policy`; operations without a name stay in float32.
      loss_scale: the loss scale for the gradients; None for the policy's own.
      has_aux: whether `loss_fn` returns `(loss, aux)`.
      progress: whether lines on stderr say what is running; None for yes in a terminal and in a
        notebook. A function is given each line.

    Returns:
      A function of the arguments of `loss_fn` that returns a `Suggestion`.

    Raises:
      ValueError: `policy` has nothing low; the tolerance is no fraction, is below what float32
        itself reaches, or is missed with every named module in float32.
      TypeError: as `diagnose`.

    Dtypes:
      The reference is everything in float32.

    Transforms:
      None: it is for people.

    Example:
      >>> def loss(w, x):
      ...     with jax.named_scope("layer"):
      ...         return jnp.sum(jnp.tanh(x @ w))
      >>> suggestion = mpjax.numerics.suggest(loss, "bf16-mixed", tolerance=1e-4)(
      ...     jnp.eye(4) / 3, jnp.ones((2, 4))
      ... )
      >>> suggestion.full
      ('layer',)

    References:
      compare
    """
    tolerance = _checked(tolerance)
    Clock(_WHERE, progress)  # a mistake is said here
    low_policy = _low_policy(policy)
    subject, scale = _subject.of_loss(
        loss_fn, low_policy, loss_scale, has_aux=has_aux, where=_WHERE
    )

    def run(*args: Any) -> Suggestion:
        names = argument_names(loss_fn, len(args))
        check_alive(args, names, _WHERE)
        given, clock = [jnp.float32(float(scale.loss_scale)), *args], Clock(_WHERE, progress)
        errors = ranked_by(*args, clock=clock)
        ranked = list(dict.fromkeys(e.module for e in errors.modules if e.module and e.local > 0))
        choice = Choice(low_policy, tuple(ranked), reverse)
        search = Search(subject, choice, given, ["loss_scale", *names], tolerance, clock)
        full = search.confirmed(ranked)

        def kept(under: Any) -> int:
            return _subject.bytes_kept(loss_fn, under, args[0], args[1:], has_aux=has_aux)

        with clock("counting bytes"):
            total, cost = _costs(kept, choice, full)
        return _suggestion(subject.name, search, full, cost, total)

    ranked_by = compared(loss_fn, low_policy, "float32", loss_scale, has_aux=has_aux, where=_WHERE)
    return run


def _suggestion(
    name: str,
    search: Search,
    full: tuple[str, ...],
    cost: dict[str, int],
    total: dict[str, int],
) -> Suggestion:
    return Suggestion(
        function=name,
        policy=search.choice.policy(full),
        tolerance=search.tolerance,
        error=search.error(full, compiled=True),
        full=full,
        low=search.choice.low(full),
        bytes=cost,
        kept=total,
        noise=search.noise,
        reverse=search.choice.reverse,
        tried=tuple(search.tried),
        seconds=dict(search.clock.seconds),
    )


def _costs(
    kept: Callable[[Any], int], choice: Choice, full: Sequence[str]
) -> tuple[dict[str, int], dict[str, int]]:
    """Returns the bytes kept in all, and by module what its choice adds or saves."""
    total = {"float32": kept(get_policy("float32")), "low": kept(choice.policy_low)}
    total["suggested"] = kept(choice.policy(full))
    if choice.reverse:
        raised = {m: choice.policy([*full, m]) for m in choice.low(full)}
        return total, {m: kept(policy) - total["suggested"] for m, policy in raised.items()}
    lowered = {m: choice.policy([other for other in full if other != m]) for m in full}
    return total, {m: total["suggested"] - kept(policy) for m, policy in lowered.items()}


def _low_policy(policy: Any) -> Policy:
    """Returns the policy of the modules that are not kept in float32."""
    low = get_policy(policy)
    if not isinstance(low, Policy):
        got = "got a PolicyMap, and it makes one."
        raise TypeError(message(_WHERE, got, "Give the policy of what is not kept in float32."))
    if low.compute_dtype.itemsize >= 4 and not isinstance(low, QuantizedPolicy):
        got = f"{low} computes in {short_name(low.compute_dtype)}: nothing is low in it."
        fix = "Give the policy of what is not kept in float32, 'bf16-mixed'; for a float32 model, "
        raise ValueError(message(_WHERE, got, fix + "what may go low, reverse=True beside it."))
    return low


def _checked(tolerance: Any) -> float:
    number = isinstance(tolerance, (int, float)) and not isinstance(tolerance, bool)
    least = float(jnp.finfo(FLOAT32).eps)
    if number and least <= tolerance < 1:
        return tolerance
    if number and math.isfinite(tolerance) and tolerance >= 1:
        got = f"must be a fraction below 1; got {tolerance!r}, which is {tolerance:.0%}."
        fix = f"For {tolerance:g} percent of each gradient, type tolerance={tolerance / 100:g}."
        raise ValueError(message(f"{_WHERE}(tolerance)", got, fix))
    got = f"must be a number of at least {least:.1e}, what float32 itself rounds; got "
    fix = "Type, for example, tolerance=0.01: one percent of each gradient."
    raise ValueError(message(f"{_WHERE}(tolerance)", f"{got}{tolerance!r}.", fix))
