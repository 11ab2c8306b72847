"""Marks the programs inside a backward pass as part of it.

Where a function takes a gradient itself, JAX marks the equations of the backward pass as
transposed. Of a call, a loop or a checkpoint it marks the call alone, and nothing inside. Written
out, what stands inside would have the mark: so it gets it here.
"""

from __future__ import annotations

import functools
from typing import Any

from jax.extend import source_info_util

from mpjax._autocast.known import scopes
from mpjax._jaxpr.equation import Eqn, Jaxpr
from mpjax._jaxpr.rewriting import with_equations, with_programs


def mark_backward_passes(program: Any) -> Any:
    """Returns a closed jaxpr in which each equation of a backward pass is marked as transposed."""
    new = _Marks().marked(program.jaxpr, within=False)
    return program if new is program.jaxpr else program.replace(jaxpr=new)


class _Marks:
    """The programs that were marked, each once, so that equal calls share theirs."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, bool], Jaxpr] = {}

    def marked(self, jaxpr: Any, *, within: bool) -> Any:
        """Returns an open jaxpr, marked as a whole if it stands within a backward pass."""
        key = id(jaxpr), within
        if key not in self._known:
            one = functools.partial(self._equation, within=within)
            self._known[key] = with_equations(jaxpr, one)
        return self._known[key]

    def _equation(self, eqn: Eqn, *, within: bool) -> Eqn:
        if within and not scopes.is_transposed(eqn):
            stack = _transposed() + eqn.source_info.name_stack
            marked = eqn.replace(source_info=eqn.source_info.replace(name_stack=stack))
            eqn = marked if scopes.is_transposed(marked) else eqn  # it may be computed again
        return with_programs(eqn, functools.partial(self.marked, within=scopes.is_transposed(eqn)))


@functools.cache
def _transposed() -> Any:
    """Returns a stack of names that holds the mark of a backward pass alone."""
    with source_info_util.reset_name_stack(), source_info_util.transform_name_stack("transpose"):
        return source_info_util.current_name_stack()
