"""Cuts: low values that are stored between two operations that a group would compute together.

A later operation then reads the stored value instead of recomputing it, and the backward pass saves
it in place of its operands. A cut moves a rounding. It does not decide whether a value is low.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from mpjax._autocast.decide.states import Kind, State
from mpjax._autocast.known import traits
from mpjax._autocast.speed import exact, linear, passes
from mpjax._autocast.speed.hints import hint
from mpjax._autocast.speed.storage import CONVOLUTION, bends, ends_a_kernel
from mpjax._base import compat
from mpjax._jaxpr import structure
from mpjax._jaxpr.equation import Eqn, Jaxpr
from mpjax._jaxpr.op_rules import MOVES, only_moves
from mpjax._jaxpr.sizes import copies, size

_NOTHING: frozenset[Any] = frozenset()


class Cuts(NamedTuple):
    """The low values of a program that are stored where they are made."""

    stored: set[Any]
    read_twice: set[Any]  # those of them that two passes read: for a statistic, and with it
    turned: set[Any]  # those of them that a transpose makes of a product's result


def of_program(jaxpr: Jaxpr, fused: Sequence[bool], states: dict[Any, State]) -> Cuts:
    """Returns the cuts of a program.

    Args:
      jaxpr: open.
      fused: for each equation, whether it may run in a group.
      states: the state of each value.
    """
    curved = linear.curved(jaxpr, fused, states)
    twice = read_twice(jaxpr, fused, states, curved)
    others = merged(jaxpr, fused, states, curved) | copied_last(jaxpr, fused, states)
    turned = passes.turned(jaxpr, fused, states)
    exactly = read_exactly(jaxpr, fused, states, curved)
    return Cuts(exactly | others | twice | turned, twice, turned)


@hint("read_exactly", lambda *_: set[Any]())
def read_exactly(
    jaxpr: Jaxpr, fused: Sequence[bool], states: dict[Any, State], curved: set[Any]
) -> set[Any]:
    """Returns the low values that an exact function reads, as relu reads `x @ w + b`.

    Stored, such a value serves the product, the function and the derivative. A group around the
    bias and the relu would save its input and its result. A value after a nonlinear operation is
    not cut: its group saves its input anyway, and would save the value as well.
    """
    cuts: set[Any] = set()
    for eqn, is_fused in zip(jaxpr.eqns, fused, strict=True):
        if not is_fused:
            continue
        state = states[eqn.outvars[0]]
        if state.kind == Kind.LOW and exact.is_exact(eqn, state.dtype):
            operands = compat.variables(eqn)
            cuts.update(v for v in operands if states[v] == state and v not in curved)
    return cuts


@hint("read_twice", lambda *_: set[Any]())
def read_twice(
    jaxpr: Jaxpr, fused: Sequence[bool], states: dict[Any, State], curved: set[Any]
) -> set[Any]:
    """Returns the low values that are read again with their own statistics: `x` in `x - mean(x)`.

    Stored low, such a value is saved for the backward pass in place of its operands. A value in
    `curved` is not cut: after a nonlinear operation both would be saved.
    """
    twice: set[Any] = set()
    parts: dict[Any, frozenset[Any]] = {}  # for a concatenation, its operands from convolutions
    convolved: set[Any] = set()
    made_of: dict[Any, frozenset[Any]] = {}  # the low values from which a value was computed
    counted: dict[Any, frozenset[Any]] = {}  # the low values whose statistics went into a value
    for eqn, operands, is_fused in zip(jaxpr.eqns, structure.operands(jaxpr), fused, strict=True):
        name = eqn.primitive.name
        if not is_fused:
            convolved.update(eqn.outvars if name == CONVOLUTION else ())
            continue
        if name in traits.ADDS and not convolved.isdisjoint(operands):
            convolved.update(eqn.outvars)
        values, counts = _union(made_of, operands), _union(counted, operands)
        twice |= values & counts
        is_sum = ends_a_kernel(eqn)
        for v in eqn.outvars:
            if counts or is_sum:
                counted[v] = values | counts if is_sum else counts
            if states[v].kind == Kind.LOW and v not in curved and name not in MOVES:
                made_of[v] = frozenset({v})
                if name == "concatenate":
                    parts[v] = frozenset(values & convolved)
            elif values and not is_sum:
                made_of[v] = values
    return twice.union(*(parts.get(v, _NOTHING) for v in twice))


def _union(sets: dict[Any, frozenset[Any]], keys: Sequence[Any]) -> frozenset[Any]:
    """Returns the union of the sets of some keys."""
    first, *others = [sets[key] for key in keys if key in sets] or [_NOTHING]
    return first.union(*others) if others else first


@hint("merged", lambda *_: set[Any]())
def merged(
    jaxpr: Jaxpr, fused: Sequence[bool], states: dict[Any, State], curved: set[Any]
) -> set[Any]:
    """Returns the low sums of several low values that an activation reads: `tanh(x @ w + h @ u)`.

    Stored low, such a sum is saved for the backward pass in place of its terms, each of which a
    loop would copy to a stack, and is not computed again there.
    """
    cuts: set[Any] = set()
    sums: dict[Any, frozenset[Any]] = {}  # for a value, the last sum from which it was computed
    for eqn, operands, is_fused in zip(jaxpr.eqns, structure.operands(jaxpr), fused, strict=True):
        if not is_fused:
            continue
        read = _union(sums, operands)
        if read and bends(eqn):
            cuts |= read
        (out, *_) = eqn.outvars
        if out in curved:
            continue
        if states[out].kind == Kind.LOW and eqn.primitive.name in traits.ADDS:
            terms = {
                v
                for v in operands
                if states[v].kind == Kind.LOW and size(v.aval.shape) == size(out.aval.shape)
            }
            if read or len(terms) > 1:
                read = frozenset({out})
        if read:
            sums.update(dict.fromkeys(eqn.outvars, read))
    return cuts


@hint("copied_last", lambda *_: set[Any]())
def copied_last(jaxpr: Jaxpr, fused: Sequence[bool], states: dict[Any, State]) -> set[Any]:
    """Returns the low values that a group copies twice at its end, as an upsampling does.

    They are stored before the copy, and the cotangents of the two copies are added in low
    precision: a sum of two is rounded once. Else a TPU would store the sum and both copies in
    float32.
    """
    worked: set[Any] = set()
    copied: set[Any] = set()
    if not any(map(_copies_twice, jaxpr.eqns)):
        return copied
    for eqn, is_fused in zip(reversed(jaxpr.eqns), reversed(fused), strict=True):
        if is_fused and (not only_moves(eqn) or worked.intersection(eqn.outvars)):
            worked.update(compat.variables(eqn))
        elif is_fused and _copies_twice(eqn):
            copied.update(v for v in compat.variables(eqn) if states[v].kind == Kind.LOW)
    return copied


def _copies_twice(eqn: Eqn) -> bool:
    return eqn.primitive.name == "broadcast_in_dim" and copies(eqn) == 2
