"""Tells the identities that autocast put into a program, as hints to compilers and derivatives."""

from __future__ import annotations

from mpjax._base.own_primitives import returns_operands
from mpjax._jaxpr.equation import Eqn


def is_identity(eqn: Eqn) -> bool:
    """Whether an operation is one of autocast's that gives its first operands, one for a result."""
    if not eqn.outvars or not returns_operands(eqn.primitive):
        return False
    shapes = [[getattr(v.aval, "shape", None) for v in vs] for vs in (eqn.invars, eqn.outvars)]
    return shapes[0][: len(shapes[1])] == shapes[1]
