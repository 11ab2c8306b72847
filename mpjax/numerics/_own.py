"""Which operations autocast put in: identities that compilers and derivatives read as hints."""

from __future__ import annotations

from typing import Any

# Its operations that compute; all others give their first operand, rounded perhaps.
COMPUTES = frozenset({"low_product", "gather_one", "pooled_tangent", "pooled_cotangent"})


def is_identity(eqn: Any) -> bool:
    """Whether an operation is one of autocast's that gives its first operands, one for a result."""
    if eqn.primitive.name in COMPUTES or not eqn.outvars:
        return False
    home = getattr(getattr(eqn.primitive, "impl", None), "__module__", "") or ""
    shapes = [[getattr(v.aval, "shape", None) for v in vs] for vs in (eqn.invars, eqn.outvars)]
    return home.startswith("mpjax._autocast") and shapes[0][: len(shapes[1])] == shapes[1]
