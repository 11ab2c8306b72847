"""Hashable keys of equations: equal keys for equal equations of a program."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np


def hashable(param: Any) -> Hashable:
    """Returns a parameter, or its identity: JAX 0.10 has rules with lists inside."""
    try:
        hash(param)
    except TypeError:
        return id(param)  # unique: the plan refers to the equation as long as the key is in use
    return param


def literal_key(literal: Any) -> Hashable:
    """Returns the key of a literal: its type and its bits."""
    return literal.aval, np.asarray(literal.val).tobytes()  # bits, since -0.0 == 0.0
