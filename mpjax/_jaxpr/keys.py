"""Keys by which equal equations of a program are found to be equal."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np


def hashable(param: Any) -> Hashable:
    """Returns a parameter, or its identity: JAX 0.10 has rules with lists inside."""
    try:
        hash(param)
    except TypeError:
        return id(param)  # of an equation that the plan holds, as long as the key is in use
    return param


def literal_key(literal: Any) -> Hashable:
    """Returns what equal literals have in common: type and bits."""
    return literal.aval, np.asarray(literal.val).tobytes()  # by its bits: -0.0 equals 0.0
