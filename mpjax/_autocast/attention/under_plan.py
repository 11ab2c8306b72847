"""Names the kernel of a `dot_product_attention` in a plan, for `explain`."""

from __future__ import annotations

from typing import Any

import jax

from mpjax._autocast.attention import kernels
from mpjax._autocast.attention.program import AttentionProgram
from mpjax._autocast.known.named_attention import DERIVED, MULTIPLIED, is_backward
from mpjax._jaxpr.equation import Eqn


def where(eqn: Eqn, low: Any) -> str:
    """Returns the sentence of `explain` about the kernel of an attention of low operands."""
    program: AttentionProgram = eqn.params["program"]
    avals = [v.aval for v in eqn.invars[: -DERIVED if is_backward(eqn) else None]]
    structs = [
        jax.ShapeDtypeStruct(a.shape, low if i < MULTIPLIED else a.dtype)
        for i, a in enumerate(avals)
    ]
    return kernels.where(program, structs, avals)
