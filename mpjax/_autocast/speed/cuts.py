"""Where a low value is stored between two operations that a group would compute together.

Stored low, such a value is read again where it would be computed again, and the backward pass
keeps it in place of what it was made of. A cut moves a rounding. It does not decide whether a value
is low.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from mpjax._autocast.decide import traits
from mpjax._autocast.decide.states import Kind, State, copies, size
from mpjax._autocast.speed import exact, linear
from mpjax._autocast.speed.hints import hint
from mpjax._autocast.speed.storage import CONVOLUTION, bends, ends_a_kernel
from mpjax._base import compat
from mpjax._jaxpr.op_rules import MOVES, only_moves

_NOTHING: frozenset[Any] = frozenset()


class Cuts(NamedTuple):
    """The low values of a program that are stored where they are made."""

    stored: set[Any]
    read_twice: set[Any]  # those of them that stand between two passes over a value


def of_program(jaxpr: Any, fused: Sequence[bool], states: dict[Any, State]) -> Cuts:
    """Returns the cuts of a program.

    Args:
      jaxpr: open.
      fused: of each equation, whether it may run in a group.
      states: the state of each value.
    """
    curved = linear.curved(jaxpr, fused, states)
    twice = read_twice(jaxpr, fused, states, curved)
    others = merged(jaxpr, fused, states, curved) | copied_last(jaxpr, fused, states)
    return Cuts(read_exactly(jaxpr, fused, states, curved) | others | twice, twice)


@hint("read_exactly", lambda *_: set[Any]())
def read_exactly(
    jaxpr: Any, fused: Sequence[bool], states: dict[Any, State], curved: set[Any]
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
        state = states[eqn.outvars[0]]
        if state.kind == Kind.LOW and exact.is_exact(eqn, state.dtype):
            operands = compat.variables(eqn)
            cuts.update(v for v in operands if states[v] == state and v not in curved)
    return cuts


@hint("read_twice", lambda *_: set[Any]())
def read_twice(
    jaxpr: Any, fused: Sequence[bool], states: dict[Any, State], curved: set[Any]
) -> set[Any]:
    """Returns the low values that a group makes, and reads again beside their own statistics.

    Stored low, such a value is what the backward pass keeps, in place of what it was made of. Only
    sums and moves may lead to it, so that it is not in `curved`: else both would be kept.
    """
    twice: set[Any] = set()
    parts: dict[Any, frozenset[Any]] = {}  # of what is concatenated, what convolutions leave
    convolved: set[Any] = set()
    made_of: dict[Any, frozenset[Any]] = {}  # the low values that a value was computed from
    counted: dict[Any, frozenset[Any]] = {}  # those that statistics in it were taken of
    for eqn, is_fused in zip(jaxpr.eqns, fused, strict=True):
        name = eqn.primitive.name
        if not is_fused:
            convolved.update(eqn.outvars if name == CONVOLUTION else ())
            continue
        operands = compat.variables(eqn)
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
    present = [sets[key] for key in keys if key in sets]
    return present[0].union(*present[1:]) if present else _NOTHING


@hint("merged", lambda *_: set[Any]())
def merged(
    jaxpr: Any, fused: Sequence[bool], states: dict[Any, State], curved: set[Any]
) -> set[Any]:
    """Returns the low sums of several low values that an activation reads, as gates of an LSTM.

    Stored low, such a sum is kept for the backward pass in place of its terms, which a loop would
    each copy to a stack, and is not computed again there.
    """
    cuts: set[Any] = set()
    sums: dict[Any, frozenset[Any]] = {}  # the last sum that a value is of
    for eqn, is_fused in zip(jaxpr.eqns, fused, strict=True):
        if not is_fused:
            continue
        operands = compat.variables(eqn)
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
def copied_last(jaxpr: Any, fused: Sequence[bool], states: dict[Any, State]) -> set[Any]:
    """Returns the low values of which a group at last makes two copies, as it is upsampled.

    They are stored before, and the cotangents of both copies are added up as they are held: a sum
    of two is rounded once. Else a TPU would store the sum in float32, and the copies.
    """
    worked: set[Any] = set()
    copied: set[Any] = set()
    for eqn, is_fused in zip(reversed(jaxpr.eqns), reversed(fused), strict=True):
        if is_fused and (not only_moves(eqn) or worked.intersection(eqn.outvars)):
            worked.update(compat.variables(eqn))
        elif is_fused and eqn.primitive.name == "broadcast_in_dim" and copies(eqn) == 2:
            copied.update(v for v in compat.variables(eqn) if states[v].kind == Kind.LOW)
    return copied
