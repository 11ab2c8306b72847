"""Marks: the values of a group that a backend stores low, computes again, or sums separately.

No mark changes a result: on a CPU all values and gradients have the same bits without it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from mpjax._autocast.decide.states import Kind, State, fits, of_literal
from mpjax._autocast.known import traits
from mpjax._autocast.speed import exact, linear, passes, rows, storage
from mpjax._autocast.speed.cuts import Cuts
from mpjax._base import compat
from mpjax._jaxpr.equation import Eqn, Jaxpr
from mpjax._jaxpr.op_rules import only_moves
from mpjax._jaxpr.sizes import size

_SMALL = 1024  # elements: below this a group costs more to wrap than it saves


@dataclass(frozen=True)
class Marks:
    """The marks of one group. Equal groups with equal marks share a function."""

    checkpoint: bool = False  # recomputed in the backward pass, from its inputs
    native: bool = False  # one operation, run on low operands as it is
    repeated: frozenset[Any] = frozenset()  # results of `broadcast_in_dim` inside the group
    several: frozenset[Any] = frozenset()  # values whose cotangents are read in several passes
    dear: frozenset[Any] = frozenset()  # those of them whose cotangents XLA would not compute twice
    apart: frozenset[Any] = frozenset()  # terms whose cotangents are sums, each in its own pass
    convolved: frozenset[Any] = frozenset()  # sums that cuDNN computes with a convolution
    rows: Any = None  # the input of a softmax of rows, which forward and backward each read
    passed: Any = None  # the input of a softmax or a loss in several kernels, one a pass
    stored: frozenset[Any] = frozenset()  # outputs that a GPU stores low for all their readers
    behind: frozenset[Any] = frozenset()  # inputs of what is computed again, behind a barrier
    summed: frozenset[Any] = frozenset()  # low outputs of a backward pass that the group sums too

    def numbered(self, number: dict[Any, int]) -> tuple[Any, ...]:
        """Returns the marks with numbers in place of variables: equal for equal groups."""
        values = (getattr(self, field.name) for field in fields(self))
        return tuple(
            frozenset(number[v] for v in value)
            if isinstance(value, frozenset)
            else number.get(value, value)
            for value in values
        )


class FusedGroup(NamedTuple):
    """Equations that run together in float32.

    `outputs` are the variables read elsewhere, each with whether its low form, its float32 form,
    or both are wanted.
    """

    eqns: tuple[Eqn, ...]
    inputs: tuple[Any, ...]
    outputs: tuple[tuple[Any, bool, bool], ...]
    marks: Marks = Marks()


def of_groups(
    jaxpr: Jaxpr,
    groups: Sequence[FusedGroup],
    alone: Sequence[Any],
    cuts: Cuts,
    states: dict[Any, State],
) -> list[FusedGroup]:
    """Returns the groups of a program with their marks.

    Args:
      jaxpr: open.
      groups: its groups.
      alone: the equations outside groups.
      cuts: the values that are stored where they are made.
      states: the state of each value.
    """
    convolved = storage.convolved(jaxpr)
    marks = [_of_group(group, convolved, cuts.read_twice, states) for group in groups]
    stored = _stored(groups, marks)
    rows_of = _rows(jaxpr, groups, alone, marks, cuts.turned)
    return [
        group._replace(marks=replace(mark, stored=low, rows=row, passed=passed))
        for group, mark, low, (row, passed) in zip(groups, marks, stored, rows_of, strict=True)
    ]


def _of_group(
    group: FusedGroup, convolved: set[Any], twice: set[Any], states: dict[Any, State]
) -> Marks:
    """Returns a group's marks with those that do not depend on other groups."""
    eqns, inputs, outputs, _ = group
    repeated = (eqn.outvars[0] for eqn in eqns if eqn.primitive.name == "broadcast_in_dim")
    marks = replace(
        group.marks,
        checkpoint=_worth_checkpoint(eqns, inputs, outputs, states),
        native=_is_native(eqns, outputs, states),
        repeated=frozenset(repeated),
        summed=storage.summed_cotangents(eqns, outputs),
    )
    if marks.checkpoint:
        activated = storage.activated(eqns)
        dear = frozenset(v for v, is_dear in activated.items() if is_dear)
        return replace(marks, several=frozenset(activated), dear=dear)
    if not outputs or not all(low and not full for _, low, full in outputs):
        return marks
    joined = {eqn.outvars[0] for eqn in eqns if eqn.primitive.name == "concatenate"}
    marks = replace(marks, several=frozenset(joined & twice))
    if marks.native:
        return marks
    return replace(
        marks,
        apart=frozenset(storage.summed_apart(eqns)),
        convolved=storage.added_to_convolutions(convolved, eqns, inputs, states),
    )


def _stored(groups: Sequence[FusedGroup], marks: Sequence[Marks]) -> list[frozenset[Any]]:
    """Returns, for each group, the low outputs that a GPU would store in float32 for their readers.

    XLA:GPU cancels a rounding against the widening in a reader that takes a statistic (a norm). A
    sum is recomputed there and not stored, unless the next sum reads it too: a residual stream.
    """
    by_statistic: set[Any] = set()
    by_sum: set[Any] = set()
    once: set[Any] = set()
    again: set[Any] = set()
    for eqns, inputs, *_ in groups:
        if any(map(storage.takes_a_statistic, eqns)):
            by_statistic.update(inputs)
        by_sum.update(v for e in eqns if storage.adds(e) for v in compat.variables(e))
        again |= once.intersection(inputs)
        once.update(inputs)
    often = by_statistic & by_sum & again
    return [
        storage.held_low(group.outputs, by_statistic if mark.checkpoint else often)
        for group, mark in zip(groups, marks, strict=True)
    ]


