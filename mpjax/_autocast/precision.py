"""JAX's global `jax_default_matmul_precision`: for products that stay float32, and no low ones.

A GPU user sets it once, to "tensorfloat32" or "high", as the precision of float32 products. JAX
writes it into every product while it traces, where it cannot be told from a `precision=` that was
typed at the product. So a function is traced with the default left open, and what stays float32 is
given the default when it is bound.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mpjax import _compat
from mpjax._autocast.product import with_precision
from mpjax._op_rules import PRODUCTS

LOW = (lax.Precision.DEFAULT, lax.Precision.DEFAULT)
"""The precision of low products: told, or JAX would give them the global one."""


def default() -> Any:
    """Returns the precision that JAX gives a product by default; None where that is its own."""
    if jax.config.jax_default_matmul_precision is None:
        return None
    return _given(jax.config.jax_default_matmul_precision)


@functools.lru_cache(maxsize=16)
def _given(_setting: Any) -> Any:
    x = jax.ShapeDtypeStruct((1,), jnp.float32)
    (product,) = jax.make_jaxpr(lax.dot)(x, x).jaxpr.eqns
    found = product.params["precision"]
    return None if found == LOW else found


def left_open(precision: Any) -> contextlib.AbstractContextManager[Any]:
    """Traces products so that those which leave their precision to JAX are left so.

    Args:
      precision: what `default` gave.
    """
    if precision is None:
        return contextlib.nullcontext()
    return jax.default_matmul_precision(None)


def restored(eqn: Any, precision: Any) -> dict[str, Any]:
    """Returns the parameters of an equation bound as traced, with the default in its products."""
    if precision is None:
        return eqn.params
    if eqn.primitive.name in PRODUCTS:
        is_wide = any(_is_wide(v.aval.dtype) for v in eqn.invars[:2])
        return with_precision(eqn.params, precision) if is_wide else eqn.params
    if not _compat.programs(eqn):
        return eqn.params
    return _compat.map_programs(eqn.params, functools.partial(_program, precision=precision))


def _program(jaxpr: Any, *, precision: Any) -> Any:
    eqns = [eqn.replace(params=restored(eqn, precision)) for eqn in jaxpr.eqns]
    return jaxpr.replace(eqns=eqns)


def _is_wide(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.inexact) and dtype.itemsize > 2
