"""Attention by name under a plan: which of its operands and results are low, and how it is run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from mpjax._autocast.attention import kernels, primitives
from mpjax._autocast.attention.program import MULTIPLIED, Program
from mpjax._op_rules import OpClass, op_class

_DERIVED = 3  # result, rows and cotangent, which a derivative reads last
FLOAT32 = np.dtype("float32")


def is_attention(eqn: Any) -> bool:
    """Whether an equation is an attention, or its derivative."""
    return eqn.primitive in (primitives.attention_p, primitives.backward_p)


def _is_backward(eqn: Any) -> bool:
    return eqn.primitive is primitives.backward_p


def operands_low(eqn: Any) -> list[bool]:
    """Returns which operands a kernel multiplies: query, key, value, result and its cotangent."""
    count = len(eqn.invars)
    last = {count - _DERIVED, count - 1} if _is_backward(eqn) else set()
    return [i < MULTIPLIED or i in last for i in range(count)]


def results_low(eqn: Any) -> list[bool]:
    """Returns which results a kernel rounds: all but a row's sum and the gradient of a bias."""
    if _is_backward(eqn):
        return [i < MULTIPLIED for i in eqn.params["wrt"]]
    return [True, False]


def why_as_written(eqn: Any, settings: Any, low: Any, *, is_exact: bool) -> str:
    """Returns why an attention is not made low, empty where it may be."""
    if low is None:
        return "float32 was asked for here"
    if op_class("dot_general", settings.rules) is not OpClass.LOWER:
        return "its products are kept in float32 by rules="
    if any(v.aval.dtype != FLOAT32 for v in eqn.invars[:MULTIPLIED]):
        return "operands are not float32: as written"
    if is_exact:
        return "rounding would ruin what reads it"
    return ""


def where(eqn: Any, low: Any) -> str:
    """Returns which kernel runs an attention of low operands on which platform, and why."""
    program: Program = eqn.params["program"]
    avals = [v.aval for v in eqn.invars[: -_DERIVED if _is_backward(eqn) else None]]
    structs = [
        jax.ShapeDtypeStruct(a.shape, low if i < MULTIPLIED else a.dtype)
        for i, a in enumerate(avals)
    ]
    return kernels.where(program, structs, avals)


def run(decision: Any, values: Sequence[Any]) -> list[Any]:
    """Returns the results of an attention, on low operands."""
    eqn = decision.eqn
    arrays = [
        value.low(decision.low) if is_low else value.full
        for value, is_low in zip(values, operands_low(eqn), strict=True)
    ]
    if _is_backward(eqn):
        return primitives.backward(*arrays, **eqn.params)
    return list(primitives.attention(eqn.params["program"], *arrays))
