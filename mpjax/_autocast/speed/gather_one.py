"""A gather of one element of each row of an array, whose transpose is a `where` and no scatter."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad, batching, mlir

from mpjax._base import compat
from mpjax._base.own_primitives import own_primitive

gather_one_p = own_primitive("gather_one", computes=True)
"""Maps `f[..., n, ...]` and indices of its rank, 1 on the axis, to `f[..., 1, ...]`; linear in the
first."""


def gather(x: Any, index: Any, *, axis: int, mode: Any, fill_value: Any) -> Any:
    """Returns the elements of `x` at an index along an axis, one for each element of the index.

    Args:
      x: any[...].
      index: int[...] of its rank, 1 on the axis. On another axis it is as long as `x`; or 1, and
        the result has a slice there; or longer than `x`, which is 1 there and broadcast.
      axis: the axis that is indexed.
      mode, fill_value: for an index beyond the end, as `lax.gather` takes them.
    """
    others = [(i, n) for i, n in enumerate(index.shape) if i != axis]
    rows = [i for i, n in others if n == x.shape[i]]
    shared = [i for i, n in others if n != x.shape[i] == 1]  # one row for several indices
    named = sorted([*rows, *shared])
    unshared = [i for i in range(x.ndim) if i not in shared]
    dims = lax.GatherDimensionNumbers(
        offset_dims=tuple(i for i in range(x.ndim) if i not in named),
        collapsed_slice_dims=(),
        start_index_map=(unshared.index(axis),),
        operand_batching_dims=tuple(map(unshared.index, rows)),
        start_indices_batching_dims=tuple(map(named.index, rows)),
    )
    start = index.reshape([*(index.shape[i] for i in named), 1])
    sizes = [1 if i == axis or i in rows else x.shape[i] for i in unshared]
    x = x.reshape([x.shape[i] for i in unshared])  # XLA:TPU fails on a gather of axes of 1
    return lax.gather(x, start, dims, sizes, mode=mode, fill_value=fill_value)


@functools.lru_cache(maxsize=1024)
def _compiled(**params: Any) -> Callable[..., Any]:
    return jax.jit(functools.partial(gather, **params))


gather_one_p.def_impl(lambda x, index, **params: _compiled(**params)(x, index))
mlir.register_lowering(gather_one_p, mlir.lower_fun(gather, multiple_results=False))


@gather_one_p.def_abstract_eval
def _abstract(x: Any, index: Any, *, axis: int, **_: Any) -> Any:
    del index
    shape = tuple(1 if i == axis else n for i, n in enumerate(x.shape))
    return x.update(shape=shape, weak_type=False)


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    (x, index), (dx, _) = primals, tangents
    out = gather_one_p.bind(x, index, **params)
    if isinstance(dx, ad.Zero):
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    return out, gather_one_p.bind(dx, index, **{**params, "fill_value": 0})


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
    if not compat.is_batched(dims[0]):  # all examples read the same rows: their gradient is a sum
        return jax.vmap(functools.partial(gather, axis=axis, **params), in_axes=dims)(*args), 0
    return gather_one_p.bind(*compat.all_batched(args, dims), axis=axis + 1, **params), 0


ad.primitive_jvps[gather_one_p] = _jvp
ad.primitive_transposes[gather_one_p] = _transpose
batching.primitive_batchers[gather_one_p] = _batch
