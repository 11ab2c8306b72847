"""One formula, one dtype: the derivatives of a product are computed as the product is.

A product whose terms cancel, as that of `E[x y] - E[x] E[y]`, is in float32. In its gradient the
same values cancel: `y g - E[y] g`. So it is for a product beside a solve, one of few coordinates,
or one of values that float16 might not hold. Where the gradient is taken outside of autocast, it
is in float32 too. Where the program takes it itself, JAX writes it as products of their own, on an
operand of the product, and on a cotangent of the shape of its result: so these are asked for. A
function with rules of its author's is planned by itself, and so are its rules: there products are
asked for that have the axes of one that is kept.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from mpjax._autocast.copies import recomputed
from mpjax._autocast.copies.numbering import Visit
from mpjax._autocast.decide import read_flags, reasons
from mpjax._autocast.decide.decided import Decided, Decision, products
from mpjax._autocast.known import contraction, scopes
from mpjax._base import compat
from mpjax._jaxpr.equation import Eqn
from mpjax._jaxpr.op_rules import PRODUCTS

_KEPT = (
    read_flags.CANCELS
    | read_flags.SOLUTION
    | read_flags.SMALL
    | read_flags.TESTED
    | read_flags.AS_TESTED
)
_ASKED = read_flags.CANCELS | read_flags.BELOW | read_flags.DIFFERENCE | read_flags.PROPORTION
"""Flags of a function's results that hold for those of its rules too."""


def kept(decided: Decided) -> Iterator[Eqn]:
    """Yields the products of a program, also inside, that are float32, and their gradients too."""
    return (made.eqn for made, read in products(decided) if _is_kept(made, read))


def _is_kept(made: Decision, read: int) -> bool:
    """Whether a product is float32 for a reason that holds for its gradients too."""
    return bool(read & _KEPT) or made.reason in reasons.OUT_OF_RANGE


def asked(visits: Sequence[Visit]) -> set[tuple[Any, int]]:
    """Returns the flags by which the gradients of products that are kept are float32."""
    operands: dict[Hashable, set[int]] = {}  # of the products that are kept, by their axes
    out_of_range: set[Hashable] = set()
    backward: list[Visit] = []
    for visit in visits:
        eqn = visit.decision.eqn
        if scopes.is_transposed(eqn):
            backward.append(visit)
        elif _is_kept(visit.decision, visit.read):
            operands.setdefault(_axes(eqn), set()).update(visit.operands)
            if visit.decision.reason in reasons.OUT_OF_RANGE:
                out_of_range.add(_axes(eqn))
    if not operands:
        return set()

    def is_gradient(visit: Visit) -> bool:
        eqn, axes = visit.decision.eqn, _axes(visit.decision.eqn)
        if not (contraction.is_product(eqn) or axes in out_of_range):
            return False  # it is elementwise, and not rounded where it is computed
        return not operands.get(axes, set()).isdisjoint(visit.operands)

    gradients = (v.decision.eqn for v in backward if is_gradient(v))
    return {(eqn.outvars[0], read_flags.CANCELS) for eqn in gradients}


class OfRules(NamedTuple):
    """The demands on a function with rules of its author's, which hold for each rule too."""

    results: tuple[int, ...]  # how each one is read
    axes: frozenset[Hashable]  # of the products that are kept
    saved: recomputed.Saved

    def reads(self, program: Any) -> tuple[int, ...]:
        """Returns how each result of the function, or of a rule, is read; given its jaxpr.

        A forward rule returns what it saves, and then the results; one of `custom_jvp` the results,
        and then their tangents. What is neither is read as all results are.
        """
        again = read_flags.AGAIN if self.saved.with_rule(program) else 0
        of_all = functools.reduce(operator.or_, self.results, 0)
        others = len(program.jaxpr.outvars) - len(self.results)
        if self.saved.has_inputs_of(program, times=2) and others == len(self.results):
            reads = self.results * 2
        elif self.saved.has_inputs_of(program) and others >= 0:
            reads = (of_all,) * others + self.results
        else:
            reads = (of_all,) * len(program.jaxpr.outvars)
        return tuple(read | again for read in reads)

    def asked(self, program: Any) -> frozenset[tuple[Any, int]]:
        """Returns the flags of the products in the closed jaxpr of the function, or of a rule."""
        if not self.axes:
            return frozenset()
        made = (eqn for eqn in compat.equations(program) if eqn.primitive.name in PRODUCTS)
        cancel = (eqn for eqn in made if _axes(eqn) in self.axes)
        return frozenset((eqn.outvars[0], read_flags.CANCELS) for eqn in cancel)


def of_rules(decided: Decided) -> OfRules:
    """Returns what is asked of a function with rules, decided about as if it were inlined."""
    always = read_flags.OUTPUT | read_flags.NEAR
    if any(read & read_flags.AGAIN for read in decided.reads.values()):
        always |= read_flags.AGAIN
    outs = decided.jaxpr.jaxpr.outvars
    reads = (0 if compat.is_literal(v) else decided.reads.get(v, 0) & _ASKED for v in outs)
    axes = frozenset(map(_axes, kept(decided)))
    return OfRules(tuple(always | r for r in reads), axes, recomputed.Saved(decided.jaxpr))


def _axes(eqn: Eqn) -> Hashable:
    """Returns the axes of a product's operands and result: those of its gradients are the same."""
    shapes = [v.aval.shape for v in (*eqn.invars[:2], eqn.outvars[0])]
    return _counted(_counted(shape) for shape in shapes)


def _counted(items: Iterable[Hashable]) -> Hashable:
    return frozenset(Counter(items).items())
