"""Hashable keys of equations: equal keys for equal equations of a program."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np

from mpjax._base import compat
from mpjax._jaxpr.equation import Eqn

_BY_VALUE = (bool, int, str, tuple, np.dtype)


def equation(eqn: Eqn, number: Mapping[Any, Hashable]) -> tuple[Hashable, ...]:
    """Returns the key of an equation, which only equal equations of one program share.

    Args:
      eqn: the equation.
      number: what stands for each of its variables.
    """
    operands = [literal(v) if compat.is_literal(v) else number[v] for v in eqn.invars]
    return (eqn.primitive, *operands, *params(eqn))


def params(eqn: Eqn) -> list[Hashable]:
    """Returns the names and values of an equation's parameters."""
    return [(name, _hashable(value)) for name, value in sorted(eqn.params.items())]


def _hashable(param: Any) -> Hashable:
    """Returns a parameter, or its identity: JAX 0.10 has rules with lists inside."""
    try:
        hash(param)
    except TypeError:
        return id(param)  # unique: the plan refers to the equation as long as the key is in use
    return param


def literal(atom: Any) -> Hashable:
    """Returns the key of a literal: its type and its bits."""
    return atom.aval, np.asarray(atom.val).tobytes()  # bits, since -0.0 == 0.0


def printed_params(eqn: Eqn) -> tuple[Hashable, ...]:
    """Returns the parameters of an equation, objects as they print.

    Two traces of one function are two objects, and print alike; so may two arrays that differ. It
    is for a question that may be answered with yes too often: whether values are equal, so that
    none of them may be rounded.
    """
    return tuple(map(_printed, eqn.params.values()))


def _printed(value: Any) -> Hashable:
    try:
        hash(value)
    except TypeError:
        return str(value)
    return value if value is None or isinstance(value, _BY_VALUE) else str(value)
