"""A group as a function of its inputs. Equal groups are one function, so that JAX traces it once.

The layers of a network are equal groups, one a layer. Traced, differentiated and transposed one
by one they would be most of what autocast costs while tracing; JAX's own functions (softmax, gelu)
are traced once in the same way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import source_info_util

from mpjax._autocast.arrange.plan import Plan
from mpjax._autocast.decide import traits
from mpjax._autocast.product import precision
from mpjax._autocast.speed import (
    centred,
    curves,
    lowerings,
    moves,
    picks,
    recompute,
    storage,
)
from mpjax._autocast.speed.curves import widened
from mpjax._autocast.speed.marks import Group, low_cotangent, stored_dtype
from mpjax._autocast.speed.recompute import Apart, recomputed
from mpjax._base import compat
from mpjax._jaxpr.binding import bind, inside, written_at
from mpjax._jaxpr.keys import hashable, literal_key

Function = Callable[..., list[Any]]


class GroupFunctions:
    """The functions of the groups of one run, by what they compute and where it is written."""

    def __init__(self) -> None:
        self._functions: dict[Hashable, Function] = {}
        self._lines: dict[Any, str] = {}
        self.attentions: dict[Hashable, Any] = {}  # the programs of equal attentions

    def run(self, plan: Plan, group: Group, arrays: Sequence[Any]) -> list[Any]:
        """Returns the outputs of a group: of each the low form, then the full one, if wanted.

        Args:
          plan: what the group is of.
          group: which one.
          arrays: its inputs, as they are held.
        """
        eqns = group.eqns
        with eqns[0].ctx.manager:
            return self._run(plan, group, eqns, arrays)

    def _run(
        self, plan: Plan, group: Group, eqns: Sequence[Any], arrays: Sequence[Any]
    ) -> list[Any]:
        if not group.marks.checkpoint:
            return _function(plan, group, eqns, 0)(*arrays)
        around = _common_scopes(eqns)
        # A rule's group may hold tangents beside values. JAX takes all results of a function that
        # has a rule for unknown where one operand is a tangent, so that a group there has none.
        alone = plan.settings.in_loop or plan.settings.in_rule
        key = (alone, self._key(plan, group, eqns, around))
        if key not in self._functions:
            fun = _function(plan, group, eqns, around)
            apart = None if alone else _kept_apart(group, eqns)
            self._functions[key] = recomputed(fun, arrays, apart=apart)
        with inside(eqns[0], around):
            return self._functions[key](*arrays)

    def _key(self, plan: Plan, group: Group, eqns: Sequence[Any], around: int) -> Hashable:
        """Returns what equal groups have in common; their outer scopes may differ."""
        number = {v: i for i, v in enumerate(group.inputs)}
        found: list[Hashable] = [v.aval for v in group.inputs]
        for eqn in eqns:
            operands = [literal_key(v) if compat.is_literal(v) else number[v] for v in eqn.invars]
            params = [(name, hashable(value)) for name, value in sorted(eqn.params.items())]
            place = (eqn.source_info.name_stack[around:], self._line(eqn), eqn.ctx)
            low = low_cotangent(eqn, group, plan.states)
            found.append((eqn.primitive, *operands, *params, *place, low))
            number |= {v: i for i, v in enumerate(eqn.outvars, start=len(number))}
        outputs = ((number[v], plan.states[v].dtype, *forms) for v, *forms in group.outputs)
        return (*found, *outputs, *group.marks.numbered(number))

    def _line(self, eqn: Any) -> str:
        traceback = eqn.source_info.traceback
        if traceback not in self._lines:
            self._lines[traceback] = source_info_util.summarize(eqn.source_info)
        return self._lines[traceback]


def _common_scopes(eqns: Sequence[Any]) -> int:
    """Returns how many outer scopes the equations share."""
    stacks = [eqn.source_info.name_stack.stack for eqn in eqns]
    shared = 0
    for entries in zip(*stacks, strict=False):
        if any(entry != entries[0] for entry in entries):
            break
        shared += 1
    return shared


def _kept_apart(group: Group, eqns: Sequence[Any]) -> Apart | None:
    """Returns what keeps a group's inputs apart from those of its derivative, if that pays."""
    if group.marks.rows is not None:
        return functools.partial(recompute.one_apart, which=group.inputs.index(group.marks.rows))
    return recompute.all_apart if storage.worth_keeping_apart(eqns) else None


