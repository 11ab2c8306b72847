"""Attention by name: which of its operands and results a kernel rounds."""

from __future__ import annotations

from mpjax._base.own_primitives import own_primitive
from mpjax._jaxpr.equation import Eqn

FORWARD = own_primitive("attention", computes=True, several=True)
BACKWARD = own_primitive("attention_backward", computes=True, several=True)
"""The primitives of `dot_product_attention`; their rules are in `attention/primitives`."""
MULTIPLIED = 3
"""Operands that are multiplied, which come first: query, key and value."""
DERIVED = 3
"""Operands that a derivative reads last: result, rows and cotangent."""


def is_attention(eqn: Eqn) -> bool:
    """Whether an equation is an attention, or its derivative."""
    return eqn.primitive in (FORWARD, BACKWARD)


def is_backward(eqn: Eqn) -> bool:
    """Whether an equation is the derivative of an attention."""
    return eqn.primitive is BACKWARD


def operands_low(eqn: Eqn) -> list[bool]:
    """Returns which operands a kernel multiplies: query, key, value, result and its cotangent."""
    count = len(eqn.invars)
    last = {count - DERIVED, count - 1} if is_backward(eqn) else set()
    return [i < MULTIPLIED or i in last for i in range(count)]


def results_low(eqn: Eqn) -> list[bool]:
    """Returns which results a kernel rounds: all but a row's sum and the gradient of a bias."""
    if is_backward(eqn):
        return [i < MULTIPLIED for i in eqn.params["wrt"]]
    return [True, False]
