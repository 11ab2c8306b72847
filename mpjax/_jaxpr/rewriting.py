"""Programs with some of their equations changed; what does not change stays the same object."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from mpjax._base import compat
from mpjax._jaxpr.equation import Eqn


def with_equations(jaxpr: Any, change: Callable[[Eqn], Eqn]) -> Any:
    """Returns an open jaxpr with each of its equations changed."""
    return with_more_equations(jaxpr, lambda eqn: (change(eqn),))


def with_more_equations(jaxpr: Any, change: Callable[[Eqn], Sequence[Eqn]]) -> Any:
    """Returns an open jaxpr with some equations in place of each."""
    eqns = [new for eqn in jaxpr.eqns for new in change(eqn)]
    same = len(eqns) == len(jaxpr.eqns) and all(map(operator.is_, eqns, jaxpr.eqns))
    return jaxpr if same else jaxpr.replace(eqns=eqns)


def with_programs(eqn: Eqn, change: Callable[[Any], Any]) -> Eqn:
    """Returns an equation with each open jaxpr inside it changed; `change` must be memoised."""
    if all(change(jaxpr) is jaxpr for jaxpr in compat.programs(eqn)):
        return eqn
    return eqn.replace(params=compat.map_programs(eqn.params, change))
