"""Runs a program again with an instrument on each operation, and gathers its readings.

The program is bound as it was traced, equation by equation, so that the measured program is the one
that runs. Only the instrument's readings are added, a few numbers a row: loops carry them, branches
that are not taken return zeros, shards return theirs side by side.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec

from mpjax._base import compat
from mpjax._jaxpr import holders, structure
from mpjax._jaxpr.binding import bind, written_at
from mpjax._jaxpr.equation import Eqn
from mpjax.numerics._plan import Block, RunAs, RunPlan, RunStep, is_inexact


class TrackedValue(NamedTuple):
    """A value with the instrument's knowledge of it: None until it is asked, or for integers."""

    value: Any
    extra: Any = None


class Frame(Protocol):
    """Measures one function body: of a loop, of a branch of `cond`, of a `shard_map`."""

    def enter(self, extra: Any) -> Any:
        """Returns the knowledge of a value that comes in, from that of the frame around it."""
        ...

    def leave(self, extra: Any) -> Any:
        """Returns the knowledge of a value as arrays that a loop can carry."""
        ...

    def fresh(self, value: Any) -> Any:
        """Returns the knowledge of a floating value that has none yet."""
        ...

    def constant(self, value: Any) -> Any:
        """Adds the row of an argument or constant; returns the knowledge of it."""
        ...

    def same(self, eqn: Eqn, operands: Sequence[TrackedValue]) -> list[TrackedValue]:
        """Returns the results of an equation that moves values and has no row."""
        ...

    def measure(self, eqn: Eqn, operands: Sequence[TrackedValue]) -> list[TrackedValue]:
        """Runs an equation that has a row, and adds that; returns its results."""
        ...

    def rows(self) -> Any:
        """Returns the rows of this frame, f32[rows, width]."""
        ...


class Instrument(Protocol):
    """A way to measure operations: `width` numbers each, from a frame a function body."""

    width: int  # numbers a row
    sums: int  # the first so many of them are sums, the others maxima
    shadows: bool  # whether the knowledge of a value is an array of its shape, sliced with it

    def frame(self, spread: Callable[[Any], Any]) -> Frame:
        """Returns the frame of one function body; `spread` types numbers as a loop needs them."""
        ...

    def outputs(self, outs: Sequence[TrackedValue]) -> Any:
        """Returns further readings of the program's outputs, f32[outputs, ...], or None."""
        ...

    def is_news(self, now: Any, before: Any) -> Any:
        """Returns, row by row, whether an iteration is the first with something to report."""
        ...


class RowValues(NamedTuple):
    """The readings of a range of rows, and the first iteration, shard or branch of each."""

    values: Any  # f32[rows, width]
    index: Any  # i32[rows, depth]; -1 where there is no such loop


class _Body:
    """The frame of one function body while it runs, and its rows in program order."""

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self.own = 0  # rows of the frame so far
        # The rows of loops and branches; of the frame's own operations, ranges of its rows.
        self.parts: list[RowValues | tuple[int, int]] = []

    def count(self) -> None:
        """Adds a row of the frame's own."""
        last = self.parts[-1] if self.parts else None
        if isinstance(last, RowValues) or last is None:
            self.parts.append((self.own, self.own + 1))
        else:
            self.parts[-1] = (last[0], self.own + 1)
        self.own += 1


