"""One expression, one rounding: the same product of the same operands is held in one dtype.

A softmax whose normaliser a loop computes reads its logits twice, once inside the loop and once
outside. Rounded in one place only, its rows do not sum to one. So products are numbered by what
they are computed of, through calls and loops, and where two of one number would differ, both are
in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import numpy as np

from mpjax._autocast.decide import reads
from mpjax._autocast.decide.decided import Action, Decided, Decision
from mpjax._autocast.decide.reasons import By
from mpjax._autocast.decide.states import FLOAT32
from mpjax._base import compat
from mpjax._jaxpr import structure
from mpjax._jaxpr.equation import Eqn
from mpjax._jaxpr.op_rules import PRODUCTS

_BY_VALUE = (bool, int, str, tuple, np.dtype)

Asked = frozenset[tuple[Any, int]]
"""Flags of `reads` for results of products, asked beside those that their readers ask."""


def asked(plan: Decided) -> Asked:
    """Returns what is to be asked of products so that equal ones are held in one dtype."""
    if not _may_differ(plan):
        return frozenset()
    numbering = _Numbering()
    numbering.plan(plan, [numbering.fresh() for _ in plan.jaxpr.jaxpr.invars])
    asked_for: set[tuple[Any, int]] = set()
    for copies in numbering.products.values():
        flags = {flag for _, flag in copies}
        if len(flags) > 1:
            asked_for.update((out, max(flags)) for out, flag in copies if flag != max(flags))
    return frozenset(asked_for)


def _asked_of(decision: Decision) -> int:
    """Returns the flag that makes another product be held as this one is; 0 where it is rounded."""
    if decision.action is Action.PRODUCT:
        return reads.SAME if decision.out_dtype == FLOAT32 else 0
    asked = decision.action is Action.AS_TRACED and decision.reason.by is By.READER
    return reads.TESTED if asked else 0


def _may_differ(plan: Decided) -> bool:
    """Whether products of the same form are held differently: only then is it worth a walk."""
    seen: dict[Hashable, int] = {}
    for decision in _products(plan):
        eqn = decision.eqn
        shapes = [v.aval.shape for v in (*eqn.invars[:2], *eqn.outvars)]
        flag = _asked_of(decision)
        if seen.setdefault((*_operation(eqn), *shapes), flag) != flag:
            return True
    return False


def _products(plan: Decided) -> Iterator[Decision]:
    for decision in plan.decisions:
        if decision.call is not None:
            for inner in decision.call.plans:
                yield from _products(inner)
        elif decision.eqn.primitive.name in PRODUCTS:
            yield decision


def _operation(eqn: Eqn) -> tuple[Hashable, ...]:
    """Returns what equations that compute the same have in common beside their operands."""
    params = ((name, _param(value)) for name, value in sorted(eqn.params.items()))
    return eqn.primitive.name, *params


def _param(value: Any) -> Hashable:
    """Returns an equation's parameter as a key: itself, or how it prints where it is an object."""
    try:
        hash(value)
    except TypeError:
        return str(value)
    return value if value is None or isinstance(value, _BY_VALUE) else str(value)


class _Numbering:
    """Numbers values by what they are computed of."""

    def __init__(self) -> None:
        self.numbers: dict[Hashable, int] = {}
        self.products: dict[int, set[tuple[Any, int]]] = {}

    def fresh(self) -> int:
        return self.numbers.setdefault(object(), len(self.numbers))

    def of(self, key: Hashable) -> int:
        return self.numbers.setdefault(key, len(self.numbers))

    def plan(self, plan: Decided, inputs: Sequence[int]) -> list[int]:
        """Numbers the values of a plan; returns the numbers of its outputs."""
        decisions = {d.eqn.outvars[0]: d for d in plan.decisions if d.eqn.outvars}

        def planned(eqn: Eqn) -> Decision | None:
            return decisions.get(eqn.outvars[0]) if eqn.outvars else None

        return self.program(plan.jaxpr, inputs, planned)

    def program(
        self, program: Any, inputs: Sequence[int], planned: Callable[[Any], Decision | None]
    ) -> list[int]:
        jaxpr = compat.closed(program).jaxpr
        env = dict(zip(jaxpr.invars, inputs, strict=True))
        env.update((v, self.of(("constant", v))) for v in jaxpr.constvars)

        def number(atom: Any) -> int:
            if compat.is_literal(atom):
                return self.of((atom.aval.dtype, atom.aval.shape, np.asarray(atom.val).tobytes()))
            return env[atom]

        for eqn in jaxpr.eqns:
            outs = self.equation(eqn, [number(v) for v in eqn.invars], planned(eqn))
            env.update(zip(eqn.outvars, outs, strict=True))
        return [number(v) for v in jaxpr.outvars]

    def equation(self, eqn: Eqn, operands: list[int], decision: Decision | None) -> list[int]:
        if structure.is_call(eqn):
            return self.call(eqn, operands, decision)
        if eqn.effects:
            return [self.fresh() for _ in eqn.outvars]
        first = self.of((*_operation(eqn), *operands))
        if decision is not None and eqn.primitive.name in PRODUCTS:
            place = (eqn.outvars[0], _asked_of(decision))
            self.products.setdefault(first, set()).add(place)
        return [first, *(self.of((first, i)) for i in range(1, len(eqn.outvars)))]

    def call(self, eqn: Eqn, operands: list[int], decision: Decision | None) -> list[int]:
        plans = decision.call.plans if decision is not None and decision.call else None
        outs: list[list[int]] = []
        for i, part in enumerate(structure.parts(eqn)):
            inputs = [operands[place] for place in part.operands]
            looped = eqn.primitive.name in structure.LOOPS
            for k in range(part.carried.start, len(inputs) if looped else part.carried.start):
                inputs[k] = self.fresh()  # carried, or another slice in each turn
            if plans is not None:
                made = self.plan(plans[i], inputs)
            else:
                made = self.program(part.program, inputs, lambda _: None)
            if not part.is_condition:
                outs.append([self.fresh() for _ in made] if looped else made)
        first, *others = outs
        if not others:
            return first
        return [self.of(("one of", *each)) for each in zip(*outs, strict=True)]
