"""One formula, one dtype: the derivatives of a product are computed as the product is.

A product whose terms cancel, as that of `E[x y] - E[x] E[y]`, is in float32. In its gradient the
same values cancel: `y g - E[y] g`. Where the gradient is taken outside of autocast, it is in
float32 too. Where the program takes it itself, JAX writes it as products of their own, on an
operand of the product, and on a cotangent of the shape of its result: so these are asked for. A
function with rules of its author's is planned by itself, and so are its rules: there products are
asked for that have the axes of one that cancels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from typing import Any, NamedTuple

from mpjax._autocast.copies.numbering import Visit
from mpjax._autocast.decide import reads
from mpjax._autocast.decide.decided import Decided
from mpjax._autocast.known import scopes
from mpjax._base import compat
from mpjax._jaxpr.equation import Eqn, Jaxpr
from mpjax._jaxpr.op_rules import PRODUCTS

_ASKED = reads.CANCELS | reads.BELOW | reads.DIFFERENCE
"""What a reader of a result asks of the function, and so of each of its rules."""


def cancelling(plan: Decided) -> Iterator[Eqn]:
    """Yields the products of a plan, also inside, that are terms of a sum that cancels."""
    for decision in plan.decisions:
        if decision.call is not None:
            for inner in decision.call.plans:
                yield from cancelling(inner)
        elif decision.eqn.primitive.name in PRODUCTS and (
            plan.reads.get(decision.eqn.outvars[0], 0) & reads.CANCELS
        ):
            yield decision.eqn


def asked(visits: Iterable[Visit]) -> set[tuple[Any, int]]:
    """Returns the flags by which the gradients of products that cancel are float32."""
    forward: list[Visit] = []
    backward: list[Visit] = []
    for visit in visits:
        (backward if scopes.is_transposed(visit.decision.eqn) else forward).append(visit)
    known = [(v.operands, _axes(v.decision.eqn)) for v in forward if v.read & reads.CANCELS]
    return {
        (v.decision.eqn.outvars[0], reads.CANCELS)
        for v in backward
        for operands, axes in known
        if not set(operands).isdisjoint(v.operands) and axes == _axes(v.decision.eqn)
    }


class OfRules(NamedTuple):
    """What a function with rules of its author's, and each rule, is asked where it is called."""

    reads: int  # of its results
    axes: frozenset[Hashable]  # of the products that cancel

    def asked(self, program: Any) -> frozenset[tuple[Any, int]]:
        """Returns the flags of the products in the closed jaxpr of the function, or of a rule."""
        alike = (eqn for eqn in _products(program.jaxpr) if _axes(eqn) in self.axes)
        return frozenset((eqn.outvars[0], reads.CANCELS) for eqn in alike)


def of_rules(plan: Decided) -> OfRules:
    """Returns what is asked of a function with rules, given its plan as if it were inlined."""
    asked = reads.OUTPUT | reads.NEAR
    for v in plan.jaxpr.jaxpr.outvars:
        asked |= 0 if compat.is_literal(v) else plan.reads.get(v, 0) & _ASKED
    if any(want & reads.AGAIN for want in plan.reads.values()):
        asked |= reads.AGAIN
    return OfRules(asked, frozenset(map(_axes, cancelling(plan))))


def _products(jaxpr: Jaxpr) -> Iterator[Eqn]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in PRODUCTS:
            yield eqn
        for inner in compat.programs(eqn):
            yield from _products(inner)


def _axes(eqn: Eqn) -> Hashable:
    """Returns the axes of a product's operands and result: those of its gradients are the same."""
    shapes = [v.aval.shape for v in (*eqn.invars[:2], eqn.outvars[0])]
    return _counted(_counted(shape) for shape in shapes)


def _counted(items: Iterable[Hashable]) -> Hashable:
    return frozenset(Counter(items).items())
