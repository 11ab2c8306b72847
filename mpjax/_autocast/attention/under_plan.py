"""Attention by name under a plan: which kernel runs it."""

from __future__ import annotations

from typing import Any

import jax

from mpjax._autocast.attention import kernels
from mpjax._autocast.attention.program import AttentionProgram
from mpjax._autocast.decide.named_attention import DERIVED, MULTIPLIED, is_backward


def where(eqn: Any, low: Any) -> str:
    """Returns which kernel runs an attention of low operands on which platform, and why."""
    program: AttentionProgram = eqn.params["program"]
    avals = [v.aval for v in eqn.invars[: -DERIVED if is_backward(eqn) else None]]
    structs = [
        jax.ShapeDtypeStruct(a.shape, low if i < MULTIPLIED else a.dtype)
        for i, a in enumerate(avals)
    ]
    return kernels.where(program, structs, avals)
