"""Runs an operation in the reference dtype, without its roundings to narrower dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from mpjax._base import compat
from mpjax._jaxpr.binding import bind, evaluate
from mpjax._jaxpr.equation import Eqn, Jaxpr
from mpjax._jaxpr.op_rules import OP_RULES
from mpjax.numerics._own import is_identity

# Roundings, which the reference leaves out.
_ROUNDS = frozenset({"convert_element_type", "reduce_precision"})
_OWN = frozenset({"gather_one", "pooled_tangent", "pooled_cotangent"})  # as they are, in float64
_TYPED = frozenset({"reduce", "reduce_window", "select_and_scatter", "custom_linear_solve"})


def widened(x: Any, dtype: Any) -> Any:
    """Returns a floating value in the reference dtype, unless it is as wide already."""
    x = jnp.asarray(x)
    narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < jnp.dtype(dtype).itemsize
    return x.astype(dtype) if narrow else x


def wider(a: Any, b: Any) -> Any:
    """Returns the floating dtype of more bytes, `b` of two alike."""
    a, b = jnp.dtype(a), jnp.dtype(b)
    return a if a.itemsize > b.itemsize else b


def in_reference(eqn: Eqn, operands: Sequence[Any], outs: Sequence[Any], dtype: Any) -> list[Any]:
    """Returns the results of an equation on other operands, in the reference dtype.

    Args:
      eqn: the equation.
      operands: its operands, floating ones in the reference dtype.
      outs: its results as it was traced; returned where it cannot run in the reference dtype.
      dtype: the reference's.
    """
    name = eqn.primitive.name
    if name in _ROUNDS or is_identity(eqn):
        return [
            jnp.asarray(x).astype(wider(out.dtype, dtype)) if _is_floating(out) else out
            for x, out in zip(operands, outs, strict=False)
        ]
    if name == "low_product":
        program = eqn.params["program"].traced  # 8-bit copies of its operands may stand behind them
        return _evaluated(program, operands[: len(program.jaxpr.invars)], dtype)
    is_known = name in OP_RULES or name in _OWN
    if not is_known or name in _TYPED or _is_typed(eqn):
        return [widened(x, dtype) for x in outs]
    return bind(eqn, _alike(eqn, operands, dtype), _parameters(eqn, dtype))


def _is_typed(eqn: Eqn) -> bool:
    """Whether an equation holds a jaxpr of narrow dtypes, which would not take wide operands."""
    narrow = any(getattr(v.aval.dtype, "itemsize", 8) < 4 for v in eqn.invars if _floats(v))
    return bool(compat.programs(eqn)) and narrow


def _floats(atom: Any) -> bool:
    dtype = getattr(atom.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating)


def _is_floating(x: Any) -> bool:
    return jnp.issubdtype(jnp.asarray(x).dtype, jnp.floating)


def _alike(eqn: Eqn, operands: Sequence[Any], dtype: Any) -> list[Any]:
    """Returns the operands in one dtype, literals too."""
    pairs = zip(eqn.invars, operands, strict=True)
    return [widened(x, dtype) if _floats(v) else x for v, x in pairs]


def _parameters(eqn: Eqn, dtype: Any) -> dict[str, Any]:
    params = dict(eqn.params)
    if params.get("preferred_element_type") is not None:
        made = jnp.dtype(params["preferred_element_type"])
        if jnp.issubdtype(made, jnp.floating):
            params["preferred_element_type"] = wider(made, dtype)
    return params


def _evaluated(jaxpr: Jaxpr, operands: Sequence[Any], dtype: Any) -> list[Any]:
    """Returns the results of a program in the reference dtype."""

    def one(eqn: Eqn, values: list[Any]) -> Sequence[Any]:
        if eqn.primitive.name == "jit":
            return _evaluated(eqn.params["jaxpr"], values, dtype)
        return bind(eqn, _alike(eqn, values, dtype), _parameters(eqn, dtype))

    return evaluate(jaxpr, operands, one, only_live=True)
