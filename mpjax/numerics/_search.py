"""The search of `suggest`: policies are run one after another, and what they gave is kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from mpjax import _compat
from mpjax._errors import message
from mpjax._policy import Policy, get_policy
from mpjax._policy_map import PolicyMap
from mpjax._tree import is_array
from mpjax.numerics._program import Program

_WHERE = "numerics.suggest(tolerance)"


@dataclasses.dataclass(frozen=True)
class Tried:
    """One policy that was run: which modules were in float32, and the error that was measured."""

    full: tuple[str, ...]
    error: float


@dataclasses.dataclass(frozen=True)
class Choice:
    """What may be chosen: which of the modules are in float32; all below one is with it."""

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
    """Runs policies, and remembers what they gave.

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
    ) -> None:
        self.subject, self.choice = subject, choice
        self.given, self.names = given, names
        self.tolerance = tolerance
        self.tried: list[Tried] = []
        program, gradients = self._run(get_policy("float32"))
        self.reference = gradients(given)
        moved = [given[0], jax.tree.map(_moved, given[1]), *given[2:]]
        again = _errors(gradients(moved), self.reference)
        self.is_noise = [not error <= tolerance for error in again]
        paths = zip(program.gradient_paths, self.is_noise, strict=True)
        self.noise = tuple(path for path, is_noise in paths if is_noise)
        if again and all(self.is_noise):
            got = f"float32 itself misses {tolerance:.1e}: a unit in the last place of every other "
            got += f"parameter moves each gradient by {min(again):.1e} or more."
            fix = f"Ask for more than that, as tolerance={10 * min(again):.1g}."
            raise ValueError(message(_WHERE, got, fix))

    def _run(self, policy: Any) -> tuple[Program, Callable[[Sequence[Any]], list[Any]]]:
        """Returns the program under a policy, and what gives its gradients for some arguments."""
        program = Program(self.subject.make(policy), self.given, self.names, _WHERE)
        run = jax.jit(jaxpr_as_fun(program.jaxpr))

        def gradients(given: Sequence[Any]) -> list[Any]:
            return [np.asarray(g, np.float64) for g in run(*program.arrays(given))[1:]]

        return program, gradients

    def error(self, full: Sequence[str]) -> float:
        """Returns the largest relative error of a gradient leaf, run once a choice."""
        key = tuple(sorted(self.choice.roots(full)))
        for tried in self.tried:
            if tried.full == key:
                return tried.error
        _, gradients = self._run(self.choice.policy(full))
        errors = _errors(gradients(self.given), self.reference)
        kept = [e for e, is_noise in zip(errors, self.is_noise, strict=True) if not is_noise]
        worst = float(np.max(np.nan_to_num(kept, nan=np.inf), initial=0.0))
        self.tried.append(Tried(key, worst))
        return worst

    def fits(self, full: Sequence[str]) -> bool:
        """Whether the gradients are within the tolerance with these modules in float32."""
        return self.error(full) <= self.tolerance

    def fewest(self, ranked: Sequence[str]) -> tuple[str, ...]:
        """Returns the modules to keep: a prefix of the ranking, less what proves unneeded."""
        if not self.fits(ranked):
            got = f"missed with all {len(ranked)} named modules in float32: the error is "
            got += f"{self.error(ranked):.1e}, and {self.tolerance:.1e} was asked for."
            fix = "What rounds then has no name: give it one with jax.named_scope; or ask for more."
            raise ValueError(message(_WHERE, got, fix))
        few, enough = -1, len(ranked)
        while enough - few > 1:
            middle = (few + enough) // 2
            few, enough = (few, middle) if self.fits(ranked[:middle]) else (middle, enough)
        kept = list(self.choice.roots(ranked[:enough]))
        for module in list(reversed(kept)):
            without = [m for m in kept if m != module]
            if self.fits(without):
                kept = without
        return tuple(kept)


def _errors(gradients: Sequence[Any], reference: Sequence[Any]) -> list[float]:
    pairs = zip(gradients, reference, strict=True)
    return [float(np.abs(a - b).sum() / max(np.abs(b).sum(), 1e-300)) for a, b in pairs]


def _moved(x: Any) -> Any:
    """Returns a floating array half of whose elements are one unit in the last place further."""
    if not is_array(x) or not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    is_even = jnp.arange(x.size, dtype=jnp.int32).reshape(x.shape) % 2 == 0
    if (sharding := _compat.explicit_sharding(jax.typeof(x))) is not None:
        is_even = jax.sharding.reshard(is_even, sharding)
    return jnp.where(is_even, jnp.nextafter(x, jnp.full_like(x, jnp.inf)), x)