class Runner:
    """Runs the blocks of a plan."""

    def __init__(self, plan: RunPlan, instrument: Instrument) -> None:
        self.plan = plan
        self.instrument = instrument
        self.axes: tuple[Any, ...] = ()  # of the meshes whose shards this runs in

    def run(self, arrays: Sequence[Any]) -> tuple[list[Any], RowValues, Any]:
        """Returns the outputs of the whole program, all rows, and the readings of the outputs."""
        body = _Body(self.instrument.frame(self._spread))
        arguments: list[TrackedValue] = []
        for var, array in zip(self.plan.block.jaxpr.jaxpr.invars, arrays, strict=True):
            arguments.append(
                self._constant(body, array) if is_inexact(var) else TrackedValue(array)
            )
        outs = self._block(body, self.plan.block, arguments)
        said = self.instrument.outputs([self._inside(body, t) for t in outs])
        return [o.value for o in outs], self._gathered(body), said

    def body(
        self, block: Block, arguments: Sequence[TrackedValue]
    ) -> tuple[list[TrackedValue], RowValues]:
        """Returns the outputs of a block that is a function of its own, and its rows."""
        body = _Body(self.instrument.frame(self._spread))
        entered = [
            t if t.extra is None else TrackedValue(t.value, body.frame.enter(t.extra))
            for t in arguments
        ]
        outs = self._block(body, block, entered)
        return [self._known(body, t) for t in outs], self._gathered(body)

    def _constant(self, body: _Body, value: Any) -> TrackedValue:
        body.count()
        return TrackedValue(value, body.frame.constant(value))

    def _gathered(self, body: _Body) -> RowValues:
        own: Any = body.frame.rows() if body.own else None
        pieces = [
            part if isinstance(part, RowValues) else self._rows(own[part[0] : part[1]])
            for part in body.parts
        ]
        return _concatenated(pieces) if pieces else self._zeros(0)

    def _block(
        self, body: _Body, block: Block, arguments: Sequence[TrackedValue]
    ) -> list[TrackedValue]:
        """Returns the outputs of a block that is part of a body."""
        jaxpr = block.jaxpr.jaxpr
        env: dict[Any, TrackedValue] = dict(zip(jaxpr.invars, arguments, strict=True))
        for var, const in zip(jaxpr.constvars, block.jaxpr.consts, strict=True):
            env[var] = self._constant(body, const) if is_inexact(var) else TrackedValue(const)
        for step in block.steps:
            operands = [_atom(v, env) for v in step.eqn.invars]
            with written_at(step.eqn):
                outs = self._step(body, step, operands)
            env.update(zip(step.eqn.outvars, outs, strict=True))
        return [_atom(v, env) for v in jaxpr.outvars]

    def _step(self, body: _Body, step: RunStep, operands: list[TrackedValue]) -> list[TrackedValue]:
        if step.kind is RunAs.INLINED:
            return self._block(body, step.blocks[0], operands)
        if step.kind in _RUN:
            outs, rows = _RUN[step.kind](self, body, step, operands)
            body.parts.append(rows)
            frame = body.frame
            return [
                t if t.extra is None else TrackedValue(t.value, frame.enter(t.extra)) for t in outs
            ]
        if step.kind is RunAs.OTHER:
            return [TrackedValue(out) for out in bind(step.eqn, [t.value for t in operands])]
        known = [self._inside(body, t) for t in operands]
        if step.kind is RunAs.SAME:
            return body.frame.same(step.eqn, known)
        body.count()
        return body.frame.measure(step.eqn, known)

    def _inside(self, body: _Body, tracked: TrackedValue) -> TrackedValue:
        if tracked.extra is not None or not _is_floating(tracked.value):
            return tracked
        return TrackedValue(tracked.value, body.frame.fresh(tracked.value))

    def _known(self, body: _Body, tracked: TrackedValue) -> TrackedValue:
        """Returns a value and the knowledge of it as arrays, for another body."""
        inside = self._inside(body, tracked)
        if inside.extra is None:
            return inside
        return TrackedValue(inside.value, self._spread(body.frame.leave(inside.extra)))

    # -- rows ----------------------------------------------------------------------------------

    def _rows(self, values: Any) -> RowValues:
        return RowValues(self._varying(values), self._zeros(values.shape[0]).index)

    def _zeros(self, count: int) -> RowValues:
        values = jnp.zeros((count, self.instrument.width), jnp.float32)
        index = jnp.full((count, self.plan.depth), -1, jnp.int32)
        return RowValues(self._varying(values), self._varying(index))

    def _spread(self, x: Any) -> Any:
        """Returns knowledge of a value as a loop carries it; a shadow is typed as its value is."""
        return x if x is None or self.instrument.shadows else self._varying(x)

    def _varying(self, x: Any) -> Any:
        """Returns a number typed as varying over all shards, so that loops carry one type."""
        return compat.to_varying(x, self.axes) if self.axes else x

    def merged(self, total: Any, new: Any) -> Any:
        """Returns two readings of the same rows as one."""
        is_sum = lax.broadcasted_iota(jnp.int32, total.shape, 1) < self.instrument.sums
        return jnp.where(is_sum, total + new, jnp.maximum(total, new))

    def _iterated(self, total: RowValues, new: RowValues, number: Any, level: int) -> RowValues:
        """Returns the rows of a loop after one more iteration."""
        is_mine = lax.broadcasted_iota(jnp.int32, new.index.shape, 1) == level
        index = jnp.where(is_mine, number, new.index)
        # The index stays that of the first iteration with something to report.
        news = self.instrument.is_news(new.values, total.values)[:, None]
        return RowValues(self.merged(total.values, new.values), jnp.where(news, index, total.index))

    # -- programs ------------------------------------------------------------------------------

    def run_remat(self, body: _Body, step: RunStep, operands: list[TrackedValue]) -> Any:
        arrays, tree = jax.tree.flatten([self._known(body, t) for t in operands])
        trees: list[Any] = []

        def fun(*args: Any) -> list[Any]:
            outs = self.body(step.blocks[0], jax.tree.unflatten(tree, args))
            leaves, out_tree = jax.tree.flatten(outs)
            trees[:] = [out_tree]
            return leaves

        leaves = holders.checkpoint(step.eqn, fun, arrays, None)
        return jax.tree.unflatten(trees[0], leaves)

    def _split(self, body: _Body, tracked: TrackedValue) -> TrackedValue:
        """Returns the operands that a loop slices."""
        return (
            self._known(body, tracked) if self.instrument.shadows else TrackedValue(tracked.value)
        )

    def run_scan(self, body: _Body, step: RunStep, operands: list[TrackedValue]) -> Any:
        params, (block,) = step.eqn.params, step.blocks
        given = structure.loop_operands(step.eqn, operands)
        fixed = [self._known(body, t) for t in given.consts]
        carried = len(given.carry)

        def iteration(state: Any, xs: Any) -> list[Any]:
            *carry, total, number = state
            outs, rows = self.body(block, [*fixed, *carry, *xs])
            total = self._iterated(total, rows, number, step.level)
            number = number - 1 if params["reverse"] else number + 1
            return [*_as_arrays(outs[:carried]), total, number, *outs[carried:]]

        start = params["length"] - 1 if params["reverse"] else 0
        init = _as_arrays([self._known(body, t) for t in given.carry])
        state = [*init, self._zeros(block.rows), self._varying(jnp.asarray(start, jnp.int32))]
        xs = [self._split(body, t) for t in given.xs]
        outs = holders.scan(step.eqn, iteration, state, xs)
        (total, _), ys = outs[carried : carried + 2], outs[carried + 2 :]
        return [*outs[:carried], *(self._joined(t) for t in ys)], total

    def _joined(self, tracked: TrackedValue) -> TrackedValue:
        if tracked.extra is None or self.instrument.shadows:
            return tracked
        # The knowledge of a stack is the worst of its slices; `initial` is for a scan of no steps.
        return TrackedValue(tracked.value, jnp.max(tracked.extra, 0, initial=0))

    def run_while(self, body: _Body, step: RunStep, operands: list[TrackedValue]) -> Any:
        given = structure.loop_operands(step.eqn, operands)
        (block,) = step.blocks
        asked, fixed = [t.value for t in given.asked], [self._known(body, t) for t in given.consts]
        condition = jaxpr_as_fun(compat.closed(step.eqn.params["cond_jaxpr"]))

        def going(values: Any) -> Any:
            return condition(*asked, *values)[0]

        def iteration(values: Any, beside: Any) -> Any:
            extras, total, number = beside
            outs, rows = self.body(block, [*fixed, *map(TrackedValue, values, extras)])
            values, extras = _parted(outs)
            return values, (extras, self._iterated(total, rows, number, step.level), number + 1)

        values, extras = _parted([self._known(body, t) for t in given.carry])
        beside = extras, self._zeros(block.rows), self._varying(jnp.zeros((), jnp.int32))
        values, (extras, total, _) = holders.while_loop(step.eqn, going, iteration, values, beside)
        return list(map(TrackedValue, values, extras)), total

    def run_cond(self, body: _Body, step: RunStep, operands: list[TrackedValue]) -> Any:
        index, *rest = [self._known(body, t) for t in operands]

        def branch(chosen: int) -> Callable[..., Any]:
            def run() -> Any:
                outs, rows = self.body(step.blocks[chosen], rest)
                # `cond` needs equal results of all branches: the rows of the others are zeros.
                pieces = [self._zeros(block.rows) for block in step.blocks]
                pieces[chosen] = rows
                return _as_arrays(outs), _concatenated(pieces)

            return run

        branches = [branch(i) for i in range(len(step.blocks))]
        return holders.cond(step.eqn, index.value, branches)

    def run_shard_map(self, body: _Body, step: RunStep, operands: list[TrackedValue]) -> Any:
        params, (block,) = step.eqn.params, step.blocks
        axes = tuple(a for a in params["mesh"].axis_names if a in compat.manual_axes(params))
        inner = copy.copy(self)
        inner.axes = (*self.axes, *axes)
        given = _as_arrays([self._split(body, t) for t in operands])
        specs = [TrackedValue(s, None if t.extra is None else s) for s, t in _zip(params, given)]

        def fun(args: Any) -> Any:
            outs, rows = inner.body(block, args)
            kept = outs if self.instrument.shadows else [TrackedValue(t.value) for t in outs]
            return kept, jax.tree.map(lambda x: inner._varying(x)[None], rows)

        out_specs = [
            TrackedValue(s, s if self.instrument.shadows and is_inexact(v) else None)
            for s, v in zip(params["out_specs"], step.eqn.outvars, strict=True)
        ]
        each = PartitionSpec(axes)
        specs = ((specs,), (out_specs, RowValues(each, each)))
        outs, rows = holders.shard_map(step.eqn, fun, *specs)(given)
        return outs, self._over_shards(rows, step.level)

    def _over_shards(self, rows: RowValues, level: int) -> RowValues:
        """Returns the rows of all shards as one, indexed by the first with something to report."""
        shards = rows.values.shape[0]
        total = RowValues(rows.values[0] * 0, rows.index[0] * 0 - 1)
        total = RowValues(self._varying(total.values), self._varying(total.index))

        def body(state: Any, new: Any) -> Any:
            total, number = state
            return (self._iterated(total, RowValues(*new), number, level), number + 1), None

        zero = self._varying(jnp.zeros((), jnp.int32))
        (total, _), _ = lax.scan(body, (total, zero), tuple(rows), length=shards)
        return total


