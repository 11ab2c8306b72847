"""Rewrites `logits[jnp.arange(n), labels]`, which counts rows, as a gather with batch axes.

An index column that counts from 0 to the length of its axis says no more than a batch axis does.
Without it, the gather has the form of `picks`, whose derivative is a `where` and no scatter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mpjax._base import compat
from mpjax._jaxpr.binding import bind, evaluate, written_at
from mpjax._jaxpr.equation import Eqn


def batch_counted_rows(program: Any, arrays: Sequence[Any]) -> Any:
    """Returns a closed jaxpr whose gathers do not count rows.

    Args:
      program: the closed jaxpr of a function.
      arrays: the arrays on which it was traced.
    """
    makers = {v: eqn for eqn in program.jaxpr.eqns for v in eqn.outvars}
    counting = {v: how for v, eqn in makers.items() if (how := _counted(eqn, makers)) is not None}
    if not counting:
        return program

    def one(eqn: Eqn, values: list[Any]) -> Sequence[Any]:
        how = counting.get(eqn.outvars[0]) if eqn.outvars else None
        with written_at(eqn):
            return bind(eqn, values) if how is None else [_batched(eqn, how, *values)]

    return jax.make_jaxpr(lambda *args: evaluate(program, args, one))(*arrays)


class _Rows(NamedTuple):
    """The columns of a gather's index: the one with labels, and the ones that count rows."""

    column: int  # the one that does not count
    batch: Mapping[int, int]  # axis of the operand: axis of the index that counts along it


def _counted(eqn: Eqn, makers: Mapping[Any, Any]) -> _Rows | None:
    """Returns the columns of a gather of single elements that counts all its rows, or None."""
    if eqn.primitive.name != "gather":
        return None
    operand, indices = (v.aval for v in eqn.invars)
    dims = eqn.params["dimension_numbers"]
    joined = None if compat.is_literal(eqn.invars[1]) else makers.get(eqn.invars[1])
    columns = [] if joined is None or joined.primitive.name != "concatenate" else joined.invars
    if not jnp.issubdtype(operand.dtype, jnp.floating):
        return None
    is_whole = set(dims.start_index_map) == set(dims.collapsed_slice_dims) == {*range(operand.ndim)}
    if not is_whole or len(columns) != operand.ndim or compat.explicit_sharding(operand):
        return None
    counts = [_count(column, makers) for column in columns]
    others = [j for j, counted in enumerate(counts) if counted is None]
    rows = {
        axis: counted
        for axis, counted in zip(dims.start_index_map, counts, strict=True)
        if counted is not None and operand.shape[axis] == indices.shape[counted]
    }
    if len(others) != 1 or sorted(rows.values()) != [*range(indices.ndim - 1)]:
        return None
    return _Rows(others[0], rows)


def _count(column: Any, makers: Mapping[Any, Any]) -> int | None:
    """Returns the axis along which an array counts 0, 1, 2 ..., constant on the others, or None."""
    if compat.is_literal(column) or (eqn := makers.get(column)) is None:
        return None
    name = eqn.primitive.name
    if name == "iota":
        axis = eqn.params["dimension"]
        return axis if holds(column, column.aval.shape[axis]) else None
    if name == "select_n":  # JAX's `where(i < 0, i + n, i)`: a counter is nowhere below 0
        which, x, *_ = eqn.invars
        return _count(x, makers) if is_negative(which, x, makers) else None
    if name not in ("convert_element_type", "transpose", "broadcast_in_dim"):
        return None
    (source, *_) = eqn.invars
    if (axis := _count(source, makers)) is None:
        return None
    if name == "transpose":
        return eqn.params["permutation"].index(axis)
    to = axis if name == "convert_element_type" else eqn.params["broadcast_dimensions"][axis]
    count = source.aval.shape[axis]
    return to if count == column.aval.shape[to] and holds(column, count) else None


def holds(var: Any, count: int) -> bool:
    """Whether the dtype of a variable can count up to a number: uint8 ends at 255."""
    dtype = var.aval.dtype
    return jnp.issubdtype(dtype, jnp.integer) and count <= np.iinfo(dtype).max


def is_negative(which: Any, x: Any, makers: Mapping[Any, Any]) -> bool:
    """Whether a condition is `x < 0`."""
    eqn = None if compat.is_literal(which) else makers.get(which)
    if eqn is None or eqn.primitive.name != "lt" or eqn.invars[0] is not x:
        return False
    return compat.is_literal(eqn.invars[1]) and eqn.invars[1].val == 0


def _batched(eqn: Eqn, how: _Rows, operand: jax.Array, indices: jax.Array) -> jax.Array:
    """Returns the result of a gather, computed with batch axes and the column with labels alone."""
    axis = eqn.params["dimension_numbers"].start_index_map[how.column]
    rows = sorted(how.batch)
    dims = lax.GatherDimensionNumbers(
        offset_dims=(),
        collapsed_slice_dims=(axis,),
        start_index_map=(axis,),
        operand_batching_dims=tuple(rows),
        start_indices_batching_dims=tuple(how.batch[i] for i in rows),
    )
    params = {name: eqn.params[name] for name in ("mode", "fill_value")}
    where = lax.slice_in_dim(indices, how.column, how.column + 1, axis=-1)
    return lax.gather(operand, where, dims, (1,) * operand.ndim, **params)
