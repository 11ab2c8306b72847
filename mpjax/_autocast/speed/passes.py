"""Softmaxes whose rows no kernel holds: each pass over the rows recomputes what it reads.

A softmax passes over its rows three times: for the maximum, for the sum of exponentials and for the
weights; its gradient passes over them twice. One kernel does all of it for a row that it holds
(`rows`). If a transpose makes the rows, as einsum does for grouped queries, or if they are long, as
those of a loss, XLA:GPU makes a kernel of each pass. It stores an expensive value, such as a
`tanh` that caps the logits or an exponential, in float32 in one kernel for the next. With the low
logits behind another barrier for each pass, each kernel recomputes that value from the logits, and
reads half of the bytes or less. The weights are stored low too: the product of the backward pass
reads them in another order, and XLA would recompute them for it from a stored float32 value.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax import lax
from jax.extend.core import Var

from mpjax._autocast.decide.states import Kind, State
from mpjax._autocast.known import traits
from mpjax._autocast.speed import lowerings, moves, rows, storage
from mpjax._autocast.speed.curves import widened
from mpjax._autocast.speed.hints import hint
from mpjax._base import compat
from mpjax._base.dtypes import FLOAT32
from mpjax._jaxpr import structure
from mpjax._jaxpr.binding import bind, written_at
from mpjax._jaxpr.equation import Eqn, Jaxpr
from mpjax._jaxpr.sizes import size

# -- where there are several passes ----------------------------------------------------------------


@hint("passes_apart", lambda *_: None)
def passed_over(eqns: Sequence[Eqn], stored: Iterable[Any]) -> Any:
    """Returns the input over whose rows a group passes in several kernels, or None.

    Args:
      eqns: the equations of the group.
      stored: its inputs that are results of products, perhaps transposed.
    """
    if not any(map(storage.takes_a_statistic, eqns)):
        return None
    return next((v for v in stored if Passes(eqns, v).later), None)


def turned(jaxpr: Jaxpr, fused: Sequence[bool], states: Mapping[Any, State]) -> set[Any]:
    """Returns the low values that a transpose makes of a product's result, for several passes.

    Transposed and stored low, they are read row by row. Otherwise XLA would store float32 values
    that it computes from them, in both orders.
    """
    if not any(eqn.primitive.name == "transpose" for eqn in jaxpr.eqns):
        return set()
    readers = moves.read_at(jaxpr.eqns)
    cuts: set[Any] = set()
    for v in rows.of_products(jaxpr):
        is_turned = False
        while (moved := _moved_alone(jaxpr, readers.get(v, []), fused)) is not None:
            is_turned |= rows.turns(moved, size(v.aval.shape))
            (v,) = moved.outvars
        if is_turned and states[v].kind == Kind.LOW:
            behind = list(_behind(jaxpr, v, readers, fused))
            cuts.update([v] if behind and passed_over(behind, [v]) is not None else [])
    return cuts


def _moved_alone(jaxpr: Jaxpr, readers: Sequence[int], fused: Sequence[bool]) -> Any:
    """Returns the only reader of a value, if it is a move."""
    if len(readers) != 1 or not fused[readers[0]]:
        return None
    eqn = jaxpr.eqns[readers[0]]
    return eqn if eqn.primitive.name in ("transpose", "reshape") else None


def _behind(
    jaxpr: Jaxpr, of: Any, readers: Mapping[Any, Sequence[int]], fused: Sequence[bool]
) -> Iterator[Any]:
    """Yields the fused equations that lead from a value, with others, in order."""
    waiting = [i for i in readers.get(of, ()) if fused[i]]
    reached = set(waiting)
    while waiting:  # a heap: in time of what is reached, not of the program
        eqn = jaxpr.eqns[heapq.heappop(waiting)]
        yield eqn
        for v in eqn.outvars:
            for i in readers.get(v, ()):
                if fused[i] and i not in reached:
                    reached.add(i)
                    heapq.heappush(waiting, i)


class Passes:
    """The values of a group that are read in a later pass than that which makes them.

    Args:
      eqns: the group; functions in it that take statistics are opened.
      of: the input over whose rows it passes; None if it does not.
    """

    def __init__(self, eqns: Sequence[Eqn], of: Any) -> None:
        self.of = of
        self.eqns = eqns if of is None else _inlined(eqns)
        self.makers = {v: eqn for eqn in self.eqns for v in eqn.outvars}
        self.made: dict[Any, int] = {}  # the pass in which a large value of the rows is made
        self.costly: set[Any] = set()  # those of them that XLA would store
        self.later: dict[Any, int] = {}  # the pass of an equation that reads an earlier one's
        if of is not None:
            self._number()

    def _number(self) -> None:
        ready: dict[Any, int] = {}  # how many statistics a value waits for, one after another
        self.made[self.of] = 0
        for eqn in self.eqns:
            operands = compat.variables(eqn)
            now = max((ready.get(v, 0) for v in operands), default=0)
            ready |= dict.fromkeys(eqn.outvars, now + storage.takes_a_statistic(eqn))
            if any(self.made[v] < now for v in self.costly.intersection(operands)):
                self.later[eqn.outvars[0]] = now
            if self.made.keys() & operands and self._is_large(eqn.outvars[0]):
                self.made |= dict.fromkeys(eqn.outvars, now)
                if _is_costly(eqn) or self.costly.intersection(operands):
                    self.costly.update(eqn.outvars)
        if len(self.made) > storage.MOST_AGAIN:
            self.later.clear()

    def _is_large(self, v: Any) -> bool:
        return size(v.aval.shape) == size(self.of.aval.shape)

    @property
    def count(self) -> int:
        """How many passes there are behind the first."""
        return max(self.later.values(), default=0)


def _is_costly(eqn: Eqn) -> bool:
    return storage.rather_stored(eqn) or eqn.primitive.name in traits.COSTLY


# -- functions that take statistics, as equations of the group -------------------------------------


def _inlined(eqns: Sequence[Eqn]) -> list[Any]:
    """Returns equations with those of each `jit` that takes statistics, as `log_softmax` does."""
    return [inner for eqn in eqns for inner in (_opened(eqn) if _can_be_opened(eqn) else [eqn])]


def _can_be_opened(eqn: Eqn) -> bool:
    if eqn.primitive.name != "jit" or not storage.takes_a_statistic(eqn):
        return False
    program = compat.closed(structure.single_program(eqn)).jaxpr
    made = {v for inner in program.eqns for v in inner.outvars}
    outs = [v for v in program.outvars if not compat.is_literal(v)]
    is_plain = len(set(outs)) == len(program.outvars) and made.issuperset(outs)
    return is_plain and not program.constvars


def _opened(eqn: Eqn) -> list[Any]:
    program = compat.closed(structure.single_program(eqn)).jaxpr
    names: dict[Any, Any] = dict(zip(program.invars, eqn.invars, strict=True))
    names |= zip(program.outvars, eqn.outvars, strict=True)
    opened: list[Any] = []
    for inner in program.eqns:
        names |= {v: Var(v.aval) for v in inner.outvars if v not in names}
        stack = eqn.source_info.name_stack + inner.source_info.name_stack
        opened.append(
            inner.replace(
                invars=[v if compat.is_literal(v) else names[v] for v in inner.invars],
                outvars=[names[v] for v in inner.outvars],
                source_info=inner.source_info.replace(name_stack=stack),
            )
        )
    return _inlined(opened)


# -- how they are run ------------------------------------------------------------------------------


@dataclass
class Statistics:
    """The statistics of a run of a group: noted, or given to a run for its derivative."""

    noted: list[Any] = field(default_factory=list)
    given: Iterator[Any] | None = None

    def of(self, value: Any) -> Any:
        """Returns a statistic; where statistics are given, the next of these."""
        if self.given is not None:
            return moves.valued(value, next(self.given))
        self.noted.append(value)
        return value


class Passing:
    """One run of a group, in which each pass reads the logits behind another barrier.

    Args:
      passes: those of the group.
      given: its inputs, in the dtypes in which they were made.
      around: the number of named scopes that are open where it runs.
      statistics: notes its statistics, or gives them to a run for its derivative. The derivative of
        a product reads the factors, and that of a sum reads nothing.
    """

    def __init__(
        self,
        passes: Passes,
        given: Mapping[Any, Any],
        around: int,
        statistics: Statistics | None,
    ) -> None:
        self.passes, self.around, self.statistics = passes, around, statistics
        self.again = statistics is not None and statistics.given is not None
        self.values: list[dict[Any, Any]] = [{}]  # of each pass; the first makes nothing again
        self.copy: Any = lax.stop_gradient(given[passes.of]) if passes.later else None

    def read(self, eqn: Eqn, local: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """Returns `local`; on a GPU, an equation reads its pass's own values of earlier passes."""
        now = self.passes.later.get(eqn.outvars[0])
        if now is None or (self.again and eqn.primitive.name not in traits.SCALES):
            return local
        while len(self.values) <= now:
            self.copy = lowerings.behind_barrier_on_gpus(
                self.copy
            )  # one barrier more than the last
            low = self.copy.dtype != FLOAT32
            wide = lowerings.widened_copy(self.copy) if low else self.copy
            self.values.append({self.passes.of: wide})
        before = [v for v in compat.variables(eqn) if v in self.passes.costly]
        again = {v: self._value(v, now, local) for v in before if self.passes.made[v] < now}
        return {**local, **{v: lowerings.on_gpus(local[v], x) for v, x in again.items()}}

    def noted(self, eqn: Eqn, values: list[Any]) -> list[Any]:
        """Returns the results of an equation; if small statistics are given, these."""
        if self.statistics is None or eqn.primitive.name not in traits.STATISTIC:
            return values
        few = size(self.passes.of.aval.shape) // storage.SMALLER
        return [self.statistics.of(x) if size(x.shape) <= few else x for x in values]

    def _value(self, v: Any, now: int, local: Mapping[Any, Any]) -> Any:
        """Returns the value of a variable, recomputed in this pass unless it is a statistic."""
        if compat.is_literal(v):
            return v.val
        if v not in self.passes.made:
            return lax.stop_gradient(widened(v, local[v]))
        values = self.values[now]
        if v not in values:
            eqn = self.passes.makers[v]
            operands = [self._value(a, now, local) for a in eqn.invars]
            with written_at(eqn, self.around):
                values |= zip(eqn.outvars, bind(eqn, operands), strict=True)
        return values[v]
