"""One expression, one rounding: where an expression is computed twice, both are rounded alike.

A softmax whose normaliser a loop computes reads its logits twice, once inside the loop and once
outside. Rounded in one place only, its rows do not sum to one. So where two equal products would be
held in different dtypes, both are in float32.

A checkpoint inside a derivative computes values of the forward pass again. Rounded where those were
not, they would belong to another function, and the gradient would be that function's. So a value
that one reader must not read rounded is not rounded for the readers of its copies either.

A program may write the same forward pass twice, as PPO does for the old policy and the new one,
and subtract one from the other: `log p - log p_old` is 0 at first. A cut through one of the two
stores, and so rounds, a value that the other one's kernels never store. So what such a difference
or ratio is made of is not rounded in either, but for the operands of products. Nor is it where the
same layers compute it of almost the same, as in the inverse of a reversible network: `b - f(a)` of
`b = b0 + f(a)` has another name than `b0`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

from mpjax._autocast.copies import gradients, recomputed
from mpjax._autocast.copies.numbering import Numbering, Visit, contracts
from mpjax._autocast.decide import read_flags
from mpjax._autocast.decide.decided import Action, Decided, Decision
from mpjax._autocast.known import facts, roots, scopes, walk
from mpjax._base.dtypes import FLOAT32
from mpjax._jaxpr import structure
from mpjax._jaxpr.op_rules import PRODUCTS

Asked = frozenset[tuple[Any, int]]
"""Flags of `read_flags` for values, asked beside those that their readers ask."""
NOTHING: Asked = frozenset()
Origins = frozenset[Hashable]
_CONSTANT: Origins = frozenset({"constant"})
_ONE_VALUE = read_flags.UNROUNDED | read_flags.ABSOLUTE
"""Flags that forbid rounding. Calls of one program share its values, so permissions stay apart."""


def asked(decided: Decided) -> Asked:
    """Returns what is to be asked of values so that equal ones are rounded alike.

    To be called again with what is decided with it, until there is nothing more to ask: flags
    of values first, which may change what is decided about products.
    """
    may_repeat = _may_repeat(decided)
    if not (may_repeat or any(gradients.kept(decided))):
        return NOTHING
    numbering = Numbering()
    numbering.walk(decided)
    of_gradients = gradients.asked(numbering.visits)
    return frozenset(of_gradients | _of_copies(decided, numbering) if may_repeat else of_gradients)


def _of_copies(decided: Decided, numbering: Numbering) -> set[tuple[Any, int]]:
    equal: dict[int, list[Visit]] = {}
    for visit in numbering.visits:
        equal.setdefault(visit.number, []).append(visit)
    copies = {n: visits for n, visits in equal.items() if len(visits) > 1}
    if copies and (alike := _alike(numbering)):
        return alike
    apart = _one_dtype(copies) | _unrounded_between(decided, copies)
    return apart | _of_one_layer(numbering) | recomputed.asked(decided, numbering)


def _may_repeat(decided: Decided) -> bool:
    """Whether two products of one form are of operands that are of the same: worth a walk."""
    seen: dict[Hashable, list[tuple[Origins, Origins]]] = {}
    for eqn, first, second in _products(decided, {}):
        shapes = [v.aval.shape for v in (*eqn.invars[:2], *eqn.outvars)]
        form = eqn.primitive.name, eqn.params.get("dimension_numbers"), *shapes
        alike = seen.setdefault(form, [])
        if any(first & one and second & other for one, other in alike):
            return True
        alike.append((first, second))
    return False


def _products(decided: Decided, outside: Mapping[int, Hashable]) -> Iterator[tuple[Any, ...]]:
    """Yields the products of a program, each with what its operands are functions of.

    Args:
      decided: about a program.
      outside: its numbers in facts, as they are called where the whole program is.
    """
    this = object()

    def origins(atom: Any) -> Origins:
        numbers = roots.numbers(facts.of_atom(atom, decided.facts).roots)
        return frozenset(outside.get(n, (this, n)) for n in numbers) or _CONSTANT

    for decision in decided.decisions:
        eqn = decision.eqn
        if decision.call is not None:
            for part, inner in zip(structure.parts(eqn), decision.call.programs, strict=True):
                names = walk.entering(eqn, part, decided.facts).outside.items()
                inside = {n: outside.get(m, (this, m)) if m >= 0 else "carried" for n, m in names}
                yield from _products(inner, inside)
        elif eqn.primitive.name in PRODUCTS:
            yield eqn, *map(origins, eqn.invars[:2])


def _one_dtype(copies: dict[int, list[Visit]]) -> set[tuple[Any, int]]:
    """Returns the flags by which equal products are held in one dtype."""
    asked_for: set[tuple[Any, int]] = set()
    for visits in copies.values():
        low = [v.decision.eqn.outvars[0] for v in visits if not _is_float32(v.decision)]
        if len(low) < len(visits):
            asked_for.update((v, read_flags.SAME) for v in low)
    return asked_for


def _is_float32(decision: Decision) -> bool:
    return decision.action is Action.PRODUCT and decision.out_dtype == FLOAT32


def _alike(numbering: Numbering) -> set[tuple[Any, int]]:
    """Returns the flags by which each value is read as if it and its copies were one value.

    What a loop's stop test reads is `TESTED` in the loop, and so is all that it is made of there. A
    copy outside is `AS_TESTED`: what that is made of is the same in each turn.
    """
    asked_for: set[tuple[Any, int]] = set()
    for flags in numbering.reads():
        union = functools.reduce(operator.or_, flags.values()) & _ONE_VALUE
        if union & read_flags.TESTED:
            union |= read_flags.AS_TESTED
        for v, read in flags.items():
            is_in_loop = read & read_flags.TESTED
            asks = union & ~(read_flags.AS_TESTED if is_in_loop else read_flags.TESTED)
            if asks & ~read:
                asked_for.add((v, asks))
    return asked_for


def _unrounded_between(decided: Decided, copies: dict[int, list[Visit]]) -> set[tuple[Any, int]]:
    """Returns the flags of values that are made of one product, computed at two places."""
    forward = [n for n, visits in copies.items() if sum(map(_is_forward, visits)) > 1]
    if not forward:
        return set()
    numbering = Numbering(frozenset(forward))
    numbering.walk(decided)
    return {(v, read_flags.AGAIN) for v in numbering.meeting}


def _of_one_layer(numbering: Numbering) -> set[tuple[Any, int]]:
    """Returns the flags by which a layer is computed alike in all places, if copies meet in one."""
    layers: dict[Hashable, list[Visit]] = {}
    for visit in numbering.visits:
        for layer in recomputed.layers_of(numbering, visit.decision.eqn, visit.operands):
            layers.setdefault(layer, []).append(visit)
    asked_for: set[tuple[Any, int]] = set()
    for visits in layers.values():
        if any(visit.read & read_flags.AGAIN for visit in visits):
            is_kept = any(visit.decision.action is not Action.PRODUCT for visit in visits)
            flags = read_flags.AGAIN | (read_flags.CANCELS if is_kept else 0)
            apart = (visit for visit in visits if flags & ~visit.read)
            asked_for.update((visit.decision.eqn.outvars[0], flags) for visit in apart)
    return asked_for


def _is_forward(visit: Visit) -> bool:
    eqn = visit.decision.eqn
    return contracts(eqn) and not scopes.is_transposed(eqn)
