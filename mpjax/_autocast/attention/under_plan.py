"""Attention by name under a plan: which kernel runs it, and how it is run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from mpjax._autocast.attention import kernels, primitives
from mpjax._autocast.attention.program import Program
from mpjax._autocast.named_attention import DERIVED, MULTIPLIED, is_backward, operands_low


def where(eqn: Any, low: Any) -> str:
    """Returns which kernel runs an attention of low operands on which platform, and why."""
    program: Program = eqn.params["program"]
    avals = [v.aval for v in eqn.invars[: -DERIVED if is_backward(eqn) else None]]
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
    if is_backward(eqn):
        return primitives.backward(*arrays, **eqn.params)
    return list(primitives.attention(eqn.params["program"], *arrays))
