"""States of float32 values, known before anything is computed: pure data, and how they combine.

*Neutral* values (inputs, parameters) may be read in either dtype; *constants* have known values;
*low* ones are held in the compute dtype; *wide* ones in float32 because an operation asked for
it; *foreign* ones are not float32 and never touched.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpjax._base.dtypes import keeps


class Kind(enum.IntEnum):
    """The five states of a value."""

    FOREIGN = 0
    CONSTANT = 1
    NEUTRAL = 2
    LOW = 3
    WIDE = 4


class State(NamedTuple):
    """One value's state.

    `dtype` is that of a low value. `values` are those that a constant can have, None where they
    are not known. A wide value is `pure` if no low value took part in it, as in a normalised
    weight: rounding it where a product reads it would round the weight's gradient. It is `kept` if
    it is a state, which a program changes a little at a time: it is stored in float32 whoever
    reads it. A neutral value is `kept` if it is an input of its own or cut out of one, so that
    adding to it makes a state, and no row of a table. A wide value that `would_be` low is float32
    for the sake of a reader: what other operations make of it is as if it were low.
    """

    kind: Kind
    dtype: Any = None
    values: tuple[float, ...] | None = None
    pure: bool = False
    kept: bool = False
    would_be: Any = None

    @property
    def is_state(self) -> bool:
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
SMALLER = 16
"""A value with 1/16 of the elements of another costs next to nothing to store."""
_MAX_VALUES = 8


@functools.cache
def low(dtype: Any) -> State:
    """Returns the state of a value held in `dtype`."""
    return State(Kind.LOW, dtype=dtype)


def constant(*values: float) -> State:
    """Returns the state of a constant that has one of a few values."""
    distinct = tuple(sorted(set(values), key=repr))
    return State(Kind.CONSTANT, values=distinct if len(distinct) <= _MAX_VALUES else None)


def positions(count: Any) -> State:
    """Returns the state of 0, 1, 2 ...: of the last two, one is odd and tells whether all fit."""
    if not isinstance(count, int):  # `jax.export` leaves it open
        return UNKNOWN_CONSTANT
    return constant(0.0, float(max(count - 2, 0)), float(max(count - 1, 0)))


def of_literal(literal: Any) -> State:
    """Returns the state of a literal in an equation."""
    if literal.aval.dtype != np.float32:
        return FOREIGN
    return constant(float(literal.val)) if np.ndim(literal.val) == 0 else NEUTRAL


@functools.lru_cache(maxsize=4096)
def fits(state: State, dtype: Any) -> bool:
    """Whether a constant keeps its meaning in `dtype`: no overflow, no underflow, exact integers.

    A mask of -1e9 or an epsilon of 1e-8 would be -inf and 0 in float16; 257 would be 256 in
    bfloat16.
    """
    return state.values is not None and all(keeps(dtype, v) for v in state.values)


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
        return keep(state) if any(s.is_state for s in floats) else state
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


def keep(state: State) -> State:
    """Returns the state of the same value where a program keeps it and changes it a little."""
    rounded = state.kind == Kind.LOW or (state.kind == Kind.WIDE and not state.pure)
    return KEPT if rounded else KEPT_PURE


def unkept(state: State) -> State:
    """Returns a state without `kept`: a nonlinear operation made another value of it."""
    if state.is_state:
        return _wide([state])
    return NEUTRAL if state == INPUT else state


def total(state: State, dims: Sequence[Any]) -> State:
    """Returns the state of the sum of a constant over some dimensions, such as of one-hot rows."""
    values = state.values
    if values is None or not all(isinstance(n, int) for n in dims):
        return UNKNOWN_CONSTANT
    least, most = math.prod(dims) * min(values), math.prod(dims) * max(values)
    if not all(math.isfinite(v) and v == int(v) for v in (*values, least, most)):
        return UNKNOWN_CONSTANT
    if most - least < _MAX_VALUES:
        return constant(*map(float, range(int(least), int(most) + 1)))
    # The two at either end: one of each is odd, and tells whether all between them fit.
    return constant(least, least + 1, most - 1, most)


def join(states: Sequence[State]) -> State:
    """Returns a state that holds for each of several values: the branches of a `cond`."""
    first = states[0]
    if all(s == first for s in states):
        return first
    if any(s.kind == Kind.FOREIGN for s in states):
        return FOREIGN
    if all(s.kind == Kind.CONSTANT for s in states):
        values = [s.values for s in states]
        known = [v for v in values if v is not None]
        merged = constant(*(x for v in known for x in v))
        return merged if len(known) == len(values) else UNKNOWN_CONSTANT
    state = follow([as_low(s) for s in states])
    return unrounded(state) if any(s.would_be is not None for s in states) else state


def arithmetic(name: str, states: Sequence[State]) -> State:
    """Returns the state of an operation on constants: their values where they are few."""
    if any(s.values is None for s in states):
        return UNKNOWN_CONSTANT
    sets = [s.values or () for s in states]
    ops = {
        "add": np.add,
        "sub": np.subtract,
        "mul": np.multiply,
        "div": np.divide,
        "max": np.maximum,
        "min": np.minimum,
        "neg": np.negative,
    }
    if name not in ops or math.prod(map(len, sets)) > _MAX_VALUES:
        return UNKNOWN_CONSTANT
    with np.errstate(all="ignore"):
        grid = np.meshgrid(*(np.asarray(s, np.float32) for s in sets))
        return constant(*np.ravel(ops[name](*grid)).tolist())
