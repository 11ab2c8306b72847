"""Where a normalised value may be low.

A norm computes in float32, and its result is float32. Where a product reads that result it is
rounded; where one comes later (a branch that is normalised before it is added to a stream, an
activation whose channels are gated by their means) a layer that is cast by hand gives a low one
too. So it may be low if it is stored: without that, the stream behind it is float32 for good.

That is so of the forward pass. A cotangent is as low as the value that it belongs to: a norm's
derivative takes off what is along its result, which may be nearly all of a cotangent.
"""

from __future__ import annotations

from typing import Any

from mpjax._autocast.decide import read_flags
from mpjax._autocast.known import norms, scopes
from mpjax._base import compat
from mpjax._jaxpr.caches import by_program
from mpjax._jaxpr.equation import Eqn, Jaxpr
from mpjax._jaxpr.op_rules import PRODUCTS

Made = tuple[frozenset[Any], frozenset[Any], frozenset[Any]]
NONE: Made = (frozenset(), frozenset(), frozenset())


@by_program
def of_program(program: Any) -> Made:
    """Returns what norms made in a program, and those of it that `by_readers` tells apart."""
    jaxpr = compat.closed(program).jaxpr
    made = norms.results([eqn for eqn in jaxpr.eqns if not scopes.is_transposed(eqn)])
    return made, *by_readers(jaxpr, made)


def by_readers(jaxpr: Jaxpr, made: frozenset[Any]) -> tuple[frozenset[Any], frozenset[Any]]:
    """Returns those that several operations read, and those that products read and nothing else.

    The first are stored between their readers. No sum goes on from the second: a norm of a kept
    value is not kept then, for sums go on from the value itself, and the products round what they
    read in any case. An iterate that is normalised after each step is read by its next sum.
    """
    if not made:
        return made, made
    read: set[Any] = set()
    several: set[Any] = set()
    others = {v for v in jaxpr.outvars if not compat.is_literal(v)}
    for eqn in jaxpr.eqns:
        mine = made.intersection(compat.variables(eqn))
        several |= read & mine
        read |= mine
        if eqn.primitive.name not in PRODUCTS:
            others |= mine
    return frozenset(several), made - others


def may_be_low(read: int) -> bool:
    """Whether a normalised value may be low for a product that comes later, by how it is read."""
    spoiled = read_flags.SPOILED | read_flags.GRADIENT
    return bool(read & read_flags.LATER) and not read & spoiled


def branches(eqn: Eqn, made: frozenset[Any]) -> frozenset[Any]:
    """Returns which terms of a sum of two whole arrays a norm made."""
    if eqn.primitive.name not in ("add", "add_any") or made.isdisjoint(compat.variables(eqn)):
        return frozenset()
    shape = eqn.outvars[0].aval.shape
    if any(compat.is_literal(v) or v.aval.shape != shape for v in eqn.invars):
        return frozenset()
    return made.intersection(compat.variables(eqn))
