"""One element of each row, as a loss picks a label's logit: with a derivative that is a choice.

JAX's derivative of a gather is a scatter: zeros are stored, one element of each row is added, and
the whole is read again where the other cotangents of the logits are added to it. Where a row has
one index, the cotangent is `where(position == index, ct, 0)`: elementwise, so that it is computed
in the kernel that needs it and never stored.
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

from mpjax._autocast.decide import traits
from mpjax._autocast.decide.fusible import is_pick
from mpjax._autocast.decide.states import FLOAT32, is_float32
from mpjax._autocast.speed import moves
from mpjax._autocast.speed.gather_one import gather, gather_one_p
from mpjax._autocast.speed.hints import hint
from mpjax._base import compat
from mpjax._jaxpr import structure
from mpjax._jaxpr.binding import bind, evaluate
from mpjax._jaxpr.caches import by_program


@hint("picked", lambda *_: [])
def run(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """Returns the results of an equation that picks, or calls what does; of any other nothing."""
    if is_pick(eqn) or _holds_a_pick(_jitted(eqn)):
        return [jnp.asarray(out.array) for out in _run(eqn, [Known(x) for x in values])]
    return []


# -- parts of what is picked from ------------------------------------------------------------------


@dataclass(frozen=True)
class At:
    """Where something is picked: what `gather_one` takes beside the array."""

    index: jax.Array
    axis: int
    mode: Any
    fill_value: Any

    def of(self, x: Any) -> Any:
        """Returns what is picked of an array that is repeated where an axis of it is 1."""
        if jnp.ndim(x) == 0 or x.shape[self.axis] == 1:
            return x
        how = {"mode": self.mode, "fill_value": self.fill_value}
        return gather(x, self.index, axis=self.axis, **how)

    def before(self, shape: tuple[int, ...]) -> At | None:
        """Returns where that is in an array of a shape, whose rows are laid out in another way.

        None unless one is picked of each row.
        """
        rows = shape[:-1]
        if self.axis != self.index.ndim - 1 or math.prod(rows) != self.index.size:
            return None
        return replace(self, index=self.index.reshape(*rows, 1), axis=len(rows))


@dataclass(frozen=True)
class Known:
    """A value that may be picked from, and how what is picked of it is computed of less."""

    array: Any
    part: Callable[[At], Any] | None = None

    def at(self, at: At) -> Any:
        return at.of(self.array) if self.part is None else self.part(at)


class Parts:
    """The values of a group from which something is picked.

    XLA fuses nothing into a gather. For one label of each row it would store what the gather reads,
    log-probabilities or capped logits, in float32; of the group's inputs it can pick as they are
    held, and compute one element of each row from that.

    Args:
      read: what is picked from, and what that is made of.
      given: the inputs of the group.
    """

    def __init__(self, read: frozenset[Any], given: Mapping[Any, Any]) -> None:
        self._read = read
        self._parts = {v: _of_held(v, x) for v, x in given.items() if v in read}

    def run(self, eqn: Any, operands: Sequence[Any]) -> list[Any]:
        """Returns the results of an equation that picks, or makes what is picked from."""
        if self._read.isdisjoint([*compat.variables(eqn), *eqn.outvars]):
            return run(eqn, operands)
        known = (None if compat.is_literal(v) else self._parts.get(v) for v in eqn.invars)
        outs = _run(eqn, [Known(*both) for both in zip(operands, known, strict=True)])
        self._parts.update({v: o.part for v, o in zip(eqn.outvars, outs, strict=True)})
        return [out.array for out in outs]


@hint("picked", lambda _: frozenset[Any]())
def picked_from(eqns: Sequence[Any]) -> frozenset[Any]:
    """Returns what is picked from in a group, what that is elementwise of, and what comes of it."""
    sources: set[Any] = set()
    for eqn in reversed(eqns):
        called = _jitted(eqn)
        is_opened = called is not None or _is_in_parts(eqn)
        if is_pick(eqn):
            sources.add(eqn.invars[0])
        elif _holds_a_pick(called) or (is_opened and not sources.isdisjoint(eqn.outvars)):
            sources.update(compat.variables(eqn))
    return frozenset(sources)


def _run(eqn: Any, values: Sequence[Known]) -> list[Known]:
    arrays = [value.array for value in values]
    called = _jitted(eqn)
    if called is not None:
        return evaluate(called, values, _run, constant=lambda x, _: Known(x))
    if is_pick(eqn) and compat.explicit_sharding(eqn.invars[0].aval) is None:
        # Under explicit shardings a type tells XLA where a scatter's result is, but no choice's.
        return [Known(_in_order(eqn, values[0], arrays[1]))]
    outs = bind(eqn, arrays)
    if not _is_in_parts(eqn):
        return [Known(out) for out in outs]
    return [Known(outs[0], functools.partial(_part, eqn, values, outs[0]))]


def _is_in_parts(eqn: Any) -> bool:
    return eqn.primitive.name in traits.PARTS or _keeps_rows(eqn)


def _keeps_rows(eqn: Any) -> bool:
    """Whether an equation lays out the rows of an array in another way."""
    if eqn.primitive.name != "reshape" or eqn.params["dimensions"] is not None:
        return False
    return eqn.invars[0].aval.shape[-1:] == eqn.outvars[0].aval.shape[-1:]


def _part(eqn: Any, values: Sequence[Known], whole: Any, at: At) -> Any:
    """Returns what is picked of what an equation makes, made of what is picked."""
    if eqn.primitive.name in traits.PARTS:
        return bind(eqn, [value.at(at) for value in values])[0]
    before = at.before(values[0].array.shape)
    return at.of(whole) if before is None else values[0].at(before).reshape(at.index.shape)


def _holds_a_pick(program: Any) -> bool:
    return program is not None and _program_holds_a_pick(program)


@by_program
def _program_holds_a_pick(program: Any) -> bool:
    inside = compat.closed(program).jaxpr.eqns
    return any(is_pick(eqn) or _holds_a_pick(_jitted(eqn)) for eqn in inside)


def _jitted(eqn: Any) -> Any:
    return structure.single_program(eqn) if eqn.primitive.name == "jit" else None


def _in_order(eqn: Any, value: Known, indices: jax.Array) -> jax.Array:
    """Returns what a gather gives, picked from rows in the order of the operand's axes."""
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
    """Whether a number may be picked that stands nowhere; NaN is NaN of any part."""
    fills = mode == lax.GatherScatterMode.FILL_OR_DROP
    return fills and fill_value is not None and not np.isnan(fill_value)


def _of_held(var: Any, x: Any) -> Callable[[At], Any] | None:
    """Returns how to pick of an input of a group as it is held: where a group would widen it."""
    if not is_float32(var) or x.dtype == FLOAT32:
        return None
    return lambda at: at.of(lax.stop_gradient(x)).astype(FLOAT32)


def _dropped(dims: Any) -> set[int]:
    return {*dims.collapsed_slice_dims, *dims.operand_batching_dims}