def _function(plan: Plan, group: Group, eqns: Sequence[Any], around: int) -> Function:
    unwidened = moves.moved_low(eqns)
    again = moves.moved_again(eqns, group.inputs)
    in_parts = moves.read_in_parts(eqns, {v for v, *_ in group.outputs})
    centres = centred.centred(eqns)
    picked_from = picks.picked_from(eqns)
    bent = _curves(plan, group, eqns, {*in_parts, *picked_from})

    def fun(*arrays: Any) -> list[Any]:
        given = dict(zip(group.inputs, arrays, strict=True))
        local = dict(given)
        picking = picks.Parts(picked_from, given)

        def part(v: Any, of: Sequence[int], cut: moves.Cut) -> Any:
            if compat.is_literal(v):
                return v.val
            if (eqn := in_parts.get(v)) is None:
                return widened(v, moves.cut(given.get(v, local[v]), of, cut))
            with written_at(eqn, around):
                return bind(eqn, [part(a, v.aval.shape, cut) for a in eqn.invars])[0]

        for eqn in eqns:
            if (first := eqn.outvars[0]) in bent:
                if (curve := bent[first]) is not None:
                    local[curve.result] = curve.run(given, local, around)
                continue
            variables = compat.variables(eqn)
            local.update({v: widened(v, local[v]) for v in variables if v not in unwidened})
            with written_at(eqn, around):
                values = centres.run(eqn, local, group.marks.dear)
                operands = [] if values else _operands(plan, group, eqn, local)
                values = values or picking.run(eqn, operands) or _bound(plan, eqn, operands)
            source = given.get(again.get(eqn.outvars[0]))
            if source is not None and source.dtype != values[0].dtype:
                values = [moves.valued(*values, widened(eqn.outvars[0], *bind(eqn, [source])))]
            values = _marked(plan, group, eqn, values)
            cuts = [] if in_parts.keys().isdisjoint(variables) else moves.cuts(eqn)
            if cuts:  # of one value
                (v,) = variables
                parts = (moves.as_result(eqn, part(v, v.aval.shape, cut)) for cut in cuts)
                values = [moves.valued(*both) for both in zip(values, parts, strict=True)]
            local.update(zip(eqn.outvars, values, strict=True))
        return _outputs(plan, group, local)

    return fun


def _bound(plan: Plan, eqn: Any, operands: Sequence[Any]) -> list[Any]:
    return bind(eqn, operands, precision.restored(eqn, plan.settings.float32_precision))


def _curves(
    plan: Plan, group: Group, eqns: Sequence[Any], others: set[Any]
) -> dict[Any, curves.Curve | None]:
    """Returns the curves of a group; in a loop none, whose backward pass is another loop."""
    if not group.marks.checkpoint or plan.settings.in_loop:
        return {}
    outputs = [v for v, *_ in group.outputs]
    return curves.curves(
        eqns, group.inputs, outputs, others | group.marks.several | group.marks.convolved
    )


def _marked(plan: Plan, group: Group, eqn: Any, values: Sequence[Any]) -> list[Any]:
    """Returns the results of an equation, and tells backends what is asked of them."""
    (first, *others), (var, *_) = values, eqn.outvars
    if var in group.marks.convolved:
        first = lowerings.summed(first, plan.states[var].dtype)
    if low := low_cotangent(eqn, group, plan.states):
        apart: bool | None = var not in group.marks.several
        if apart and group.marks.several:
            apart = None  # behind a norm: its kernel sums the bias with its scales and shifts
        first = lowerings.stored_cotangent(first, low, apart=apart)
    return [first, *others]


def _outputs(plan: Plan, group: Group, local: dict[Any, Any]) -> list[Any]:
    outs: list[Any] = []
    for var, is_low, is_full in group.outputs:
        if is_low:
            low_form = local[var].astype(plan.states[var].dtype)
            outs.append(lowerings.stored(low_form) if var in group.marks.stored else low_form)
        if is_full:
            outs.append(widened(var, local[var]))
    return outs


def _operands(plan: Plan, group: Group, eqn: Any, local: dict[Any, Any]) -> list[Any]:
    values = [a.val if compat.is_literal(a) else local[a] for a in eqn.invars]
    for i, v in enumerate(eqn.invars if eqn.primitive.name in traits.ADDS else ()):
        if not compat.is_literal(v) and v in group.marks.apart:
            # Repeated here, or its cotangent would be summed before it is stored.
            wide = jnp.broadcast_to(values[i], eqn.outvars[0].aval.shape)
            low = stored_dtype(group, plan.states)
            values[i] = lowerings.stored_cotangent(wide, low, apart=True)
    return values
