"""Binds one equation again: on other operands, at the place where its author wrote it."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from typing import Any

from jax.extend import source_info_util

from mpjax import _compat


def inside(eqn: Any, count: int) -> contextlib.AbstractContextManager[None]:
    """Gives what is bound inside the outermost scopes of an equation, and its source line."""
    return _at(eqn.source_info.traceback, eqn.source_info.name_stack[:count])


@contextlib.contextmanager
def written_at(eqn: Any, within: int = 0) -> Generator[None]:
    """Gives what is bound inside the scopes and the source line of an equation.

    Args:
      eqn: the equation.
      within: how many of its outermost scopes what is bound is in already.
    """
    with _at(eqn.source_info.traceback, eqn.source_info.name_stack[within:]), eqn.ctx.manager:
        yield


def _at(traceback: Any, names: Any) -> contextlib.AbstractContextManager[None]:
    stack = source_info_util.current_name_stack() + names
    return source_info_util.user_context(traceback, name_stack=stack)


def bind(eqn: Any, values: Sequence[Any], params: Any = None) -> list[Any]:
    """Returns the results of an equation on other operands."""
    params = eqn.params if params is None else params
    bound = _compat.bind(eqn.primitive, values, params)
    return list(bound) if eqn.primitive.multiple_results else [bound]
