"""Tells the programs inside a derivative that they are part of it.

Where a function takes a gradient itself, JAX marks the equations of the backward pass as
transposed. Of a call, a loop or a checkpoint it marks the call alone, and nothing inside. Written
out, what stands inside would have the mark: so it gets it here.
"""

from __future__ import annotations

from typing import Any

from jax.extend import source_info_util

from mpjax._autocast.known import scopes
from mpjax._base import compat
from mpjax._jaxpr.equation import Eqn, Jaxpr


def told(program: Any) -> Any:
    """Returns a closed jaxpr in which each equation of a backward pass is marked as transposed."""
    new = _Marks().told(program.jaxpr, within=False)
    return program if new is program.jaxpr else program.replace(jaxpr=new)


class _Marks:
    """The programs that were told, each once, so that equal calls share theirs."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, bool], Jaxpr] = {}

    def told(self, jaxpr: Any, *, within: bool) -> Any:
        """Returns an open jaxpr, told whether it stands in a backward pass."""
        key = id(jaxpr), within
        if key not in self._known:
            eqns = [self._equation(eqn, within=within) for eqn in jaxpr.eqns]
            same = all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True))
            self._known[key] = jaxpr if same else jaxpr.replace(eqns=eqns)
        return self._known[key]

    def _equation(self, eqn: Eqn, *, within: bool) -> Eqn:
        if within and not scopes.is_transposed(eqn):
            stack = _transposed() + eqn.source_info.name_stack
            marked = eqn.replace(source_info=eqn.source_info.replace(name_stack=stack))
            eqn = marked if scopes.is_transposed(marked) else eqn  # it may be computed again
        within = scopes.is_transposed(eqn)
        inner = compat.programs(eqn)
        if all(self.told(jaxpr, within=within) is jaxpr for jaxpr in inner):
            return eqn
        change = lambda jaxpr: self.told(jaxpr, within=within)  # noqa: E731
        return eqn.replace(params=compat.map_programs(eqn.params, change))


def _transposed() -> Any:
    """Returns a stack of names that holds the mark of a backward pass alone."""
    with source_info_util.reset_name_stack(), source_info_util.transform_name_stack("transpose"):
        return source_info_util.current_name_stack()
