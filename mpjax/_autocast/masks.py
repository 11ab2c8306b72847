"""Relu at the end of a group: what it let through is told from what it stored.

The derivative of relu is a mask of its input. A GPU stores that mask, a byte a value, where the
input is computed in a group, although the result says the same and is stored for the product that
reads it. So there the mask is read from the result, and the cotangent is masked as it comes, low:
one kernel masks it, adds it up for the norm behind and stores it. A TPU computes inputs again as
its convolutions read them, and masks by the input.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxpr_as_fun

from mpjax import _compat
from mpjax._autocast import exact, held, traits
from mpjax._autocast.hints import hint
from mpjax._autocast.rule_traces import RuleTrace
from mpjax._autocast.states import State


@hint("masks", lambda *_: frozenset[Any]())
def in_group(
    jaxpr: Any,
    eqns: Sequence[Any],
    outputs: Sequence[tuple[Any, bool, bool]],
    found: dict[Any, State],
) -> frozenset[Any]:
    """Returns the results of functions such as relu that a group stores low, for a product."""
    lows = {v for v, is_low, is_full in outputs if is_low and not is_full}
    lows -= {v for eqn in eqns for v in _compat.variables(eqn)}
    made = [
        eqn.outvars[0]
        for eqn in eqns
        if eqn.outvars[0] in lows and _is_masking(eqn, found[eqn.outvars[0]].dtype)
    ]
    if not made:
        return frozenset()
    keep = [eqn for eqn in jaxpr.eqns if eqn.primitive.name in traits.KEEPS]
    return frozenset(made).intersection(v for eqn in keep for v in _compat.variables(eqn))


def _is_masking(eqn: Any, dtype: Any) -> bool:
    """Whether an equation is a function of one value that chooses, with a derivative rule."""
    return (
        eqn.primitive.name == "custom_jvp_call"
        and not eqn.params["symbolic_zeros"]
        and len(eqn.invars) == len(eqn.outvars) == 1
        and eqn.invars[0].aval.dtype == exact.FLOAT32
        and exact.is_exact(eqn, dtype)
    )


def run(eqn: Any, value: Any, dtype: Any) -> Any:
    """Returns the low result of such a function, of a float32 value."""

    def wrap(fun: Callable[..., Any]) -> Callable[..., Any]:
        return functools.partial(_to_low, fun, dtype)

    (out,) = _compat.bind_custom(eqn, [value], wrap)
    return out


def _to_low(fun: Callable[..., Any], dtype: Any, *args: Any) -> Any:
    """Returns `fun(*args)`, of a float32 function or its rule, rounded where it is stored."""
    if len(args) == 1:
        return [held.stored(x.astype(dtype)) for x in fun(*args)]
    traced = RuleTrace(fun, args)
    jaxpr = traced.jaxpr
    if str(jaxpr) == str(_rule_of_relu(args)):
        value, tangent = args
        (made_by, *_) = jaxpr.jaxpr.eqns
        stored, low = run(made_by, value, dtype), tangent.astype(dtype)
        mask = held.is_positive(value, stored)
        return traced.rebuild([stored, lax.select(mask, low, jnp.zeros_like(low))])
    first, *tangents = jaxpr_as_fun(jaxpr)(*traced.arrays)
    outs = [held.stored(first.astype(dtype)), *(t.astype(dtype) for t in tangents)]
    return traced.rebuild(outs)


def _rule_of_relu(args: Sequence[Any]) -> Any:
    """Returns the program of the derivative of `jax.nn.relu`: the tangent where `x > 0`, else 0."""
    (eqn,) = jax.make_jaxpr(jax.nn.relu)(args[0]).jaxpr.eqns
    return RuleTrace(_compat.derivative_rule(eqn), args).jaxpr