def _zip(params: dict[str, Any], given: Sequence[TrackedValue]) -> Any:
    return zip(params["in_specs"], given, strict=True)


_RUN: dict[RunAs, Any] = {
    RunAs.REMAT: Runner.run_remat,
    RunAs.SCAN: Runner.run_scan,
    RunAs.WHILE: Runner.run_while,
    RunAs.COND: Runner.run_cond,
    RunAs.SHARD_MAP: Runner.run_shard_map,
}


def _concatenated(pieces: Sequence[RowValues]) -> RowValues:
    if len(pieces) == 1:
        return pieces[0]
    return RowValues(*(jnp.concatenate(parts) for parts in zip(*pieces, strict=True)))


def _is_floating(value: Any) -> bool:
    dtype = getattr(value, "dtype", None)
    if dtype is None:
        return isinstance(value, (float, complex))
    return jnp.issubdtype(dtype, jnp.inexact)


def _as_arrays(values: Sequence[TrackedValue]) -> list[TrackedValue]:
    """Returns the values as arrays, literals too."""
    return [TrackedValue(jnp.asarray(t.value), t.extra) for t in values]


def _parted(values: Sequence[TrackedValue]) -> tuple[list[Any], list[Any]]:
    """Returns arrays, and the knowledge of them."""
    arrays = _as_arrays(values)
    return [t.value for t in arrays], [t.extra for t in arrays]


def _atom(atom: Any, env: dict[Any, TrackedValue]) -> TrackedValue:
    return TrackedValue(atom.val) if compat.is_literal(atom) else env[atom]
