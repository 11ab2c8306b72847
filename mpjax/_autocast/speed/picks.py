"""Picks one element of each row, such as a label's logit, with a `where` as derivative.

JAX's derivative of a gather is a scatter: zeros are stored, one element of each row is added, and
all are read again to add the other cotangents of the logits. Where a row has one index, the
cotangent is `where(position == index, ct, 0)`: elementwise, so that the kernel that reads it
computes it, and it is never stored.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mpjax._autocast.known import traits
from mpjax._autocast.known.fusible import is_pick
from mpjax._autocast.speed import moves
from mpjax._autocast.speed.gather_one import gather, gather_one_p
from mpjax._autocast.speed.hints import hint
from mpjax._autocast.speed.storage import MOST_AGAIN
from mpjax._base import compat
from mpjax._base.dtypes import FLOAT32
from mpjax._jaxpr import structure
from mpjax._jaxpr.binding import bind, evaluate
from mpjax._jaxpr.caches import by_program
from mpjax._jaxpr.equation import Eqn
from mpjax._jaxpr.sizes import is_float32


@hint("picked", lambda *_: [])
def run(eqn: Eqn, values: Sequence[Any]) -> list[Any]:
    """Returns the results of a pick, or of a `jit` with one inside; nothing for other equations."""
    if is_pick(eqn) or _holds_a_pick(_jitted(eqn)):
        return [jnp.asarray(out.array) for out in _run(eqn, [Known(x) for x in values])]
    return []


# -- elements of intermediate values ---------------------------------------------------------------


@dataclass(frozen=True)
class At:
    """The place of a pick: the arguments of `gather_one` beside the array."""

    index: jax.Array
    axis: int
    mode: Any
    fill_value: Any

    def of(self, x: Any) -> Any:
        """Returns the elements of an array at this place; an axis of 1 is broadcast."""
        if jnp.ndim(x) == 0 or x.shape[self.axis] == 1:
            return x
        how = {"mode": self.mode, "fill_value": self.fill_value}
        return gather(x, self.index, axis=self.axis, **how)

    def before(self, shape: tuple[int, ...]) -> At | None:
        """Returns this place in an array before a reshape of its leading axes, of shape `shape`.

        None unless there is one index for each row.
        """
        rows = shape[:-1]
        if self.axis != self.index.ndim - 1 or math.prod(rows) != self.index.size:
            return None
        return replace(self, index=self.index.reshape(*rows, 1), axis=len(rows))


@dataclass(frozen=True)
class Known:
    """A value, and a function that computes single elements of it from those of its operands."""

    array: Any
    part: Callable[[At], Any] | None = None
    depth: int = 0  # how many functions call each other for an element

    def at(self, at: At) -> Any:
        return at.of(self.array) if self.part is None else self.part(at)


class Parts:
    """The values of a group from which a gather picks.

    XLA fuses nothing into a gather. To pick one label of each row it would store the operand, such
    as log-probabilities, in float32. Here the gather reads the low inputs of the group, and one
    element of each row is computed from these.

    Args:
      read: the operands of picks, and the values from which they are computed.
      given: the inputs of the group.
    """

    def __init__(self, read: frozenset[Any], given: Mapping[Any, Any]) -> None:
        self._read = read
        self._parts = {v: (_of_held(v, x), 0) for v, x in given.items() if v in read}

    def run(self, eqn: Eqn, operands: Sequence[Any]) -> list[Any]:
        """Returns the results of a pick, or of an equation that computes the operand of one."""
        if self._read.isdisjoint([*compat.variables(eqn), *eqn.outvars]):
            return run(eqn, operands)
        outs = _run(eqn, list(map(self._known, eqn.invars, operands)))
        made = zip(eqn.outvars, outs, strict=True)
        self._parts.update({v: (o.part, o.depth) for v, o in made})
        return [out.array for out in outs]

    def _known(self, atom: Any, array: Any) -> Known:
        part, depth = (None, 0) if compat.is_literal(atom) else self._parts.get(atom, (None, 0))
        return Known(array, part, depth)


@hint("picked", lambda _: frozenset[Any]())
def picked_from(eqns: Sequence[Eqn]) -> frozenset[Any]:
    """Returns the arrays that a pick in the group reads, and the elementwise operands of these."""
    sources: set[Any] = set()
    for eqn in reversed(eqns):
        called = _jitted(eqn)
        is_opened = called is not None or _is_in_parts(eqn)
        if is_pick(eqn):
            sources.add(eqn.invars[0])
        elif _holds_a_pick(called) or (is_opened and not sources.isdisjoint(eqn.outvars)):
            sources.update(compat.variables(eqn))
    return frozenset(sources)


def _run(eqn: Eqn, values: Sequence[Known]) -> list[Known]:
    arrays = [value.array for value in values]
    called = _jitted(eqn)
    if called is not None:
        return evaluate(called, values, _run, constant=lambda x, _: Known(x))
    if is_pick(eqn) and compat.explicit_sharding(eqn.invars[0].aval) is None:
        # With explicit shardings JAX types the result of a scatter, but not that of our `where`.
        return [Known(_in_order(eqn, values[0], arrays[1]))]
    outs = bind(eqn, arrays)
    depth = 1 + max((value.depth for value in values), default=0)
    if not _is_in_parts(eqn) or depth > MOST_AGAIN:
        return [Known(out) for out in outs]
    return [Known(outs[0], functools.partial(_part, eqn, values, outs[0]), depth)]


def _is_in_parts(eqn: Eqn) -> bool:
    return eqn.primitive.name in traits.PARTS or _keeps_rows(eqn)


def _keeps_rows(eqn: Eqn) -> bool:
    """Whether an equation reshapes the leading axes of an array, and leaves its rows whole."""
    if eqn.primitive.name != "reshape" or eqn.params["dimensions"] is not None:
        return False
    return eqn.invars[0].aval.shape[-1:] == eqn.outvars[0].aval.shape[-1:]


def _part(eqn: Eqn, values: Sequence[Known], whole: Any, at: At) -> Any:
    """Returns elements of an equation's result, computed from elements of its operands."""
    if eqn.primitive.name in traits.PARTS:
        return bind(eqn, [value.at(at) for value in values])[0]
    before = at.before(values[0].array.shape)
    part = at.of(whole) if before is None else values[0].at(before).reshape(at.index.shape)
    return part.astype(eqn.outvars[0].aval.dtype)  # a move is made of the low value


