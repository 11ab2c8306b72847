"""Values whose cotangents come from readers that do not share a kernel, and have to meet unrounded.

A low value hands each reader a low cotangent to fill in. Two groups round theirs, and the sum is
rounded as each term was. But where one reader is a loop, a sort, a function with a rule of its own
or a region in float32, the author sees one float32 value: its cotangents may cancel, as in
`|h|² - 2 h·t`, and rounding each leaves what the sum has not. Such a value is widened once, for all
its readers.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from mpjax._autocast.decide import fusible, scopes, traits
from mpjax._autocast.decide.states import is_float32
from mpjax._base import compat
from mpjax._jaxpr import structure
from mpjax._jaxpr.equation import Eqn, Jaxpr

_OWN_KERNEL = (traits.SELECTS | traits.RUNNING) - traits.FUSIBLE - traits.UPDATES


def of(jaxpr: Jaxpr) -> frozenset[Any]:
    """Returns the variables of a program whose cotangents meet from such readers."""
    apart = {v for eqn in filter(_is_apart, jaxpr.eqns) for v in _cotangents(eqn)}
    if not apart:
        return frozenset()
    readers = Counter(v for eqn in jaxpr.eqns for v in apart.intersection(_cotangents(eqn)))
    return frozenset(v for v in apart if readers[v] > 1)


def _cotangents(eqn: Eqn) -> list[Any]:
    """Returns the operands of an equation to which it gives cotangents."""
    if not any(map(is_float32, eqn.outvars)):
        return []  # it has no cotangent itself
    return [v for v in compat.variables(eqn) if is_float32(v)]


def _is_apart(eqn: Eqn) -> bool:
    if scopes.AS_WRITTEN in scopes.of(eqn):
        return True
    if eqn.primitive.name in structure.LOOPS or structure.has_rules(eqn):
        return not fusible.is_fusible_function(eqn)
    return eqn.primitive.name in _OWN_KERNEL
