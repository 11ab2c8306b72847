"""Helps XLA:GPU to scale and round an 8-bit product in the kernel that multiplies.

Nothing here changes a value. In two cases XLA:GPU would store a product in 32 bits, and each of its
readers would scale it again: a scale for each row, where rows have several axes; and products that
read the same operand, which XLA merges into one although their scales differ.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad, batching, mlir

from mpjax._autocast.speed.hints import hint
from mpjax._base import compat
from mpjax._base.own_primitives import GPUS, own_primitive
from mpjax._jaxpr.axes import Axes

# -- scales as those of a matrix ---------------------------------------------------------------

_spread_p = own_primitive("spread_scale")
_spread_p.def_impl(lambda x, **_: x)
_spread_p.def_abstract_eval(lambda x, **_: x.update(weak_type=False))
ad.deflinear2(_spread_p, lambda ct, x, **_: [ct])


@hint("spread_scales", lambda scale, *_: scale)
def spread(scale: jax.Array, shape: tuple[int, ...], axes: Axes) -> jax.Array:
    """Returns the scale of each element of a product.

    A GPU multiplies matrices, and scales a matrix as it stores it. It does so for rows of several
    axes only if the scales are broadcast as a matrix.

    Args:
      scale: f32[...] of the rank of the product, 1 along each axis that shares a scale.
      shape: of the product.
      axes: of the product.
    """
    if scale.size == 1 or compat.explicit_sharding(jax.typeof(scale)) is not None:
        return scale
    batch = sum(None not in axis[:3] for axis in axes)
    rows = sum(axis.second is None for axis in axes)
    wide = lax.broadcast_in_dim(scale, shape, tuple(range(len(shape))))
    return _spread_p.bind(wide, batch=batch, rows=rows)


def _lower_spread(ctx: Any, x: Any, *, batch: int, rows: int) -> Any:
    """Lowers a broadcast of scales as a broadcast of a matrix, or of a batch of matrices."""
    wide = x.owner
    platforms = set(ctx.module_context.platforms)
    if not platforms <= set(GPUS) or getattr(wide, "name", None) != "stablehlo.broadcast_in_dim":
        return [x]
    (scale,) = wide.operands
    given = tuple(mlir.ir.RankedTensorType(scale.type).shape)
    (aval,) = ctx.avals_in
    if len(given) != aval.ndim:
        return [x]
    parts = slice(0, batch), slice(batch, batch + rows), slice(batch + rows, None)
    fun = functools.partial(_repeated, shape=aval.shape, parts=[p for p in parts if aval.shape[p]])
    inner = ctx.replace(avals_in=[aval.update(shape=given)])
    return mlir.lower_fun(fun, multiple_results=False)(inner, scale)


def _repeated(scale: jax.Array, *, shape: tuple[int, ...], parts: Sequence[slice]) -> jax.Array:
    """Returns scales broadcast to a shape; meanwhile each part of its axes is a single axis."""
    whole = [shape[part] if math.prod(scale.shape[part]) > 1 else () for part in parts]
    ones = [(1,) * len(shape[part]) for part in parts]
    kept = sum((size or one for size, one in zip(whole, ones, strict=True)), ())
    flat = jnp.broadcast_to(scale, kept).reshape([math.prod(size) for size in whole])
    # Else XLA would undo the reshape, and see several axes again.
    flat = lax.optimization_barrier(flat)
    return jnp.broadcast_to(flat, [math.prod(shape[part]) for part in parts]).reshape(shape)


def _batch_spread(args: Any, dims: Any, *, batch: int, rows: int) -> Any:
    out = jnp.moveaxis(args[0], dims[0], 0)
    return _spread_p.bind(out, batch=batch + 1, rows=rows), 0


batching.primitive_batchers[_spread_p] = _batch_spread
# Not cacheable: JAX would lower it as a function of its own, without the broadcast to replace.
mlir.register_lowering(_spread_p, _lower_spread, cacheable=False)

# -- products that XLA must not merge ------------------------------------------------------------

_alone_p = own_primitive("multiplied_alone")
_alone_p.multiple_results = True
_alone_p.def_impl(lambda *args: list(args))
_alone_p.def_abstract_eval(lambda *args: [x.update(weak_type=False) for x in args])
ad.primitive_jvps[_alone_p] = lambda args, tangents: (_alone_p.bind(*args), list(tangents))
batching.primitive_batchers[_alone_p] = lambda args, dims: (_alone_p.bind(*args), dims)
mlir.register_lowering(_alone_p, lambda ctx, *args: list(args))
for _platform in GPUS:
    _lowering = mlir.lower_fun(lambda *args: lax.optimization_barrier(args), multiple_results=True)
    mlir.register_lowering(_alone_p, _lowering, platform=_platform)


@hint("multiplied_alone", lambda values, scale: [values, scale])
def alone(values: jax.Array, scale: jax.Array) -> list[jax.Array]:
    """Returns the 8-bit values that a product reads and the scale of its weight, unchanged.

    On a GPU they are behind a barrier. Else XLA would merge the products of queries, keys and
    values, which read one operand, into one, and store it in 32 bits, since their scales differ.
    """
    return _alone_p.bind(values, scale)