def _rows(
    jaxpr: Jaxpr,
    groups: Sequence[FusedGroup],
    alone: Sequence[Any],
    marks: Sequence[Marks],
    turned: set[Any],
) -> list[tuple[Any, Any]]:
    """Returns, for each group, the result of a product of which it computes a softmax, or None.

    The first of the two is that of a softmax in one kernel, the second that of one in several.

    The group must be its only reader: another one may save it too, and so it would be saved twice.
    """
    reads = Counter(v for v in jaxpr.outvars if not compat.is_literal(v))
    for group in groups:
        reads.update(group.inputs)
    for eqn in alone:
        reads.update(set(compat.variables(eqn)))
    stored = {v for v in rows.of_products(jaxpr) | turned if reads[v] == 1}
    return [
        _rows_of(group, [v for v in group.inputs if v in stored], turned)
        if mark.checkpoint
        else (None, None)
        for group, mark in zip(groups, marks, strict=True)
    ]


def _rows_of(group: FusedGroup, stored: Sequence[Any], turned: set[Any]) -> tuple[Any, Any]:
    in_order = [v for v in stored if v not in turned]
    in_a_kernel = rows.normalised(group.eqns, in_order, group.outputs)
    if in_a_kernel is not None:
        return rows.rows_apart(in_a_kernel), None
    return None, passes.passed_over(group.eqns, stored)


def _is_native(
    eqns: Sequence[Eqn], outputs: Sequence[tuple[Any, bool, bool]], states: dict[Any, State]
) -> bool:
    """Whether a group is one operation on low values, such as a `max`, that runs without casts."""
    working = [eqn for eqn in eqns if not only_moves(eqn)]
    if len(working) != 1 or not all(is_low and not is_full for _, is_low, is_full in outputs):
        return False
    (eqn,) = working
    state = states[eqn.outvars[0]]
    if state.kind != Kind.LOW:
        return False
    if eqn.primitive.name not in traits.ALONE and not exact.is_exact(eqn, state.dtype):
        return False
    if any(_is_repeated(v, eqn) for v in eqn.invars):
        return False
    for v in eqn.invars:
        operand = of_literal(v) if compat.is_literal(v) else states[v]
        if operand.kind == Kind.FOREIGN:
            continue
        if operand.kind == Kind.CONSTANT and fits(operand, state.dtype):
            continue
        if operand != state:
            return False
    return True


def _is_repeated(operand: Any, eqn: Eqn) -> bool:
    """Whether an elementwise operation broadcasts an operand along an axis, which JAX 0.12 allows.

    The cotangent of that operand is a sum over the axis, of a bias over the batch. In low precision
    the sum would round, and in float16 be inf past 65504. A group sums in float32, and XLA fuses
    the casts.
    """
    if compat.is_literal(operand) or eqn.primitive.name in traits.PUTS_TOGETHER:
        return False
    return operand.aval.shape != eqn.outvars[0].aval.shape and operand.aval.dtype == "float32"


def low_cotangent(eqn: Eqn, group: FusedGroup, states: dict[Any, State]) -> Any:
    """Returns the low dtype in which a GPU stores the cotangent of an equation's result, or None.

    It is low for a value that is read in several passes, and for `x @ w + b`.
    """
    if any(v in group.marks.several for v in eqn.outvars):
        return stored_dtype(group, states)
    return _biased_dtype(eqn, group, states) if group.marks.checkpoint else None


def stored_dtype(group: FusedGroup, states: dict[Any, State]) -> Any:
    """Returns the dtype of the low values among a group's inputs and outputs."""
    stored = [*group.inputs, *(v for v, _, _ in group.outputs)]
    return next(states[v].dtype for v in stored if states[v].kind == Kind.LOW)


def _biased_dtype(eqn: Eqn, group: FusedGroup, states: dict[Any, State]) -> Any:
    if eqn.primitive.name != "add":
        return None
    for product, bias in (eqn.invars, eqn.invars[::-1]):
        if any(map(compat.is_literal, eqn.invars)) or product not in group.inputs:
            continue
        state = states[product]
        repeated = bias in group.marks.repeated or _is_repeated(bias, eqn)
        if state.kind == Kind.LOW and repeated and not _is_repeated(product, eqn):
            return state.dtype
    return None


def _worth_checkpoint(
    eqns: Sequence[Eqn],
    inputs: Any,
    outputs: Sequence[tuple[Any, bool, bool]],
    states: dict[Any, State],
) -> bool:
    """Whether a recomputed group saves less for the backward pass than one that is not.

    A small group does not, nor one without low inputs or outputs, nor one whose derivative saves
    no float32 value.
    """
    stored = [*inputs, *(v for v, _, _ in outputs)]
    if not any(states[v].kind == Kind.LOW for v in stored):
        return False
    if compat.CHECKPOINTS_REFUSE_SUMS and any(
        compat.is_sum_yet_to_be_taken(v.aval) for v, _, _ in outputs
    ):
        return False
    made = [v.aval for eqn in eqns for v in eqn.outvars if hasattr(v.aval, "shape")]
    if sum(size(aval.shape) for aval in made) < _SMALL:
        return False
    return not all(linear.keeps_a_mask_at_most(eqn, states) for eqn in eqns)
