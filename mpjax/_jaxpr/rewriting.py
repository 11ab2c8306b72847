"""Programs with some of their equations changed; what does not change stays the same object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpjax._base import compat
from mpjax._jaxpr.equation import Eqn


def with_equations(jaxpr: Any, change: Callable[[Eqn], Eqn]) -> Any:
    """Returns an open jaxpr with each of its equations changed."""
    eqns = list(map(change, jaxpr.eqns))
    same = all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True))
    return jaxpr if same else jaxpr.replace(eqns=eqns)


def with_programs(eqn: Eqn, change: Callable[[Any], Any]) -> Eqn:
    """Returns an equation with each open jaxpr inside it changed; `change` must be memoised."""
    if all(change(jaxpr) is jaxpr for jaxpr in compat.programs(eqn)):
        return eqn
    return eqn.replace(params=compat.map_programs(eqn.params, change))
