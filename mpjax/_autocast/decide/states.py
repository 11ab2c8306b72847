"""States of float32 values, known before anything is computed: pure data, and how they combine.

*Neutral* values (inputs, parameters) may be read in either dtype; *constants* have known values;
*low* ones are held in the compute dtype; *wide* ones in float32 because an operation asked for
it; *foreign* ones are not float32 and never touched.
"""

from __future__ import annotations

import enum
import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpjax._autocast.known import constants


class Kind(enum.IntEnum):
    """The five states of a value."""

    FOREIGN = 0
    CONSTANT = 1
    NEUTRAL = 2
    LOW = 3
    WIDE = 4


class State(NamedTuple):
    """One value's state.

    `dtype` is that of a low value, or of a neutral one that was held in it and widened. `values`
    are those that a constant can have, None where they are not known. A wide value is `pure` if no
    low value took part in it, as in a normalised weight: rounding it where a product reads it would
    round the weight's gradient. It is `kept` if it is recurrent, so that a program changes it a
    little at a time: it is stored in float32 whoever reads it. A neutral value is `kept` if it is
    an input of its own or cut out of one: adding to it makes a recurrent state, adding to a row of
    a table does not. A wide value that `would_be` low is float32 for the sake of a reader: what
    other operations make of it is as if it were low.
    """

    kind: Kind
    dtype: Any = None
    values: tuple[float, ...] | None = None
    pure: bool = False
    kept: bool = False
    would_be: Any = None

    @property
    def is_recurrent(self) -> bool:
        """Whether the value is what a program changes a little at a time."""
        return self.kind == Kind.WIDE and self.kept


FOREIGN = State(Kind.FOREIGN)
NEUTRAL = State(Kind.NEUTRAL)
INPUT = State(Kind.NEUTRAL, kept=True)
WIDE = State(Kind.WIDE)
KEPT = State(Kind.WIDE, kept=True)
WIDE_PURE = State(Kind.WIDE, pure=True)
KEPT_PURE = State(Kind.WIDE, pure=True, kept=True)
UNKNOWN_CONSTANT = State(Kind.CONSTANT)


@functools.cache
def low(dtype: Any) -> State:
    """Returns the state of a value held in `dtype`."""
    return State(Kind.LOW, dtype=dtype)


@functools.cache
def widened(dtype: Any) -> State:
    """Returns the state of an input that is float32 for being read, and was held in `dtype`."""
    return State(Kind.NEUTRAL, dtype=dtype)


def as_held(state: State) -> State:
    """Returns the state of a value in the dtype in which it was held: the same numbers."""
    return low(state.dtype) if state.kind == Kind.NEUTRAL and state.dtype else state


def constant(values: constants.Values) -> State:
    """Returns the state of a constant, whose values may be known."""
    return State(Kind.CONSTANT, values=values)


def of_literal(literal: Any) -> State:
    """Returns the state of a literal in an equation."""
    if literal.aval.dtype != np.float32:
        return FOREIGN
    return constant((float(literal.val),)) if np.ndim(literal.val) == 0 else NEUTRAL


def fits(state: State, dtype: Any) -> bool:
    """Whether a constant keeps its meaning in `dtype`."""
    return constants.fit(state.values, dtype)


def unrounded(state: State) -> State:
    """Returns the state of a low value that is held in float32 for the sake of a reader."""
    return _unrounded(state.dtype) if state.kind == Kind.LOW else state


@functools.cache
def _unrounded(dtype: Any) -> State:
    return State(Kind.WIDE, would_be=dtype)


def as_low(state: State) -> State:
    """Returns the state of a value but for what readers ask of it."""
    return state if state.would_be is None else low(state.would_be)


def follow(states: Sequence[State], *, widest: bool = False) -> State:
    """Returns the state of the result of an operation that takes the dtype of its operands."""
    floats = [s for s in states if s.kind != Kind.FOREIGN]
    kinds = {s.kind for s in floats}
    lows = {s.dtype for s in floats if s.kind == Kind.LOW}
    if Kind.WIDE in kinds:
        state = _wide(floats)
        return kept(state) if any(s.is_recurrent for s in floats) else state
    if not lows:
        inputs = INPUT if INPUT in floats else NEUTRAL
        return inputs if Kind.NEUTRAL in kinds else UNKNOWN_CONSTANT
    if len(lows) > 1 or (widest and Kind.NEUTRAL in kinds):
        return WIDE
    (dtype,) = lows
    if all(fits(s, dtype) for s in floats if s.kind == Kind.CONSTANT):
        return low(dtype)
    return WIDE


def full(states: Sequence[State]) -> State:
    """Returns the state of the result of an operation that computes in float32."""
    kinds = {s.kind for s in states}
    if kinds <= {Kind.FOREIGN, Kind.CONSTANT}:
        return UNKNOWN_CONSTANT
    return _wide(states)


def unknown(states: Sequence[State]) -> State:
    """Returns the state of the result of an operation of which nothing is known."""
    touched = any(s.kind in (Kind.LOW, Kind.WIDE) for s in states)
    return _wide(states) if touched else NEUTRAL


def _wide(states: Sequence[State]) -> State:
    """Returns the state of what is made in float32 of several values: pure, unless one is not."""
    rounded = any(s.kind == Kind.LOW or (s.kind == Kind.WIDE and not s.pure) for s in states)
    return WIDE if rounded else WIDE_PURE


def kept(state: State) -> State:
    """Returns the state of the same value where a program keeps it and changes it a little."""
    rounded = state.kind == Kind.LOW or (state.kind == Kind.WIDE and not state.pure)
    return KEPT if rounded else KEPT_PURE


def unkept(state: State) -> State:
    """Returns a state without `kept`: a nonlinear operation made another value of it."""
    if state.is_recurrent:
        return _wide([state])
    return NEUTRAL if state == INPUT else state


def join(states: Sequence[State]) -> State:
    """Returns a state that holds for each of several values: the branches of a `cond`."""
    first = states[0]
    if all(s == first for s in states):
        return first
    if any(s.kind == Kind.FOREIGN for s in states):
        return FOREIGN
    if all(s.kind == Kind.CONSTANT for s in states):
        known = [s.values for s in states if s.values is not None]
        is_known = len(known) == len(states)
        return constant(constants.few(*itertools.chain(*known)) if is_known else None)
    state = follow([as_low(s) for s in states])
    return unrounded(state) if any(s.would_be is not None for s in states) else state
