"""Records a product's maxima, as the cotangent of the maxima of earlier steps.

The maximum of the gradient is known only in the backward pass, and only cotangents leave that. So
the maxima by which a product scales are an operand of it, and the "gradient" of that operand is its
own maxima: f32[3], of its input, its weight and the gradient of its result. A product that is not
differentiated gives 0, and so does a value that is not finite: nothing is recorded then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from mpjax._autocast.product.config import PLACES, Roles
from mpjax._autocast.product.scaled import absolute_maximum
from mpjax._base import compat
from mpjax._base.own_primitives import own_primitive

recorded_p = own_primitive("recorded_amax")
tangent_p = own_primitive("recorded_amax_tangent")


def recorded(
    out: jax.Array, amaxes: jax.Array, operands: Sequence[jax.Array], roles: Roles
) -> jax.Array:
    """Returns `out`; the cotangent of `amaxes` is the maxima of the operands and of `out`'s own."""
    largest = {
        PLACES[role]: absolute_maximum(x, tuple(range(x.ndim))).reshape(())
        for x, role in zip(operands, roles, strict=False)
    }
    seen = jax.lax.stop_gradient(jnp.stack([largest[0], largest[1]]))
    return recorded_p.bind(*compat.equally_varying(out, amaxes, seen))


def _first(out: Any, *_: Any) -> Any:
    return out


for _p in (recorded_p, tangent_p):
    _p.def_impl(_first)
    _p.def_abstract_eval(lambda out, *_: out.update(weak_type=False))
    mlir.register_lowering(_p, lambda _ctx, out, *_: [out])


def _jvp(primals: Any, tangents: Any) -> Any:
    out = recorded_p.bind(*primals)
    moved, slot, _ = tangents
    if isinstance(slot, ad.Zero):
        return out, moved
    if isinstance(moved, ad.Zero):
        moved = ad.instantiate_zeros(moved)
    return out, tangent_p.bind(*compat.equally_varying(moved, slot, primals[2]))


def _tangent_jvp(primals: Any, tangents: Any) -> Any:
    return tangent_p.bind(*primals), tangents[0]


def _tangent_transpose(ct: Any, moved: Any, slot: Any, seen: Any) -> list[Any]:
    if isinstance(ct, ad.Zero):
        return [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in (moved, slot, seen)]
    cts: list[Any] = [ct if ad.is_undefined_primal(moved) else None, None, None]
    if ad.is_undefined_primal(slot):
        apart = slot.aval.ndim - 1  # leading axes that `vmap` made: each example has a history
        gradient = absolute_maximum(ct, tuple(range(apart, ct.ndim)))
        gradient = gradient.reshape((*gradient.shape[:apart], 1))
        largest = jnp.concatenate([seen, gradient], axis=-1)
        cts[1] = jnp.where(jnp.isfinite(largest), largest, 0)  # 0: nothing is recorded
    return cts


def _batch(primitive: Any, args: Any, dims: Any) -> Any:
    """Maps over products that share a history (maxima over all), or have one each."""
    out, slot, seen = args
    if compat.is_batched(dims[1]):
        return primitive.bind(*compat.all_batched(args, dims)), 0
    if compat.is_batched(dims[2]):
        seen = jnp.max(seen, axis=dims[2])
    if not compat.is_batched(dims[0]):
        return primitive.bind(out, slot, seen), dims[0]
    # The last axis: leading ones are those of examples with histories of their own.
    return primitive.bind(jnp.moveaxis(out, dims[0], -1), slot, seen), out.ndim - 1


ad.primitive_jvps[recorded_p] = _jvp
ad.primitive_jvps[tangent_p] = _tangent_jvp
ad.primitive_transposes[tangent_p] = _tangent_transpose
batching.primitive_batchers[recorded_p] = lambda args, dims: _batch(recorded_p, args, dims)
batching.primitive_batchers[tangent_p] = lambda args, dims: _batch(tangent_p, args, dims)
