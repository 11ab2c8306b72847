"""The statistics of activations and their gradients, by module, for `make_train_step(watch=)`.

Activations exist only while the loss is differentiated; no step returns them. So a watched step
runs the program a second time, with an instrument on products and on the values that leave a
module. The step's own program is not changed, and keeps no activation for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from mpjax._autocast.known.scopes import compute_dtype
from mpjax._base import compat
from mpjax._base.typing import Array, AxisName
from mpjax._jaxpr.binding import bind
from mpjax._jaxpr.equation import Eqn
from mpjax._jaxpr.op_rules import PRODUCTS
from mpjax.numerics._collect import Collecting, CollectingFrame
from mpjax.numerics._names import Neighbours
from mpjax.numerics._plan import BACKWARD, FORWARD, RunPlan
from mpjax.numerics._program import LossProgram
from mpjax.numerics._run import Runner, TrackedValue
from mpjax.numerics._statistics import Reading, read

ACTIVATION, GRADIENT = "activation", "gradient"
_OWN = ("loss_scale", "params", "amax_history")
_NAMES = (*_OWN[:2], "extra_state", "batch", _OWN[2])  # the arguments of a step's twin
_ENDS = PRODUCTS | {"scatter-add", "scatter_add"}  # they read the gradient of an activation


class Activations:
    """The program of a step's loss and gradients, and the rows of it that are read.

    Args:
      fun: function of arguments that returns a loss and gradients.
      args: its arguments, traced: loss scale, parameters, extra state, batch
        and amax history.
      policy: the step's, whose compute dtype values are held against.
      axis_name: the step's, over whose shards values are joined.
    """

    def __init__(
        self, fun: Callable[..., Any], args: Sequence[Any], policy: Any, axis_name: AxisName
    ) -> None:
        program = LossProgram(fun, args, _NAMES, "make_train_step(watch)")
        self._plan = program.plan
        self._arrays = program.arrays(args)
        self._axis_name = axis_name
        self._axes = _axes(program.jaxpr)
        self.rows = _chosen(self._plan)
        dtypes = {
            id(self._plan.made_by[row]): compute_dtype(policy, _path(self._plan.sites[row].module))
            for rows in self.rows.values()
            for row in rows
        }
        self._instrument = _Statistics(dtypes)

    def measure(self) -> tuple[dict[tuple[str, str], Reading], list[Array]]:
        """Runs the program; returns readings, by kind and module, of all shards, and gradients."""
        runner = Runner(self._plan, self._instrument)
        runner.axes = self._axes
        (_, *grads), read_rows, _ = runner.run(self._arrays)
        values = read_rows.values
        by_module = {key: _of_columns(values[np.array(rows)]) for key, rows in self.rows.items()}
        if self._axis_name is not None:
            by_module = {key: _over_shards(one, self._axis_name) for key, one in by_module.items()}
        return by_module, grads


def _path(module: str) -> tuple[str, ...]:
    return tuple(module.split("/")) if module else ()


def _axes(jaxpr: Any) -> tuple[Any, ...]:
    """Returns the axes of the meshes whose shards this is traced in."""
    variables = [v for eqn in jaxpr.jaxpr.eqns for v in eqn.outvars] + jaxpr.jaxpr.invars
    return tuple(frozenset[object]().union(*(compat.axes_of_type(v.aval) for v in variables)))


def _chosen(plan: RunPlan) -> dict[tuple[str, str], list[int]]:
    """Returns the rows to read, by kind and module."""
    graph = Neighbours(plan)
    looked_at = {FORWARD: _of_data(plan, graph), BACKWARD: _read_on(plan)}
    outputs = {n for n in plan.outputs if n is not None}
    chosen: dict[tuple[str, str], list[int]] = {}
    for node, row in plan.row_of.items():
        site = plan.sites[row]
        if node in outputs or not site.shape or node not in looked_at.get(site.phase, ()):
            continue
        if _is_rounding_of_product(plan, node):
            continue  # the product before it has a row: its magnitudes before they are rounded
        readers = [plan.sites[r] for r in graph.after(row)]
        leaves = any(_name(r) != _name(site) and r.phase == site.phase for r in readers)
        # The first layer's: dL/dx goes nowhere, and dL/dy only into the product for dL/dw.
        ends = site.phase == BACKWARD and any(r.operation in PRODUCTS for r in readers)
        if site.operation in PRODUCTS or leaves or ends:
            kind = ACTIVATION if site.phase == FORWARD else GRADIENT
            rows = chosen.setdefault((kind, _name(site)), [])
            scaled = _scaled(plan, graph, row)
            rows += [scaled] if scaled not in rows else []
    return chosen


def _scaled(plan: RunPlan, graph: Neighbours, row: int) -> int:
    """Returns the row in which a product of 8-bit operands is multiplied by both scales.

    Of any other operation it is the row itself.
    """
    product = plan.sites[row]
    reads = [plan.row_of.get(n) for n in plan.reads[graph.node_of[row]]]
    is_low = any(r is not None and jnp.dtype(plan.sites[r].dtype).itemsize == 1 for r in reads)
    if product.operation not in PRODUCTS or not is_low:
        return row
    # A product of 8-bit codes is multiplied by the scales of both operands, one `mul` each.
    for _ in range(2):
        after = graph.after(row)
        site = plan.sites[after[0]] if len(after) == 1 else None
        if site is None or (site.operation, site.module) != ("mul", product.module):
            break
        if (site.phase, site.shape) != (product.phase, product.shape):
            break
        row = after[0]
    return row


def _name(site: Any) -> str:
    """Returns the module of a row; without a name the source line."""
    return site.module or site.where or "(no name)"


def _is_rounding_of_product(plan: RunPlan, node: int) -> bool:
    site = plan.sites[plan.row_of[node]]
    rows = [plan.row_of.get(n) for n in plan.reads[node]]
    if site.operation not in PRODUCTS or len(rows) != 1 or rows[0] is None:
        return False
    return plan.sites[rows[0]].operation == site.operation


def _of_data(plan: RunPlan, graph: Neighbours) -> set[int]:
    """Returns the nodes that are not made of parameters alone."""
    starts = [
        node
        for node, row in plan.row_of.items()
        if plan.sites[row].phase == "constant"
        or (plan.sites[row].phase == "argument" and not plan.sites[row].module.startswith(_OWN))
    ]
    return _all_from(starts, graph.readers)


def _read_on(plan: RunPlan) -> set[int]:
    """Returns the nodes that products and scatters of the backward pass are made of.

    The gradient of a weight is none of them: the step returns it.
    """
    ends = [
        node
        for node, row in plan.row_of.items()
        if plan.sites[row].phase == BACKWARD and plan.sites[row].operation in _ENDS
    ]
    return _all_from([n for end in ends for n in plan.reads[end]], plan.reads)


def _all_from(starts: Sequence[int], edges: Sequence[Sequence[int]]) -> set[int]:
    waiting, reached = list(starts), set[int]()
    while waiting:
        node = waiting.pop()
        if node not in reached:
            reached.add(node)
            waiting += edges[node]
    return reached


class _Statistics(Collecting):
    """Reads the statistics of some operations' results, and nothing of the others.

    A row of zeros has to mean that nothing ran, and rows are joined by maxima. So the smallest
    magnitude is stored as the distance of its bits from those of inf.
    """

    width = 6
    sums = 4
    shadows = False

    def __init__(self, dtypes: dict[int, Any]) -> None:
        self.dtypes = dtypes  # of the equations that are read, by their ids

    def frame(self, spread: Callable[[Any], Any]) -> _StatisticsFrame:
        """Returns the frame of one function body."""
        return _StatisticsFrame(self, spread)

    def outputs(self, outs: Sequence[TrackedValue]) -> None:
        """Returns nothing."""
        del outs


class _StatisticsFrame(CollectingFrame):
    def __init__(self, instrument: _Statistics, spread: Callable[[Any], Any]) -> None:
        super().__init__(spread)
        self.dtypes = instrument.dtypes
        self.nothing = spread(jnp.zeros((instrument.width,), jnp.float32))

    def constant(self, value: Any) -> Any:
        self.collected.append(self.nothing)
        return self.fresh(value)

    def measure(self, eqn: Eqn, operands: Sequence[TrackedValue]) -> list[TrackedValue]:
        values = [t.value for t in operands]
        dtype = self.dtypes.get(id(eqn))
        if dtype is None:
            self.collected.append(self.nothing)
            return [TrackedValue(out) for out in bind(eqn, values)]
        unrounded, outs = _unrounded(eqn, values)
        floating = [x for x in unrounded if jnp.issubdtype(x.dtype, jnp.floating) and x.size]
        self.collected.append(
            self.spread(_columns(floating[0], dtype)) if floating else self.nothing
        )
        return [TrackedValue(out) for out in outs]


_DTYPE_OF_RESULT = ("preferred_element_type", "out_dtype")  # of products


def _unrounded(eqn: Eqn, values: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """Returns the results of an equation before they are rounded, and as they are."""
    if eqn.primitive.name == "convert_element_type":
        return values, bind(eqn, values)
    (name,) = [p for p in _DTYPE_OF_RESULT if p in eqn.params] or [""]
    result = eqn.outvars[0].aval.dtype
    if not name or not jnp.issubdtype(result, jnp.floating) or result.itemsize >= 4:
        outs = bind(eqn, values)
        return outs, outs
    wide = bind(eqn.replace(params={**eqn.params, name: np.dtype(np.float32)}), values)
    return wide, [x.astype(result) for x in wide]


def _columns(x: Any, dtype: Any) -> Any:
    one = read(x, dtype)
    far = np.uint32(0x7F800000) - lax.bitcast_convert_type(one.smallest, jnp.uint32)
    sums = (one.square, one.used, one.under, one.over)
    return jnp.stack([*sums, one.largest, far.astype(jnp.float32)])


def _of_columns(rows: Any) -> Reading:
    square, used, under, over = jnp.sum(rows[:, :4], axis=0)
    largest, far = jnp.max(rows[:, 4:], axis=0)
    return Reading(largest, _smallest(far), square, used, under, over)


def _smallest(far: Array) -> Array:
    return lax.bitcast_convert_type(np.uint32(0x7F800000) - far.astype(jnp.uint32), jnp.float32)


def _over_shards(one: Reading, axis_name: AxisName) -> Reading:
    sums = (lax.psum(x, axis_name) for x in (one.square, one.used, one.under, one.over))
    return Reading(lax.pmax(one.largest, axis_name), lax.pmin(one.smallest, axis_name), *sums)
