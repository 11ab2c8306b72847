"""Which operations are computed together in float32, and in what order everything runs.

Elementwise work, reductions and moves between two products are one kernel to XLA. So they are
computed in float32, and a value is rounded only where it is stored: read by a product, by another
group, or by a loop. That rounds once where an operation-by-operation cast rounds every time, and
a group recomputed in the backward pass keeps nothing but its low inputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from mpjax._autocast.arrange.plan import Step
from mpjax._autocast.decide import traits
from mpjax._autocast.decide.states import Kind, State, fits, of_literal, size
from mpjax._autocast.speed import (
    exact,
    linear,
    rows,
    storage,
)
from mpjax._autocast.speed.hints import hint
from mpjax._base import compat
from mpjax._jaxpr.op_rules import only_moves

_SMALL = 1024  # elements: below this a group costs more to wrap than it saves


# -- the order in which to run -------------------------------------------------------------------


def schedule(
    jaxpr: Any,
    fused: Sequence[bool],
    found: dict[Any, State],
    out_states: Sequence[State],
    multiplied: frozenset[Any],
) -> list[Step]:
    """Returns the steps of a jaxpr: its fused equations in groups, every other one alone.

    `multiplied` are the variables that products read, however late.
    """
    curved = linear.curved(jaxpr, fused, found)
    cuts = _read_exactly(jaxpr, fused, found, curved)
    twice = storage.read_twice(jaxpr, fused, found, curved)
    cuts |= storage.copied_last(jaxpr, fused, found)
    cuts |= twice | storage.merged(jaxpr, fused, found, curved)
    cuts |= _between_contexts(jaxpr)
    levels = _levels(jaxpr, fused, cuts)
    for _ in range(8):
        more = _cuts(jaxpr, fused, levels, found, out_states, multiplied)
        if more <= cuts:
            break
        cuts |= more
        levels = _levels(jaxpr, fused, cuts)
    components = _components(jaxpr, fused, levels, cuts)
    outside = _read_outside(jaxpr, components)
    returned = _returned(jaxpr, out_states)
    convolved = storage.convolved(jaxpr)
    steps: list[tuple[tuple[int, int, int], Step]] = []
    for indices in components:
        made = _group_steps(jaxpr, indices, outside, found, returned)
        for step in made:
            _mark(jaxpr, step, twice, found, convolved)
        steps += [((levels[indices[0]], 0, step.members[0]), step) for step in made]
    for i, is_fused in enumerate(fused):
        if not is_fused:
            steps.append(((levels[i], 1, i), Step([i])))
    _mark_stored(jaxpr, [step for _, step in steps])
    _mark_rows(jaxpr, [step for _, step in steps])
    return [step for _, step in sorted(steps, key=lambda pair: pair[0])]


@hint("read_exactly", lambda *_: set[Any]())
def _read_exactly(
    jaxpr: Any, fused: Sequence[bool], found: dict[Any, State], curved: set[Any]
) -> set[Any]:
    """Low values that an exact function reads, such as a biased product that relu reads.

    Stored, such a value serves product, function and derivative. A group around both would keep
    what it starts from and what it ends in. Where the group has to keep its start anyway, because
    what leads to the value is not linear, the value would be one more.
    """
    cuts: set[Any] = set()
    for eqn, is_fused in zip(jaxpr.eqns, fused, strict=True):
        if not is_fused:
            continue
        state = found[eqn.outvars[0]]
        if state.kind == Kind.LOW and exact.is_exact(eqn, state.dtype):
            operands = compat.variables(eqn)
            cuts.update(v for v in operands if found[v] == state and v not in curved)
    return cuts


def _between_contexts(jaxpr: Any) -> set[Any]:
    """Values made in one context and read in another: of a mesh, of `compute_on`, of metadata.

    A group runs in one context, its casts too.
    """
    if len({eqn.ctx for eqn in jaxpr.eqns}) < 2:
        return set()
    made = {v: eqn.ctx for eqn in jaxpr.eqns for v in eqn.outvars}
    if len(set(made.values())) < 2:
        return set()
    return {
        v for eqn in jaxpr.eqns for v in compat.variables(eqn) if made.get(v, eqn.ctx) != eqn.ctx
    }


def _levels(jaxpr: Any, fused: Sequence[bool], cuts: set[Any]) -> list[int]:
    """Groups at one level depend on nothing but what lower levels stored.

    What runs alone comes after the groups of its level, in the order in which it was written: a
    product of a product, or the arithmetic of an index, is at no higher level than what it reads.
    What reads the program's inputs alone comes before all groups.
    """
    in_groups: dict[Any, int] = {}  # the lowest level at which a group can read a value
    alone: dict[Any, int] = {}
    levels: list[int] = []
    effects = -1
    for eqn, is_fused in zip(jaxpr.eqns, fused, strict=True):
        lowest, base = (in_groups, 0) if is_fused else (alone, -1)
        level = max((lowest.get(v, base) for v in compat.variables(eqn)), default=base)
        if eqn.effects:
            level = max(level, effects)
            effects = level + 1
        levels.append(level)
        for v in eqn.outvars:
            in_groups[v] = level if is_fused and v not in cuts else level + 1
            alone[v] = level
    return levels


def _cuts(
    jaxpr: Any,
    fused: Sequence[bool],
    levels: list[int],
    found: dict[Any, State],
    out_states: Sequence[State],
    multiplied: frozenset[Any],
) -> set[Any]:
    """Low values that are stored anyway, and read where they are made: read them as stored.

    A residual stream is the case: without the cut, the group of its next normalisation would
    keep both terms of the sum instead of the sum. So are logits of which a loss gathers one: less
    than the logarithm of all, as they were before rounding, it could be negative.
    """
    made: dict[Any, int] = {
        v: level
        for eqn, level, is_fused in zip(jaxpr.eqns, levels, fused, strict=True)
        if is_fused
        for v in eqn.outvars
        if found[v].kind == Kind.LOW
    }
    here: set[Any] = set()
    later: set[Any] = set()
    for eqn, level, is_fused in zip(jaxpr.eqns, levels, fused, strict=True):
        if not is_fused:
            later.update(v for v in compat.variables(eqn) if v in made and v not in multiplied)
            continue
        for v in eqn.invars:
            if not compat.is_literal(v) and v in made:
                (here if made[v] == level else later).add(v)
    for v, state in zip(jaxpr.outvars, out_states, strict=True):
        if not compat.is_literal(v) and v in made and state.kind == Kind.LOW:
            later.add(v)
    return here & later


def _components(
    jaxpr: Any, fused: Sequence[bool], levels: list[int], cuts: set[Any]
) -> list[list[int]]:
    parent = list(range(len(levels)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    maker: dict[Any, int] = {}
    for i, eqn in enumerate(jaxpr.eqns):
        if not fused[i]:
            continue
        for v in compat.variables(eqn):
            j = None if v in cuts else maker.get(v)
            if j is not None and levels[j] == levels[i]:
                parent[root(i)] = root(j)
        maker.update(dict.fromkeys(eqn.outvars, i))
    found: dict[int, list[int]] = {}
    for i in range(len(levels)):
        if fused[i]:
            found.setdefault(root(i), []).append(i)
    return list(found.values())


def _read_outside(jaxpr: Any, components: list[list[int]]) -> set[Any]:
    """Returns the variables that are read by another group than the one that makes them."""
    group = {i: k for k, indices in enumerate(components) for i in indices}
    maker: dict[Any, int | None] = {}
    outside: set[Any] = set()
    for i, eqn in enumerate(jaxpr.eqns):
        mine = group.get(i)
        for v in compat.variables(eqn):
            if mine is None or maker.get(v, mine) != mine:
                outside.add(v)
        maker.update(dict.fromkeys(eqn.outvars, mine))
    return outside


def _returned(jaxpr: Any, out_states: Sequence[State]) -> dict[Any, tuple[bool, bool]]:
    """Returns of each variable that is an output whether its low and its float32 form are."""
    forms: dict[Any, tuple[bool, bool]] = {}
    for v, state in zip(jaxpr.outvars, out_states, strict=True):
        if not compat.is_literal(v):
            low, full = forms.get(v, (False, False))
            is_low = state.kind == Kind.LOW
            forms[v] = (low or is_low, full or not is_low)
    return forms


def _group_steps(
    jaxpr: Any,
    indices: list[int],
    outside: set[Any],
    found: dict[Any, State],
    returned: dict[Any, tuple[bool, bool]],
) -> list[Step]:
    eqns = [jaxpr.eqns[i] for i in indices]
    if all(only_moves(eqn) for eqn in eqns):
        return [Step([i]) for i in indices]
    made = {v for eqn in eqns for v in eqn.outvars}
    inputs = dict.fromkeys(
        v for eqn in eqns for v in eqn.invars if not compat.is_literal(v) and v not in made
    )
    outputs = {v: returned[v] for v in made & returned.keys()}
    for v in made & outside:
        low, full = outputs.get(v, (False, False))
        is_low = found[v].kind == Kind.LOW
        outputs[v] = (low or is_low, full or not is_low)
    ordered = tuple((v, *outputs[v]) for eqn in eqns for v in eqn.outvars if v in outputs)
    return [
        Step(
            indices,
            group=True,
            inputs=tuple(inputs),
            outputs=ordered,
            checkpoint=_worth_checkpoint(eqns, inputs, ordered, found),
            native=_is_native(eqns, ordered, found),
            repeated=frozenset(
                eqn.outvars[0] for eqn in eqns if eqn.primitive.name == "broadcast_in_dim"
            ),
        )
    ]


def _mark(
    jaxpr: Any, step: Step, twice: set[Any], found: dict[Any, State], convolved: set[Any]
) -> None:
    """Finds what a GPU is to hold low inside a group, where other devices fuse what reads it."""
    if not step.group:
        return
    eqns = [jaxpr.eqns[i] for i in step.members]
    if step.checkpoint:
        activated = storage.activated(eqns)
        step.several = frozenset(activated)
        step.dear = frozenset(v for v, is_dear in activated.items() if is_dear)
        return
    if not step.outputs or not all(low and not full for _, low, full in step.outputs):
        return
    joined = {eqn.outvars[0] for eqn in eqns if eqn.primitive.name == "concatenate"}
    step.several = frozenset(joined & twice)
    if not step.native:
        step.apart = frozenset(storage.summed_apart(eqns))
        step.convolved = storage.added_to_convolutions(convolved, eqns, step.inputs, found)


def _mark_stored(jaxpr: Any, steps: Sequence[Step]) -> None:
    """Finds which low outputs of groups a GPU would hold in float32 for those that read them.

    XLA cancels a rounding against the widening of a reader: of a group that takes a statistic. A
    sum it computes again there, unless the next sum reads it too, as of a residual stream.
    """
    by_statistic: set[Any] = set()
    by_sum: set[Any] = set()
    once: set[Any] = set()
    again: set[Any] = set()
    for step in steps:
        eqns = [jaxpr.eqns[i] for i in step.members if step.group]
        if any(map(storage.takes_a_statistic, eqns)):
            by_statistic.update(step.inputs)
        by_sum.update(v for e in eqns if storage.adds(e) for v in compat.variables(e))
        again |= once.intersection(step.inputs)
        once.update(step.inputs)
    by_both = by_statistic & by_sum & again
    for step in steps:
        if step.outputs:
            read = by_statistic if step.checkpoint else by_both
            step.stored = storage.held_low(step.outputs, read)


def _mark_rows(jaxpr: Any, steps: Sequence[Step]) -> None:
    """Finds the products' results of whose rows a group makes others, by a softmax.

    What is read elsewhere too may be kept for the gradient there, and would be kept twice.
    """
    reads = Counter(v for v in jaxpr.outvars if not compat.is_literal(v))
    for step in steps:
        reads.update(step.inputs if step.group else set(_operands(jaxpr, step)))
    stored = {v for v in rows.of_products(jaxpr) if reads[v] == 1}
    for step in steps:
        if step.checkpoint:
            eqns = [jaxpr.eqns[i] for i in step.members]
            step.rows = rows.normalised(eqns, [v for v in step.inputs if v in stored], step.outputs)


def _operands(jaxpr: Any, step: Step) -> list[Any]:
    return [v for i in step.members for v in compat.variables(jaxpr.eqns[i])]


def _is_native(
    eqns: Sequence[Any], outputs: Sequence[tuple[Any, bool, bool]], found: dict[Any, State]
) -> bool:
    """Whether a group is one operation on low values, to be run as it is."""
    working = [eqn for eqn in eqns if not only_moves(eqn)]
    if len(working) != 1 or not all(is_low and not is_full for _, is_low, is_full in outputs):
        return False
    (eqn,) = working
    state = found[eqn.outvars[0]]
    if state.kind != Kind.LOW:
        return False
    if eqn.primitive.name not in traits.ALONE and not exact.is_exact(eqn, state.dtype):
        return False
    if any(_is_repeated(v, eqn) for v in eqn.invars):
        return False
    for v in eqn.invars:
        operand = of_literal(v) if compat.is_literal(v) else found[v]
        if operand.kind in (Kind.FOREIGN, Kind.NEUTRAL):
            continue
        if operand.kind == Kind.CONSTANT and fits(operand, state.dtype):
            continue
        if operand != state:
            return False
    return True


def _is_repeated(operand: Any, eqn: Any) -> bool:
    """Whether an elementwise operation repeats an operand along an axis, as JAX 0.12 lets it.

    The derivative is a sum over that axis, of a bias over the batch: in low it would round, and in
    float16 be inf past 65504. In a group it is taken in float32, and XLA fuses the casts.
    """
    if compat.is_literal(operand) or eqn.primitive.name in ("concatenate", "stack", "pad"):
        return False
    return operand.aval.shape != eqn.outvars[0].aval.shape and operand.aval.dtype == "float32"


def low_cotangent(eqn: Any, step: Step, found: dict[Any, State]) -> Any:
    """Returns the dtype in which a GPU stores the cotangent of an equation's result, or None.

    It is that of a low value: of one that is read in several passes, and of the sum of a low input
    and a bias.
    """
    if any(v in step.several for v in eqn.outvars):
        return stored_dtype(step, found)
    return _biased_dtype(eqn, step, found) if step.checkpoint else None


def stored_dtype(step: Step, found: dict[Any, State]) -> Any:
    """Returns the dtype of the low values that a group reads or leaves."""
    stored = [*step.inputs, *(v for v, _, _ in step.outputs)]
    return next(found[v].dtype for v in stored if found[v].kind == Kind.LOW)


def _biased_dtype(eqn: Any, step: Step, found: dict[Any, State]) -> Any:
    if eqn.primitive.name != "add":
        return None
    for product, bias in (eqn.invars, eqn.invars[::-1]):
        if any(map(compat.is_literal, eqn.invars)) or product not in step.inputs:
            continue
        state = found[product]
        repeated = bias in step.repeated or _is_repeated(bias, eqn)
        if state.kind == Kind.LOW and repeated and not _is_repeated(product, eqn):
            return state.dtype
    return None


def _worth_checkpoint(
    eqns: Sequence[Any],
    inputs: Any,
    outputs: Sequence[tuple[Any, bool, bool]],
    found: dict[Any, State],
) -> bool:
    """Whether recomputing a group in the backward pass keeps less than its float32 interior."""
    stored = [*inputs, *(v for v, _, _ in outputs)]
    if not any(found[v].kind == Kind.LOW for v in stored):
        return False
    if compat.CHECKPOINTS_REFUSE_SUMS and any(
        compat.is_sum_yet_to_be_taken(v.aval) for v, _, _ in outputs
    ):
        return False
    made = [v.aval for eqn in eqns for v in eqn.outvars if hasattr(v.aval, "shape")]
    if sum(size(aval.shape) for aval in made) < _SMALL:
        return False
    return not all(linear.keeps_a_mask_at_most(eqn, found) for eqn in eqns)
