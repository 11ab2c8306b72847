"""`suggest`: the fewest modules in float32 with which gradients stay within a tolerance."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from mpjax._dtypes import FLOAT32
from mpjax._errors import message
from mpjax._policy import Policy, get_policy
from mpjax._policy_map import PolicyMap
from mpjax.numerics import _subject
from mpjax.numerics._compare import compare
from mpjax.numerics._program import Program, argument_names, check_alive
from mpjax.numerics._report import table

_WHERE = "numerics.suggest"


@dataclasses.dataclass(frozen=True)
class Tried:
    """One policy that was run: which modules were in float32, and the error that was measured."""

    full: tuple[str, ...]
    error: float


@dataclasses.dataclass(frozen=True)
class Suggestion:
    """What `suggest` found: `.policy` is the one to use; every error in it was measured."""

    function: str
    policy: PolicyMap
    tolerance: float
    error: float  # of the gradients under `policy`, relative, of the worst leaf
    full: tuple[str, ...]  # modules that stay in float32
    low: tuple[str, ...]  # modules that may go low
    bytes: dict[str, int]  # by module in float32: what is kept more for the backward pass
    tried: tuple[Tried, ...]  # in the order in which they were run

    def to_dict(self) -> dict[str, Any]:
        """Returns all of it as plain values, for JSON."""
        return {
            **{f.name: getattr(self, f.name) for f in dataclasses.fields(self)},
            "policy": self.policy.to_dict(),
            "tried": [dataclasses.asdict(t) for t in self.tried],
        }

    def __str__(self) -> str:
        title = f"{self.function}: gradients within {self.error:.1e} of float32 "
        title += f"(asked for {self.tolerance:.1e}), measured with"
        cells = [(m, f"{self.bytes.get(m, 0)}") for m in self.full[:20]]
        rows = (
            table(("in float32", "bytes kept more"), cells) if cells else "nothing kept in float32"
        )
        low = f"in low precision: {', '.join(self.low[:8]) or 'nothing'}"
        low += f" and {len(self.low) - 8} more" if len(self.low) > 8 else ""
        return f"{title}\n\n  {self.policy!r}\n\n{rows}\n\n{low}\n{len(self.tried)} policies run"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def suggest(
    loss_fn: Callable[..., Any],
    policy: Any = None,
    *,
    tolerance: float,
    loss_scale: Any = None,
    has_aux: bool = False,
) -> Callable[..., Suggestion]:
    """Returns a function that finds which modules to keep in float32 for a tolerance on gradients.

    Modules are ranked by their local errors (`compare`); the fewest of that order that suffice are
    found by bisection, then each is dropped that is not needed. Every policy on the way is run.
    What is not kept is what may go low, which is the answer for a float32 model.

    Args:
      loss_fn: `loss_fn(params, *batch) -> loss`, differentiated by its first argument; it names its
        modules, as Flax's do, or `jax.named_scope`.
      policy: of what is not kept in float32, as 'bf16-mixed'.
      tolerance: relative error of each gradient leaf against float32, in the L1 norm.
      loss_scale: with which gradients are computed; None for what the policy needs.
      has_aux: whether `loss_fn` returns `(loss, aux)`.

    Returns:
      A function of the arguments of `loss_fn` that returns a `Suggestion`.

    Raises:
      ValueError: the tolerance is not positive, is below what float32 itself reaches, or is missed
        with every named module in float32.
      TypeError: as `diagnose`.

    Dtypes:
      The reference is everything in float32.

    Transforms:
      None: it is for people.

    Example:
      >>> def loss(w, x):
      ...     with jax.named_scope("layer"):
      ...         return jnp.sum(jnp.tanh(x @ w))
      >>> found = mpjax.numerics.suggest(loss, "bf16-mixed", tolerance=1e-4)(
      ...     jnp.eye(4) / 3, jnp.ones((2, 4))
      ... )
      >>> found.full
      ('layer',)

    References:
      compare
    """
    _check(tolerance)
    found = get_policy(policy)
    if not isinstance(found, Policy):
        got = "got a PolicyMap, and it makes one."
        raise TypeError(message(_WHERE, got, "Give the policy of what is not kept in float32."))
    subject, scale = _subject.of_loss(loss_fn, found, loss_scale, has_aux=has_aux, where=_WHERE)

    def run(*args: Any) -> Suggestion:
        names = argument_names(loss_fn, len(args))
        check_alive(args, names, _WHERE)
        given = [jnp.float32(float(scale.loss_scale)), *args]
        compared = compare(loss_fn, found, loss_scale=loss_scale, has_aux=has_aux)(*args)
        ranked = list(dict.fromkeys(e.module for e in compared.modules if e.module and e.local > 0))
        search = _Search(subject, found, given, ["loss_scale", *names], tolerance)
        full = search.fewest(ranked)
        low = tuple(m for m in ranked if m not in full)
        error = search.error(full)

        def kept(modules: Sequence[str]) -> int:
            policy = search.policy(modules)
            return _subject.bytes_kept(loss_fn, policy, args[0], args[1:], has_aux=has_aux)

        cost = {m: kept(full) - kept([other for other in full if other != m]) for m in full}
        return Suggestion(
            subject.name,
            search.policy(full),
            tolerance,
            error,
            tuple(full),
            low,
            cost,
            tuple(search.tried),
        )

    return run


def _check(tolerance: Any) -> None:
    number = isinstance(tolerance, (int, float)) and not isinstance(tolerance, bool)
    least = float(jnp.finfo(FLOAT32).eps)
    if number and math.isfinite(tolerance) and tolerance >= least:
        return
    got = f"must be a number of at least {least:.1e}, what float32 itself rounds; got "
    fix = "Type, for example, tolerance=0.01: one percent of each gradient."
    raise ValueError(message(f"{_WHERE}(tolerance)", f"{got}{tolerance!r}.", fix))


class _Search:
    """Runs policies, and remembers what they gave."""

    def __init__(
        self,
        subject: Any,
        low: Policy,
        given: Sequence[Any],
        names: Sequence[str],
        tolerance: float,
    ) -> None:
        self.subject, self.low, self.given, self.names = subject, low, given, names
        self.tolerance = tolerance
        self.tried: list[Tried] = []
        self.reference = self._gradients(get_policy("float32"))

    def policy(self, full: Sequence[str]) -> PolicyMap:
        return PolicyMap(self.low, dict.fromkeys(full, "float32"))

    def _program(self, policy: Any) -> Program:
        return Program(self.subject.make(policy), self.given, self.names, _WHERE)

    def _gradients(self, policy: Any) -> list[Any]:
        program = self._program(policy)
        run = jax.jit(jaxpr_as_fun(program.jaxpr))
        return [np.asarray(g, np.float64) for g in run(*program.arrays(self.given))[1:]]

    def error(self, full: Sequence[str]) -> float:
        """Returns the largest relative error of a gradient leaf, run once a choice."""
        key = tuple(sorted(full))
        for tried in self.tried:
            if tried.full == key:
                return tried.error
        pairs = zip(self._gradients(self.policy(full)), self.reference, strict=True)
        errors = [np.abs(a - b).sum() / max(np.abs(b).sum(), 1e-300) for a, b in pairs]
        worst = float(np.max(np.nan_to_num(errors, nan=np.inf), initial=0.0))
        self.tried.append(Tried(key, worst))
        return worst

    def fits(self, full: Sequence[str]) -> bool:
        return self.error(full) <= self.tolerance

    def fewest(self, ranked: Sequence[str]) -> list[str]:
        """Returns the modules to keep: a prefix of the ranking, less what proves unneeded."""
        if not self.fits(ranked):
            got = f"missed with all {len(ranked)} named modules in float32: the error is "
            got += f"{self.error(ranked):.1e}, and {self.tolerance:.1e} was asked for."
            fix = "What rounds then has no name: give it one with jax.named_scope; or ask for more."
            raise ValueError(message(f"{_WHERE}(tolerance)", got, fix))
        few, enough = -1, len(ranked)
        while enough - few > 1:
            middle = (few + enough) // 2
            few, enough = (few, middle) if self.fits(ranked[:middle]) else (middle, enough)
        kept = list(ranked[:enough])
        for module in list(reversed(kept[:-1])):
            without = [m for m in kept if m != module]
            if self.fits(without):
                kept = without
        return kept
