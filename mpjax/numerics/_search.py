"""The search of `suggest`: runs policies one after another, and keeps their errors."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._base import compat
from mpjax._base.errors import message
from mpjax._base.tree import is_array
from mpjax._policies.policy import Policy, get_policy
from mpjax._policies.policy_map import PolicyMap
from mpjax.numerics._clock import Clock
from mpjax.numerics._program import LossProgram

_WHERE = "numerics.suggest(tolerance)"


@dataclasses.dataclass(frozen=True)
class Tried:
    """One policy that was run: its modules in float32, and the measured error."""

    full: tuple[str, ...]
    error: float
    compiled: bool = True  # False: it ran operation by operation, which is quicker


@dataclasses.dataclass(frozen=True)
class Choice:
    """The choices of a search: a set of modules in float32, with all modules below them."""

    policy_low: Policy
    modules: tuple[str, ...]
    reverse: bool  # whether what has no name is in float32

    def roots(self, chosen: Sequence[str]) -> tuple[str, ...]:
        """Returns the chosen modules that are in no other one of them."""
        return tuple(m for m in chosen if not any(_is_below(m, other) for other in chosen))

    def low(self, full: Sequence[str]) -> tuple[str, ...]:
        """Returns the modules that are neither in float32 nor below one that is."""
        return tuple(m for m in self.modules if not any(_is_in(m, other) for other in full))

    def policy(self, full: Sequence[str]) -> PolicyMap:
        """Returns the map that has some modules in float32: the first rule that matches decides."""
        full = self.roots(full)
        if not self.reverse:
            return PolicyMap(self.policy_low, dict.fromkeys(full, "float32"))
        low = self.roots(self.low(full))
        inner = [m for m in full if any(_is_below(m, other) for other in low)]
        rules = dict.fromkeys(inner, get_policy("float32")) | dict.fromkeys(low, self.policy_low)
        return PolicyMap("float32", rules)


def _is_below(module: str, other: str) -> bool:
    return module.startswith(f"{other}/")


def _is_in(module: str, other: str) -> bool:
    return module == other or _is_below(module, other)


class Search:
    """Runs policies, and remembers their errors.

    Raises:
      ValueError: float32 itself misses the tolerance in each gradient.
    """

    def __init__(
        self,
        subject: Any,
        choice: Choice,
        given: Sequence[Any],
        names: Sequence[str],
        tolerance: float,
        clock: Clock,
    ) -> None:
        self.subject, self.choice = subject, choice
        self.given, self.names = given, names
        self.tolerance, self.clock = tolerance, clock
        self.tried: list[Tried] = []
        program = self._program(get_policy("float32"))
        self.by_operations = program.runs_by_operations(given)
        self._full = program
        self.references = {not self.by_operations: _gradients(program, given)}
        moved = [given[0], jax.tree.map(_moved, given[1]), *given[2:]]
        again = _errors(_gradients(program, moved), self.references[not self.by_operations])
        self.is_noise = [not error <= tolerance for error in again]
        paths = zip(program.gradient_paths, self.is_noise, strict=True)
        self.noise = tuple(path for path, is_noise in paths if is_noise)
        if again and all(self.is_noise):
            got = f"float32 itself misses {tolerance:.1e}: a unit in the last place of every other "
            got += f"parameter moves each gradient by {min(again):.1e} or more."
            fix = f"Ask for more than that, as tolerance={10 * min(again):.1g}."
            raise ValueError(message(_WHERE, got, fix))

    def _program(self, policy: Any) -> LossProgram:
        return LossProgram(self.subject.make(policy), self.given, self.names, _WHERE, self.clock)

    def error(self, full: Sequence[str], *, compiled: bool = False) -> float:
        """Returns the largest relative error of a gradient leaf; each choice is run once.

        Args:
          full: the modules in float32.
          compiled: as one program, as a step runs; else operation by operation if it is small.
        """
        compiled = compiled or not self.by_operations
        key = tuple(sorted(self.choice.roots(full)))
        for tried in self.tried:
            if tried.full == key and tried.compiled == compiled:
                return tried.error
        # A program compiled as one rounds differently, in float32 too: each has its reference.
        if compiled not in self.references:
            self.references[compiled] = _gradients(self._full, self.given, compiled=compiled)
        gradients = _gradients(
            self._program(self.choice.policy(full)), self.given, compiled=compiled
        )
        errors = _errors(gradients, self.references[compiled])
        kept = [e for e, is_noise in zip(errors, self.is_noise, strict=True) if not is_noise]
        worst = float(np.max(np.nan_to_num(kept, nan=np.inf), initial=0.0))
        self.tried.append(Tried(key, worst, compiled))
        return worst

    def fits(self, full: Sequence[str], *, compiled: bool = False) -> bool:
        """Whether the gradients are within the tolerance with these modules in float32."""
        return self.error(full, compiled=compiled) <= self.tolerance

    def confirmed(self, ranked: Sequence[str]) -> tuple[str, ...]:
        """Returns the fewest modules with which the compiled program is within the tolerance.

        Operation by operation a program rounds a little differently. If the compiled program is
        not within the tolerance for that reason, modules are added in the order of the ranking.
        """
        full = list(self.fewest(ranked))
        rest = [m for m in ranked if m not in full]
        while not self.fits(full, compiled=True):
            if not rest:
                self._missed(ranked, self.error(full, compiled=True))
            full = list(self.choice.roots([*full, rest.pop(0)]))
        return tuple(full)

    def _missed(self, ranked: Sequence[str], error: float) -> None:
        got = f"missed with all {len(ranked)} named modules in float32: the error is "
        got += f"{error:.1e}, and {self.tolerance:.1e} was asked for."
        fix = "What rounds then has no name: give it one with jax.named_scope; or ask for more."
        raise ValueError(message(_WHERE, got, fix))

    def fewest(self, ranked: Sequence[str]) -> tuple[str, ...]:
        """Returns the shortest prefix of the ranking that is enough, less modules not needed."""
        if not self.fits(ranked):
            self._missed(ranked, self.error(ranked))
        few, enough = -1, len(ranked)
        while enough - few > 1:
            middle = (few + enough) // 2
            few, enough = (few, middle) if self.fits(ranked[:middle]) else (middle, enough)
        kept = list(self.choice.roots(ranked[:enough]))
        # From the end of the ranking: the modules that add the least.
        for module in list(reversed(kept)):
            without = [m for m in kept if m != module]
            if self.fits(without):
                kept = without
        return tuple(kept)


def _gradients(program: LossProgram, given: Sequence[Any], *, compiled: bool = False) -> list[Any]:
    return [np.asarray(g, np.float64) for g in program.outputs(given, compiled=compiled)[1:]]


def _errors(gradients: Sequence[Any], reference: Sequence[Any]) -> list[float]:
    pairs = zip(gradients, reference, strict=True)
    return [float(np.abs(a - b).sum() / max(np.abs(b).sum(), 1e-300)) for a, b in pairs]


def _moved(x: Any) -> Any:
    """Returns a floating array half of whose elements are one unit in the last place further."""
    if not is_array(x) or not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    is_even = jnp.arange(x.size, dtype=jnp.int32).reshape(x.shape) % 2 == 0
    if compat.explicit_sharding(jax.typeof(x)) is not None:
        is_even = jax.device_put(is_even, x.sharding)
    return jnp.where(is_even, jnp.nextafter(x, jnp.full_like(x, jnp.inf)), x)
