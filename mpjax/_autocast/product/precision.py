"""Precisions of products: that of `autocast(dot_precision=)`, and JAX's global default.

The default, `jax_default_matmul_precision`, is for products that stay float32: a GPU user sets it
once, to "tensorfloat32" or "high". JAX writes it into every product while tracing, and then it
looks the same as a `precision=` that was typed at the product. So a function is traced with the
default unset, and a product that stays float32 gets the default when it is bound.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mpjax._autocast.product import with_precision
from mpjax._base import compat
from mpjax._base.errors import message
from mpjax._jaxpr.equation import Eqn
from mpjax._jaxpr.op_rules import PRODUCTS

LOW = (lax.Precision.DEFAULT, lax.Precision.DEFAULT)
"""The precision of low products: written out, or JAX would put the global default in."""


def default() -> Any:
    """Returns the precision that the user set for all products, None if they set none."""
    if jax.config.jax_default_matmul_precision is None:
        return None
    return _given(jax.config.jax_default_matmul_precision)


@functools.lru_cache(maxsize=16)
def _given(_setting: Any) -> Any:
    x = jax.ShapeDtypeStruct((1,), jnp.float32)
    (product,) = jax.make_jaxpr(lax.dot)(x, x).jaxpr.eqns
    precision = product.params["precision"]
    return None if precision == LOW else precision


def left_open(precision: Any) -> contextlib.AbstractContextManager[Any]:
    """Traces products with the global default unset.

    Args:
      precision: the result of `default`.
    """
    if precision is None:
        return contextlib.nullcontext()
    return jax.default_matmul_precision(None)


def restored(eqn: Eqn, precision: Any) -> dict[str, Any]:
    """Returns the parameters of an equation that stays float32, the default put in its products."""
    if precision is None:
        return eqn.params
    if eqn.primitive.name in PRODUCTS:
        is_wide = any(_is_wide(v.aval.dtype) for v in eqn.invars[:2])
        return with_precision(eqn.params, precision) if is_wide else eqn.params
    if not compat.programs(eqn):
        return eqn.params
    return compat.map_programs(eqn.params, functools.partial(_program, precision=precision))


def _program(jaxpr: Any, *, precision: Any) -> Any:
    eqns = [eqn.replace(params=restored(eqn, precision)) for eqn in jaxpr.eqns]
    return jaxpr.replace(eqns=eqns)


def _is_wide(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.inexact) and dtype.itemsize > 2


_ALGORITHMS = {
    "tf32": lax.DotAlgorithmPreset.TF32_TF32_F32,
    "tf32x3": lax.DotAlgorithmPreset.TF32_TF32_F32_X3,
    "bf16": lax.DotAlgorithmPreset.BF16_BF16_F32,
    "bf16x3": lax.DotAlgorithmPreset.BF16_BF16_F32_X3,
    "bf16x6": lax.DotAlgorithmPreset.BF16_BF16_F32_X6,
    "bf16x9": lax.DotAlgorithmPreset.BF16_BF16_F32_X9,
    "f32": lax.DotAlgorithmPreset.F32_F32_F32,
}


def named(spec: Any) -> Any:
    """Returns the precision that `autocast(dot_precision=)` names, in JAX's terms."""
    if spec is None or isinstance(spec, lax.DotAlgorithmPreset):
        return spec
    if isinstance(spec, lax.Precision):
        return (spec, spec)
    if isinstance(spec, str) and spec in _ALGORITHMS:
        return _ALGORITHMS[spec]
    raise ValueError(
        message(
            "autocast(dot_precision=)",
            f"unknown algorithm {spec!r}.",
            f"Accepted: {', '.join(map(repr, _ALGORITHMS))}, a jax.lax.Precision or a "
            "jax.lax.DotAlgorithmPreset.",
            'Type dot_precision="tf32" for TensorFloat-32 products on float32 arrays.',
        )
    )
