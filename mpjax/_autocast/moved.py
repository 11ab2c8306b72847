"""A low value that a group moves as it is held, and differentiates in float32.

A norm reads its input as it is and, for the statistics of its channels, reshaped. Widened first,
the reshaped one is another shape of one float32 value: XLA:TPU stores that in the layout of the
one and copies it for the other. Widened last, each is read from the low value. The tangents are
moved wide all the same: cotangents of the two are added up in float32, and rounded once.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from mpjax import _compat

_moved_p = Primitive("moved_low")


def moved(wide: jax.Array, low: jax.Array) -> jax.Array:
    """Returns `low` in the dtype of `wide`, of which it is the rounded value, to differentiate."""
    return _moved_p.bind(wide, low)


def _widened(wide: Any, low: Any) -> Any:
    return low.astype(wide.dtype)


_moved_p.def_impl(_widened)
_moved_p.def_abstract_eval(lambda wide, low: wide.update(weak_type=False))
mlir.register_lowering(_moved_p, mlir.lower_fun(_widened, multiple_results=False))


def _jvp(primals: Any, tangents: Any) -> Any:
    return _moved_p.bind(*primals), tangents[0]


def _transpose(ct: Any, wide: Any, low: Any) -> list[Any]:
    zero = ad.Zero(low.aval) if ad.is_undefined_primal(low) else None
    return [ct if ad.is_undefined_primal(wide) else None, zero]


def _batch(args: Any, dims: Any) -> Any:
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if _compat.is_batched(d))
    first = [
        jnp.moveaxis(x, d, 0) if _compat.is_batched(d) else jnp.broadcast_to(x, (size, *x.shape))
        for x, d in zip(args, dims, strict=True)
    ]
    return _moved_p.bind(*first), 0


ad.primitive_jvps[_moved_p] = _jvp
ad.primitive_transposes[_moved_p] = _transpose
batching.primitive_batchers[_moved_p] = _batch
