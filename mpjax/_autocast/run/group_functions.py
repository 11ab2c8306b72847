"""Makes each group a function of its inputs; equal groups share one, which JAX traces once.

The layers of a network have equal groups. If each were traced, differentiated and transposed by
itself, that would be most of autocast's tracing time. JAX shares its own functions (softmax, gelu)
in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from jax.extend import source_info_util

from mpjax._autocast import speed
from mpjax._autocast.arrange.plan import Plan
from mpjax._autocast.known import fusible
from mpjax._autocast.product import precision
from mpjax._autocast.speed import FusedGroup
from mpjax._jaxpr import keys
from mpjax._jaxpr.binding import bind, inside
from mpjax._jaxpr.equation import Eqn

Function = Callable[..., list[Any]]


class GroupFunctions:
    """The functions of the groups of one run, by their equations and source lines."""

    def __init__(self) -> None:
        self._functions: dict[Hashable, Function] = {}
        self._lines: dict[Any, str] = {}
        self.attentions: dict[Hashable, Any] = {}  # the programs of equal attentions

    def run(self, plan: Plan, group: FusedGroup, arrays: Sequence[Any]) -> list[Any]:
        """Returns the outputs of a group: for each its low form, then its float32 one, if wanted.

        Args:
          plan: the plan with the group.
          group: one of its groups.
          arrays: the inputs of the group, in the dtypes in which they were made.
        """
        with group.eqns[0].ctx.manager:
            return self._run(plan, group, arrays)

    def _run(self, plan: Plan, group: FusedGroup, arrays: Sequence[Any]) -> list[Any]:
        if not group.marks.checkpoint:
            return _function(plan, group, 0, alone=True)(*arrays)
        around = _common_scopes(group.eqns)
        # Inside a user's rule, operands of a group may be tangents. Where one operand of a
        # `custom_jvp` function is a tangent, JAX's partial evaluation takes all its results for
        # unknown: so a group there runs without a rule of ours. And inside such a rule JAX cannot
        # differentiate a `custom_vjp` function twice.
        alone = plan.settings.in_loop or plan.settings.in_rule
        alone = alone or any(map(fusible.holds_a_custom_vjp, group.eqns))
        key = (alone, self._key(plan, group, around))
        if key not in self._functions:
            fun = _function(plan, group, around, alone=alone)
            self._functions[key] = speed.recomputed(fun, group, arrays, alone=alone)
        with inside(group.eqns[0], around):
            return self._functions[key](*arrays)

    def _key(self, plan: Plan, group: FusedGroup, around: int) -> Hashable:
        """Returns the key of a group: equal for equal groups, whose outer scopes may differ."""
        number = {v: i for i, v in enumerate(group.inputs)}
        content: list[Hashable] = [v.aval for v in group.inputs]
        for eqn in group.eqns:
            place = (eqn.source_info.name_stack[around:], self._line(eqn), eqn.ctx)
            low = speed.low_cotangent(eqn, group, plan.states)
            content.append((*keys.equation(eqn, number), *place, low))
            number |= {v: i for i, v in enumerate(eqn.outvars, start=len(number))}
        outputs = ((number[v], plan.states[v].dtype, *forms) for v, *forms in group.outputs)
        return (*content, *outputs, *group.marks.numbered(number))

    def _line(self, eqn: Eqn) -> str:
        traceback = eqn.source_info.traceback
        if traceback not in self._lines:
            self._lines[traceback] = source_info_util.summarize(eqn.source_info)
        return self._lines[traceback]


def _common_scopes(eqns: Sequence[Eqn]) -> int:
    """Returns the number of outer scopes that the equations share."""
    stacks = [eqn.source_info.name_stack.stack for eqn in eqns]
    shared = 0
    for entries in zip(*stacks, strict=False):
        if any(entry != entries[0] for entry in entries):
            break
        shared += 1
    return shared


def _function(plan: Plan, group: FusedGroup, around: int, *, alone: bool) -> Function:
    in_loop = plan.settings.in_loop
    ways = speed.Ways(group, plan.states, in_loop=in_loop, alone=alone, around=around)

    def bound(eqn: Eqn, operands: Sequence[Any]) -> list[Any]:
        return bind(eqn, operands, precision.restored(eqn, plan.settings.float32_precision))

    def fun(*arrays: Any, statistics: Any = None) -> list[Any]:
        running = ways.on(arrays, statistics)
        for eqn in ways.eqns:
            running.run(eqn, bound)
        return running.outputs()

    return fun
