"""Values whose cotangents come from readers that do not share a kernel, and have to meet unrounded.

A low value hands each reader a low cotangent to fill in. Two groups round theirs, and the sum is
rounded as each term was. But where one reader is a loop, a sort, a function with a rule of its own
or a region in float32, the author sees one float32 value: its cotangents may cancel, as in
`|h|² - 2 h·t`, and rounding each leaves what the sum has not. Such a value is widened once, for all
its readers.
"""

from __future__ import annotations

from typing import Any

from mpjax._autocast.decide import fusible, scopes, traits
from mpjax._autocast.decide.states import is_float32
from mpjax._base import compat
from mpjax._jaxpr import structure

_OWN_KERNEL = traits.SELECTS | traits.RUNNING - traits.FUSIBLE


def of(jaxpr: Any) -> frozenset[Any]:
    """Returns the variables of a program whose cotangents meet from such readers."""
    readers: dict[Any, int] = {}
    apart: set[Any] = set()
    for eqn in jaxpr.eqns:
        if not any(map(is_float32, eqn.outvars)):
            continue  # it has no cotangent
        floats = {v for v in compat.variables(eqn) if is_float32(v)}
        for v in floats:
            readers[v] = readers.get(v, 0) + 1
        if _is_apart(eqn):
            apart |= floats
    return frozenset(v for v in apart if readers[v] > 1)


def _is_apart(eqn: Any) -> bool:
    if scopes.AS_WRITTEN in scopes.of(eqn):
        return True
    name = eqn.primitive.name
    if name in structure.LOOPS or structure.has_rules(eqn):
        return not fusible.is_fusible_function(eqn)
    return name in _OWN_KERNEL and name not in traits.FUSIBLE | traits.UPDATES
