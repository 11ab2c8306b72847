"""Groups the operations that are computed together in float32, and orders all steps.

XLA fuses the elementwise operations, reductions and moves between two products into one kernel. So
a group computes in float32, and rounds a value only where it is stored: where a product, another
group or a loop reads it. That rounds once where a cast of every operation rounds every time, and a
group that is recomputed in the backward pass saves nothing but its low inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpjax._autocast import speed
from mpjax._autocast.arrange import again
from mpjax._autocast.arrange.plan import PlanStep
from mpjax._autocast.decide.states import Kind, State
from mpjax._autocast.known import scopes
from mpjax._autocast.speed import FusedGroup
from mpjax._base import compat
from mpjax._jaxpr import structure
from mpjax._jaxpr.equation import Jaxpr
from mpjax._jaxpr.op_rules import only_moves


def schedule(
    jaxpr: Jaxpr,
    fused: Sequence[bool],
    states: dict[Any, State],
    out_states: Sequence[State],
    multiplied: frozenset[Any],
) -> list[PlanStep]:
    """Returns the steps of a jaxpr: its fused equations in groups, every other one alone.

    Args:
      jaxpr: open.
      fused: for each equation, whether it may run in a group.
      states: the state of each variable.
      out_states: the state of each output.
      multiplied: the variables that a product reads, directly or after moves.
    """
    stored = speed.cuts(jaxpr, fused, states)
    cuts = stored.stored | _between_contexts(jaxpr)
    levels = _levels(jaxpr, fused, cuts)
    while more := _cuts(jaxpr, fused, levels, states, out_states, multiplied) - cuts:
        cuts |= more  # splits a group, which may put another value between two groups
        levels = _levels(jaxpr, fused, cuts)
    components = _components(jaxpr, fused, levels, cuts)
    repeated = again.of(jaxpr, components)
    outside = _read_outside(jaxpr, components, repeated)
    returned = _returned(jaxpr, out_states)
    made = [
        (i, _group(jaxpr, i, more, outside, states, returned))
        for i, more in zip(components, repeated, strict=True)
    ]
    grouped = [(indices, group) for indices, group in made if group is not None]
    alone = [i for i, is_fused in enumerate(fused) if not is_fused]
    # At one level: groups (0), then equations alone (1), each in the program's order.
    order = {i: (levels[i], 1, i) for i in alone}
    for indices, group in made:
        members = indices if group is None else indices[:1]
        order |= {i: (levels[indices[0]], 0, i) for i in members}
        alone += indices if group is None else ()
    eqns = [jaxpr.eqns[i] for i in alone]
    marked = speed.marked(jaxpr, [g for _, g in grouped], eqns, stored, states)
    steps = [PlanStep(i, group) for (i, _), group in zip(grouped, marked, strict=True)]
    steps += [PlanStep([i]) for i in alone]
    return sorted(steps, key=lambda step: order[step.members[0]])


def _between_contexts(jaxpr: Jaxpr) -> set[Any]:
    """Returns the values made in one context and read in another: a mesh, `compute_on`, metadata.

    A group and its casts run in one context.
    """
    if len({eqn.ctx for eqn in jaxpr.eqns}) < 2:
        return set()
    made = {v: eqn.ctx for eqn in jaxpr.eqns for v in eqn.outvars}
    if len(set(made.values())) < 2:
        return set()
    return {
        v for eqn in jaxpr.eqns for v in compat.variables(eqn) if made.get(v, eqn.ctx) != eqn.ctx
    }


def _levels(jaxpr: Jaxpr, fused: Sequence[bool], cuts: set[Any]) -> list[int]:
    """Returns the level of each equation: a group reads only values stored at lower levels.

    An equation outside groups comes after the groups of its level, in the program's order: a
    product of a product, or the arithmetic of an index, has the level of its operands. An equation
    that reads only inputs of the program is at level -1, before all groups.
    """
    in_groups: dict[Any, int] = {}  # the lowest level at which a group can read a value
    alone: dict[Any, int] = {}
    levels: list[int] = []
    effects = -1
    for eqn, read, is_fused in zip(jaxpr.eqns, structure.operands(jaxpr), fused, strict=True):
        lowest, level = (in_groups, 0) if is_fused else (alone, -1)
        for v in read:
            level = max(level, lowest.get(v, level))
        if eqn.effects:  # effects stay in order: none runs at a lower level than the one before
            level = max(level, effects)
            effects = level + 1
        levels.append(level)
        for v in eqn.outvars:
            in_groups[v] = level if is_fused and v not in cuts else level + 1
            alone[v] = level
    return levels


def _cuts(
    jaxpr: Jaxpr,
    fused: Sequence[bool],
    levels: list[int],
    states: dict[Any, State],
    out_states: Sequence[State],
    multiplied: frozenset[Any],
) -> set[Any]:
    """Returns the low values that are stored anyway, and that their own group reads as well.

    The group then reads the stored value, so that all readers see one rounding. Example: a residual
    stream `x + f(norm(x) @ w)`. Without the cut, the group of the next normalisation would save
    both terms of the sum instead of the sum. Another: a loss that gathers one of its logits. The
    logsumexp of unrounded logits, less one rounded logit, could be negative.

    No cut is made for a backward pass that only multiplies by the value, as by `0.5 * (1 + tanh)`
    of a GELU: the forward pass then gives what it gives without one. See `again` for what a
    backward pass reads instead.
    """
    made: dict[Any, int] = {}
    forward: set[Any] = set()
    here: set[Any] = set()
    later: set[Any] = set()
    for i, read in enumerate(structure.operands(jaxpr)):
        eqn, level, is_backward = jaxpr.eqns[i], levels[i], scopes.is_transposed(jaxpr.eqns[i])
        for v in made.keys() & read:
            if not fused[i]:
                later.update({v} - multiplied)
            elif made[v] == level:
                here.add(v)
            elif not (is_backward and v in forward and again.only_multiplies(eqn, v)):
                later.add(v)
        low = [v for v in eqn.outvars if fused[i] and states[v].kind == Kind.LOW]
        made.update(dict.fromkeys(low, level))
        forward.update(() if is_backward else low)
    for v, state in zip(jaxpr.outvars, out_states, strict=True):
        if not compat.is_literal(v) and v in made and state.kind == Kind.LOW:
            later.add(v)
    return here & later


def _components(
    jaxpr: Jaxpr, fused: Sequence[bool], levels: list[int], cuts: set[Any]
) -> list[list[int]]:
    parent = list(range(len(levels)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    maker: dict[Any, int] = {}
    for i, (eqn, read) in enumerate(zip(jaxpr.eqns, structure.operands(jaxpr), strict=True)):
        if not fused[i]:
            continue
        for v in read:
            j = None if v in cuts else maker.get(v)
            if j is not None and levels[j] == levels[i]:
                parent[root(i)] = root(j)
        maker.update(dict.fromkeys(eqn.outvars, i))
    components: dict[int, list[int]] = {}
    for i in range(len(levels)):
        if fused[i]:
            components.setdefault(root(i), []).append(i)
    return list(components.values())


def _read_outside(
    jaxpr: Jaxpr, components: list[list[int]], repeated: Sequence[again.RunAgain]
) -> set[Any]:
    """Returns the variables that are read outside of the groups that make them."""
    reads = list(structure.operands(jaxpr))
    outside: set[Any] = set()
    for i in set(range(len(reads))).difference(*components):
        outside.update(reads[i])
    for indices, more in zip(components, repeated, strict=True):
        members = (*indices, *more.members)
        made = {v for i in members for v in jaxpr.eqns[i].outvars}
        outside.update(v for i in members for v in reads[i] if v not in made)
    return outside


def _returned(jaxpr: Jaxpr, out_states: Sequence[State]) -> dict[Any, tuple[bool, bool]]:
    """Returns, for each output variable, whether its low form and its float32 form are outputs."""
    forms: dict[Any, tuple[bool, bool]] = {}
    for v, state in zip(jaxpr.outvars, out_states, strict=True):
        if not compat.is_literal(v):
            low, full = forms.get(v, (False, False))
            is_low = state.kind == Kind.LOW
            forms[v] = (low or is_low, full or not is_low)
    return forms


def _group(
    jaxpr: Jaxpr,
    indices: list[int],
    repeated: again.RunAgain,
    outside: set[Any],
    states: dict[Any, State],
    returned: dict[Any, tuple[bool, bool]],
) -> FusedGroup | None:
    """Returns a group of equations, and of others that it repeats; None for moves alone.

    Moves run one by one: they do not round, and need no float32.
    """
    own = [jaxpr.eqns[i] for i in indices]
    if all(only_moves(eqn) for eqn in own):
        return None
    made = {v for eqn in own for v in eqn.outvars}
    outputs = {v: returned[v] for v in made & returned.keys()}
    for v in made & outside:
        low, full = outputs.get(v, (False, False))
        is_low = states[v].kind == Kind.LOW
        outputs[v] = (low or is_low, full or not is_low)
    ordered = tuple((v, *outputs[v]) for eqn in own for v in eqn.outvars if v in outputs)
    eqns = [jaxpr.eqns[i] for i in sorted((*indices, *repeated.members))]
    made.update(v for eqn in eqns for v in eqn.outvars)
    inputs = dict.fromkeys(
        v for eqn in eqns for v in eqn.invars if not compat.is_literal(v) and v not in made
    )
    marks = speed.Marks(behind=repeated.apart)
    return FusedGroup(tuple(eqns), tuple(inputs), ordered, marks)