def _holds_a_pick(program: Any) -> bool:
    return program is not None and _program_holds_a_pick(program)


@by_program
def _program_holds_a_pick(program: Any) -> bool:
    inside = compat.closed(program).jaxpr.eqns
    return any(is_pick(eqn) or _holds_a_pick(_jitted(eqn)) for eqn in inside)


def _jitted(eqn: Eqn) -> Any:
    return structure.single_program(eqn) if eqn.primitive.name == "jit" else None


def _in_order(eqn: Eqn, value: Known, indices: jax.Array) -> jax.Array:
    """Returns the result of a gather by `gather_one`, whose index has the operand's axes."""
    x = value.array
    dims, (out,) = eqn.params["dimension_numbers"], eqn.outvars
    (axis,) = dims.start_index_map
    rows = dict(zip(dims.start_indices_batching_dims, dims.operand_batching_dims, strict=True))
    others = [i for i in range(indices.ndim - 1) if i not in rows]  # one index each
    index = indices[..., 0].transpose([*sorted(rows, key=rows.__getitem__), *others])
    index = index.reshape([n if i in rows.values() else 1 for i, n in enumerate(x.shape)])
    how = {name: eqn.params[name] for name in ("mode", "fill_value")}
    picked = gather_one_p.bind(x, index, axis=int(axis), **how)
    if value.part is not None and not _is_filled(**how):
        picked = moves.valued(picked, value.part(At(index, int(axis), **how)))
    sliced = (i for i in range(x.ndim) if i not in _dropped(dims))
    named = (rows.get(i) for i in range(indices.ndim - 1))
    places = [next(sliced if i in dims.offset_dims else named) for i in range(out.aval.ndim)]
    used = [i for i in places if i is not None]
    unused = [i for i in range(x.ndim) if i not in used]  # of size 1, as are those of no place
    return picked.transpose([*used, *unused]).reshape(out.aval.shape)


def _is_filled(mode: Any, fill_value: Any) -> bool:
    """Whether a pick out of bounds gives a number: then it differs from one computed of parts."""
    fills = mode == lax.GatherScatterMode.FILL_OR_DROP
    return fills and fill_value is not None and not np.isnan(fill_value)


def _of_held(var: Any, x: Any) -> Callable[[At], Any] | None:
    """Returns a function that picks from a low input of a group before it is widened, or None."""
    if not is_float32(var) or x.dtype == FLOAT32:
        return None
    return lambda at: at.of(lax.stop_gradient(x)).astype(FLOAT32)


def _dropped(dims: Any) -> set[int]:
    return {*dims.collapsed_slice_dims, *dims.operand_batching_dims}
