"""Where an operation stands: its module path, and whether it is in a region left as it is.

Both are read from the names that `jax.named_scope` (and with it Flax) puts on every operation:
they survive `jit`'s caches, loops and differentiation, which a flag in Python would not.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
from jax.extend import source_info_util

from mpjax._base import compat, source_lines
from mpjax._jaxpr.caches import by_kept_identity
from mpjax._jaxpr.equation import Eqn, Jaxpr
from mpjax._policies.policy import Policy
from mpjax._policies.spelling import Path, of_operation


class PolicyByPath(Protocol):
    """The part of a `PolicyMap` that autocast needs."""

    @property
    def policies(self) -> tuple[Policy, ...]: ...

    @property
    def default(self) -> Policy: ...

    @property
    def rules(self) -> tuple[tuple[str, Policy], ...]: ...

    def deciding(self, path: Path) -> int | None: ...

    def policy_for(self, path: Path) -> Policy: ...

    def warn_unused(self, paths: Iterable[Path], where: str = ...) -> None: ...

    def cast_to_output(self, tree: Any) -> Any: ...


Policies = Policy | PolicyByPath

AS_WRITTEN = "mpjax_as_written"
"""The scope inside which autocast changes nothing: `full_precision`, and its own results."""
RECOMPUTED = "rematted_computation"
"""The scope of what a checkpoint computes again of the forward pass, inside the backward pass."""


class Scope(NamedTuple):
    """Where an operation stands."""

    names: tuple[str, ...]  # the scopes, without the transformations between them
    as_written: bool  # in a region that is left as it is
    is_transposed: bool  # made by reverse-mode differentiation inside the function
    is_differentiated: bool  # in code that the function differentiates itself


@by_kept_identity
@functools.lru_cache(maxsize=8192)  # of equal stacks
def _place(name_stack: Any) -> Scope:
    names = tuple(name for segment in segments(name_stack) for name in segment)
    is_transposed = is_differentiated = False
    for entry in getattr(name_stack, "stack", ()):
        if type(entry).__name__ == "Transform":
            is_transposed |= entry.name == "transpose"
            is_differentiated |= entry.name == "jvp"
        elif entry.name == RECOMPUTED:
            is_transposed = False
    return Scope(names, AS_WRITTEN in names, is_transposed, is_differentiated)


def place(eqn: Eqn) -> Scope:
    """Returns where one equation stands."""
    return _place(eqn.source_info.name_stack)


def of(eqn: Eqn) -> tuple[str, ...]:
    """Returns the scopes of one equation."""
    return _place(eqn.source_info.name_stack).names


def is_transposed(eqn: Eqn) -> bool:
    """Whether an operation was made by reverse-mode differentiation inside the function."""
    return _place(eqn.source_info.name_stack).is_transposed


def is_as_written(eqn: Eqn) -> bool:
    """Whether an operation stands in a region in which autocast changes nothing."""
    return _place(eqn.source_info.name_stack).as_written


def segments(name_stack: Any) -> list[tuple[str, ...]]:
    """Returns the scopes in a name stack, apart where there is a transformation between them."""
    parts: list[tuple[str, ...]] = [()]
    for entry in getattr(name_stack, "stack", ()):
        if type(entry).__name__ == "Scope":
            parts[-1] = (*parts[-1], entry.name)
        else:
            parts.append(())
    return parts


def location(eqn: Eqn) -> str:
    """Returns the user's source line of an equation, as 'file.py:12 (function)'.

    The line is the user's where a library's layer wrote the equation: 'model.py:30', the call.
    """
    user = source_lines.of(eqn.source_info.traceback).user
    return str(user) if user else source_info_util.summarize(eqn.source_info)


def short(where: str) -> str:
    """Returns 'file.py:12' of '/a/path/file.py:12:4 (function)'."""
    place = re.match(r"(?:.*[/\\])?([^/\\:]+:\d+)", where)
    return place[1] if place else where


@functools.lru_cache(maxsize=4096)
def compute_dtype(policy: Policies, path: tuple[str, ...]) -> Any:
    """Returns the dtype that a policy has for the operations of a module path."""
    if not isinstance(policy, Policy):
        policy = policy.policy_for(of_operation(path))
    return jnp.dtype(policy.compute_dtype)


def paths(jaxpr: Jaxpr) -> list[Path]:
    """Returns the paths of the operations of a jaxpr and of those inside it, in all spellings."""
    return [of_operation(path) for path in _paths(jaxpr, ()) if path]


def _paths(jaxpr: Jaxpr, around: tuple[str, ...]) -> dict[tuple[str, ...], None]:
    seen: dict[tuple[str, ...], None] = {}
    for eqn in jaxpr.eqns:
        path = around + of(eqn)
        seen[path] = None
        for inner in compat.programs(eqn):
            seen.update(_paths(inner, path))
    return seen
