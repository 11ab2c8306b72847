"""Normalised values: divided by the root of their own statistic, then scaled and shifted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpjax._autocast.known import activations, traits
from mpjax._base import compat
from mpjax._jaxpr import structure
from mpjax._jaxpr.caches import by_program
from mpjax._jaxpr.equation import Eqn
from mpjax._jaxpr.op_rules import only_moves
from mpjax._jaxpr.sizes import copies


def results(eqns: Sequence[Eqn]) -> frozenset[Any]:
    """Returns the values that a norm, or a function of a norm alone, made in some equations."""
    leads = any(eqn.primitive.name in traits.TOTALS or structure.is_call(eqn) for eqn in eqns)
    return _Search(eqns).made() if leads else frozenset()


@by_program
def _inside(program: Any) -> bool:
    opened = compat.closed(program).jaxpr
    outs = (v for v in opened.outvars if not compat.is_literal(v))
    return not results(opened.eqns).isdisjoint(outs)


class _Search:
    """One pass over some equations."""

    def __init__(self, eqns: Sequence[Eqn]):
        self.eqns = eqns
        self.statistics: set[Any] = set()
        self.square_roots: set[Any] = set()  # 1 / sqrt of a statistic, or sqrt
        self.repeated: set[Any] = set()  # by a broadcast, as a shift is
        self.normalised: set[Any] = set()
        self.leading: set[Any] = set()  # statistics, their roots and what is normalised

    def made(self) -> frozenset[Any]:
        """Returns what the pass finds."""
        for eqn in self.eqns:
            self.note(eqn)
        return frozenset(self.normalised)

    def note(self, eqn: Eqn) -> None:
        """Finds what the results of one equation are."""
        operands = compat.variables(eqn)
        if len(eqn.outvars) != 1 or not operands:
            return
        (out,) = eqn.outvars
        name = eqn.primitive.name
        if name == "broadcast_in_dim" and copies(eqn) > 1:
            self.repeated.add(out)
        if name in traits.TOTALS:
            self.statistics.add(out)
        elif self.leading.isdisjoint(operands) and structure.single_program(eqn) is None:
            return
        elif name == "rsqrt" and operands[0] in self.statistics:
            self.square_roots.add(out)
        elif self.statistics.issuperset(operands) and (name in traits.OF_TOTALS or only_moves(eqn)):
            (self.square_roots if name == "sqrt" else self.statistics).add(out)
        elif self.square_roots.issuperset(operands) and only_moves(eqn):
            self.square_roots.add(out)
        elif self.is_normalised(eqn, name, operands):
            self.normalised.add(out)
        else:
            return
        self.leading.add(out)

    def is_normalised(self, eqn: Eqn, name: str, operands: list[Any]) -> bool:
        """Whether an equation normalises, or computes from what is normalised and weights."""
        ready = [v for v in operands if v in self.normalised]
        if structure.single_program(eqn) is not None:
            return self.is_function_of_a_norm(eqn, operands, ready)
        if name in traits.SCALES:
            scales = [v for v in eqn.invars if compat.is_literal(v) or v.aval.ndim == 0]
            return not scales and bool(ready or self.square_roots.intersection(operands))
        if name in traits.SHIFTS:
            shape = eqn.outvars[0].aval.shape
            others = [v for v in operands if v not in self.normalised]
            return bool(ready) and all(v in self.repeated or v.aval.shape != shape for v in others)
        return len(ready) == len(operands) and (name in traits.OF_NORMS or only_moves(eqn))

    def is_function_of_a_norm(self, eqn: Eqn, operands: list[Any], ready: list[Any]) -> bool:
        """Whether an equation calls an activation of a normalised value, or a norm."""
        if len(ready) == len(operands) == 1:
            return activations.is_activation(eqn)
        return _inside(structure.single_program(eqn))
