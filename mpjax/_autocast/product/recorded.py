"""What a product saw: its largest values as the cotangent of those of earlier steps.

The largest gradient is known in the backward pass only, and what leaves that is a cotangent. So the
largest values that a product uses are an input of it, and the "gradient" of that input is what it
saw itself: f32[3], of its input, its weight and the gradient of its result. A product that nothing
was derived from, and a value that is not finite, give 0: nothing was seen.
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
    """Returns `out`; the cotangent of `amaxes` is what was seen of the operands and of its own."""
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
        apart = slot.aval.ndim - 1  # axes in front: mapped over, each with its own histories
        gradient = absolute_maximum(ct, tuple(range(apart, ct.ndim)))
        gradient = gradient.reshape((*gradient.shape[:apart], 1))
        largest = jnp.concatenate([seen, gradient], axis=-1)
        cts[1] = jnp.where(jnp.isfinite(largest), largest, 0)
    return cts


def _batch(primitive: Any, args: Any, dims: Any) -> Any:
    """Maps over products that share a history, or each with its own where that is mapped too."""
    out, slot, seen = args
    if compat.is_batched(dims[1]):
        return primitive.bind(*compat.all_batched(args, dims)), 0
    if compat.is_batched(dims[2]):
        seen = jnp.max(seen, axis=dims[2])
    if not compat.is_batched(dims[0]):
        return primitive.bind(out, slot, seen), dims[0]
    # At the end, behind what has histories of its own.
    return primitive.bind(jnp.moveaxis(out, dims[0], -1), slot, seen), out.ndim - 1


ad.primitive_jvps[recorded_p] = _jvp
ad.primitive_jvps[tangent_p] = _tangent_jvp
ad.primitive_transposes[tangent_p] = _tangent_transpose
batching.primitive_batchers[recorded_p] = lambda args, dims: _batch(recorded_p, args, dims)
batching.primitive_batchers[tangent_p] = lambda args, dims: _batch(tangent_p, args, dims)
