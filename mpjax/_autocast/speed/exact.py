"""Runs functions that only choose, compare and move values, such as relu, on low values.

Their results are exact in either dtype, and their derivative saves at most a mask. So a low operand
is stored, and forward and backward pass both read it: a group around them would save its inputs and
its result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from mpjax._autocast.known import traits
from mpjax._autocast.speed import lowerings
from mpjax._base import compat
from mpjax._base.dtypes import FLOAT32, keeps
from mpjax._jaxpr import structure
from mpjax._jaxpr.binding import bind, evaluate
from mpjax._jaxpr.caches import by_program
from mpjax._jaxpr.equation import Eqn
from mpjax._jaxpr.rule_traces import RuleTrace

_COMPARISONS = traits.CHOOSES & traits.LOOKS & traits.FUSIBLE
"""Compare elements, or ask whether they are finite."""


def is_exact(eqn: Eqn, dtype: Any) -> bool:
    """Whether an equation is a function that gives equal results in `dtype` and in float32."""
    if eqn.primitive.name not in ("jit", "custom_jvp_call"):
        return False
    return _is_exact_program(compat.closed(structure.single_program(eqn)).jaxpr, dtype)


@by_program
def _is_exact_program(jaxpr: Any, dtype: Any) -> bool:
    return not jaxpr.constvars and all(
        _constants_fit(eqn, dtype)
        and (
            is_exact(eqn, dtype)
            if structure.single_program(eqn) is not None
            else eqn.primitive.name in traits.CHOOSES
        )
        for eqn in jaxpr.eqns
    )


def _constants_fit(eqn: Eqn, dtype: Any) -> bool:
    """Whether constants may be rounded. A threshold may not: 0.1 is less than bfloat16's 0.1."""
    literals = [v for v in eqn.invars if compat.is_literal(v) and v.aval.dtype == FLOAT32]
    if any(np.ndim(v.val) or not keeps(dtype, float(v.val)) for v in literals):
        return False
    if eqn.primitive.name not in _COMPARISONS:
        return True
    return all(np.asarray(v.val, dtype) == v.val for v in literals)


def compared(eqn: Eqn, stored: Mapping[Any, Any]) -> list[Any]:
    """Returns the operands of a comparison of stored low values, else an empty list.

    Widened first, XLA:GPU would compare what was rounded to them, and store or compute that again.

    Args:
      eqn: an equation.
      stored: arrays in the dtypes in which they are stored, by variable.
    """
    if eqn.primitive.name not in _COMPARISONS:
        return []
    read = compat.variables(eqn)
    if not read or not stored.keys() >= set(read):
        return []
    dtype, *others = {stored[v].dtype for v in read}
    if others or dtype == read[0].aval.dtype or not _constants_fit(eqn, dtype):
        return []
    return [jnp.asarray(v.val, dtype) if compat.is_literal(v) else stored[v] for v in eqn.invars]


def run(eqn: Eqn, values: Sequence[Any], dtype: Any) -> list[Any]:
    """Returns the results of an exact function of low values, with its own derivative rule."""
    program = compat.closed(structure.single_program(eqn))
    if eqn.primitive.name == "jit":
        return _evaluate(program, values, dtype)

    def function(*arrays: Any) -> list[Any]:
        return _evaluate(program, arrays, dtype)

    def wrap(rule: Callable[..., Any]) -> Callable[..., Any]:
        return functools.partial(_on_low, rule, dtype)

    return list(compat.bind_custom(eqn, values, wrap, function))


def _on_low(fun: Callable[..., Any], dtype: Any, *args: Any) -> Any:
    """Returns `fun(*args)` on low arrays, for a rule that was written for float32."""
    traced = RuleTrace(fun, args, lambda array: _widened(array, dtype))
    jaxpr = traced.jaxpr
    if _is_exact_program(jaxpr.jaxpr, dtype):
        return traced.rebuild(_evaluate(jaxpr, traced.arrays, dtype))
    # A user's own rule may round: it runs in float32, as it was written.
    outs = jaxpr_as_fun(jaxpr)(*(_widened(a, dtype) for a in traced.arrays))
    return traced.rebuild([x.astype(dtype) if x.dtype == FLOAT32 else x for x in outs])


def _widened(array: Any, dtype: Any) -> Any:
    return array.astype(FLOAT32) if array.dtype == dtype else array


def _evaluate(jaxpr: Any, values: Sequence[Any], dtype: Any) -> list[Any]:
    def constant(x: Any, aval: Any) -> Any:
        return np.asarray(x, dtype) if aval.dtype == FLOAT32 else x

    def one(eqn: Eqn, operands: list[Any]) -> Sequence[Any]:
        if structure.single_program(eqn) is not None:
            return run(eqn, operands, dtype)
        outs = bind(eqn, operands)
        if eqn.primitive.name in traits.WIDENED and outs[0].dtype == dtype:
            return [lowerings.chosen(outs[0])]
        return outs

    return [jnp.asarray(out) for out in evaluate(jaxpr, values, one, constant=constant)]
