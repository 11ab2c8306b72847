"""One element of each row, as a loss picks a label's logit: with a derivative that is a choice.

JAX's derivative of a gather is a scatter: zeros are stored, one element of each row is added, and
the whole is read again where the other cotangents of the logits are added to it. Where a row has
one index, the cotangent is `where(position == index, ct, 0)`: elementwise, so that it is computed
in the kernel that needs it and never stored.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from mpjax import _compat
from mpjax._autocast import structure
from mpjax._autocast.binding import bind
from mpjax._autocast.caches import by_program
from mpjax._autocast.hints import hint
from mpjax._autocast.states import size


def is_pick(eqn: Any) -> bool:
    """Whether an equation gathers one element, or one slice, of each of many rows."""
    return eqn.primitive.name == "gather" and _picks_one(eqn.invars[0].aval, eqn)


def _picks_one(operand: Any, eqn: Any) -> bool:
    dims = eqn.params["dimension_numbers"]
    if len(dims.start_index_map) != 1:
        return False
    (axis,), sizes = dims.start_index_map, eqn.params["slice_sizes"]
    if not dims.operand_batching_dims and operand.shape[axis] != 1:
        return False  # one row of a table
    whole = (sizes[i] == n for i, n in enumerate(operand.shape) if i not in _pointed(dims))
    indices = eqn.invars[1].aval.shape[:-1]
    rows = [n for i, n in enumerate(indices) if i in dims.start_indices_batching_dims]
    return sizes[axis] == 1 and all(whole) and size(indices) == size(rows)


def _pointed(dims: Any) -> set[int]:
    return {*dims.start_index_map, *dims.operand_batching_dims}


@hint("picked", lambda *_: [])
def run(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """Returns the results of an equation that picks, or calls what does; of any other nothing."""
    if is_pick(eqn):
        if _compat.explicit_sharding(eqn.invars[0].aval) is not None:
            return []  # XLA is told by types where a scatter's result is; a choice's is not told
        return [_in_order(eqn, *values)]
    called = _jitted(eqn)
    if called is None or not _holds_a_pick(called):
        return []
    program = _compat.closed(called)
    env = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
    env |= dict(zip(program.jaxpr.invars, values, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if _compat.is_literal(atom) else env[atom]

    for inner in program.jaxpr.eqns:
        operands = [read(atom) for atom in inner.invars]
        outs = run(inner, operands) or bind(inner, operands)
        env.update(zip(inner.outvars, outs, strict=True))
    return [jnp.asarray(read(atom)) for atom in program.jaxpr.outvars]


@by_program
def _holds_a_pick(program: Any) -> bool:
    inside = _compat.closed(program).jaxpr.eqns
    return any(is_pick(e) or (_holds_a_pick(p) if (p := _jitted(e)) else False) for e in inside)


def _jitted(eqn: Any) -> Any:
    return structure.single_program(eqn) if eqn.primitive.name == "jit" else None


# -- a gather whose transposition is a choice ------------------------------------------------------

picked_p = Primitive("gather_one")
"""`f[..., n, ...]` and indices of its rank, 1 on the axis, to `f[..., 1, ...]`; linear."""


def _in_order(eqn: Any, x: jax.Array, indices: jax.Array) -> jax.Array:
    """Returns what a gather gives, picked from rows in the order of the operand's axes."""
    dims, (out,) = eqn.params["dimension_numbers"], eqn.outvars
    (axis,) = dims.start_index_map
    rows = dict(zip(dims.start_indices_batching_dims, dims.operand_batching_dims, strict=True))
    others = [i for i in range(indices.ndim - 1) if i not in rows]  # one index each
    index = indices[..., 0].transpose([*sorted(rows, key=rows.__getitem__), *others])
    index = index.reshape([n if i in rows.values() else 1 for i, n in enumerate(x.shape)])
    how = {name: eqn.params[name] for name in ("mode", "fill_value")}
    picked = picked_p.bind(x, index, axis=int(axis), **how)
    sliced = (i for i in range(x.ndim) if i not in _dropped(dims))
    named = (rows.get(i) for i in range(indices.ndim - 1))
    places = [next(sliced if i in dims.offset_dims else named) for i in range(out.aval.ndim)]
    used = [i for i in places if i is not None]
    unused = [i for i in range(x.ndim) if i not in used]  # of size 1, as are those of no place
    return picked.transpose([*used, *unused]).reshape(out.aval.shape)


def _dropped(dims: Any) -> set[int]:
    return {*dims.collapsed_slice_dims, *dims.operand_batching_dims}


def _gather(x: Any, index: Any, *, axis: int, mode: Any, fill_value: Any) -> Any:
    rows = [i for i, n in enumerate(index.shape) if i != axis and n == x.shape[i]]
    dims = lax.GatherDimensionNumbers(
        offset_dims=tuple(i for i in range(x.ndim) if i not in rows),
        collapsed_slice_dims=(),
        start_index_map=(axis,),
        operand_batching_dims=tuple(rows),
        start_indices_batching_dims=tuple(range(len(rows))),
    )
    start = index.reshape([*(x.shape[i] for i in rows), 1])
    sizes = [1 if i == axis or i in rows else n for i, n in enumerate(x.shape)]
    return lax.gather(x, start, dims, sizes, mode=mode, fill_value=fill_value)


@functools.lru_cache(maxsize=1024)
def _compiled(**params: Any) -> Callable[..., Any]:
    return jax.jit(functools.partial(_gather, **params))


picked_p.def_impl(lambda x, index, **params: _compiled(**params)(x, index))
mlir.register_lowering(picked_p, mlir.lower_fun(_gather, multiple_results=False))


@picked_p.def_abstract_eval
def _abstract(x: Any, index: Any, *, axis: int, **_: Any) -> Any:
    del index
    shape = tuple(1 if i == axis else n for i, n in enumerate(x.shape))
    return x.update(shape=shape, weak_type=False)


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    (x, index), (dx, _) = primals, tangents
    out = picked_p.bind(x, index, **params)
    if isinstance(dx, ad.Zero):
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    return out, picked_p.bind(dx, index, **{**params, "fill_value": 0})


def _transpose(ct: Any, x: Any, index: Any, *, axis: int, mode: Any, **_: Any) -> list[Any]:
    if isinstance(ct, ad.Zero):
        return [ad.Zero(x.aval), None]
    count = x.aval.shape[axis]
    if mode == lax.GatherScatterMode.CLIP:
        index = jnp.clip(index, 0, count - 1)
    shape = [count if i == axis else 1 for i in range(index.ndim)]
    position = lax.broadcasted_iota(np.int32, shape, axis)
    return [jnp.where(position == index, ct, jnp.zeros((), ct.dtype)), None]


def _batch(args: Any, dims: Any, *, axis: int, **params: Any) -> Any:
    if not _compat.is_batched(dims[0]):  # rows that all read: their gradient is a sum, a scatter
        gather = functools.partial(_gather, axis=axis, **params)
        return jax.vmap(gather, in_axes=dims)(*args), 0
    return picked_p.bind(*_compat.all_batched(args, dims), axis=axis + 1, **params), 0


ad.primitive_jvps[picked_p] = _jvp
ad.primitive_transposes[picked_p] = _transpose
batching.primitive_batchers[picked_p] = _batch
