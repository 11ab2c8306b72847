"""What the arrays tell that a program closes over: which are coordinates, stencils, rotations.

A layer's weights are neither exactly 0, nor whole numbers, nor at equal distances. An array of such
numbers was written by a person, or made by a formula.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._autocast.known.fact_flags import AMOUNTS, ASSEMBLED, EITHER, NEGATED, STENCIL
from mpjax._base import compat

_MOST_READ = 1 << 14
"""Larger arrays are not read: on a device, this takes time."""
_FEW = 256
"""So few random weights do not add up to 0 by chance."""
_EQUAL = 1e-6
"""So much of the largest number, or of the sum of all, is rounding in float32."""


def flags(value: Any) -> int:
    """Returns the flags of a constant array, of which larger ones are not read.

    Args:
      value: what a program closes over, such as a NumPy array, one on a device, or a random key.
    """
    if not _is_read(value):
        return 0
    array = np.asarray(jax.device_get(value), np.float64)
    some = array < 0
    made = 0 if array.all() else ASSEMBLED
    if not np.isfinite(array).all():
        return made
    is_positive = not some.any() and array.max() > 1
    made |= AMOUNTS if is_positive or _is_a_grid(array) else 0
    if not some.any():
        return made
    if some.all():
        return made | NEGATED
    return made | EITHER | (STENCIL if _is_a_stencil(array) else 0)


def _is_read(value: Any) -> bool:
    """Whether a value is a small array of floats that is all on this machine."""
    if not isinstance(value, (np.ndarray, jax.Array)) or not 0 < value.size <= _MOST_READ:
        return False
    if not jnp.issubdtype(value.dtype, jnp.floating):
        return False
    if isinstance(value, np.ndarray):
        return True
    return compat.has_values(value) and value.is_fully_addressable and not value.is_deleted()


def _is_a_stencil(array: np.ndarray[Any, Any]) -> bool:
    """Whether numbers add up to 0, and not by chance."""
    if abs(array.sum()) > _EQUAL * np.abs(array).sum():
        return False
    return array.size <= _FEW or _is_a_grid(array)


def _is_a_grid(array: np.ndarray[Any, Any]) -> bool:
    """Whether numbers are whole, at equal distances, or each there twice, but for its sign."""
    if (array == np.round(array)).all():
        return True
    distinct = np.unique(array)
    steps = np.diff(distinct)
    if steps.size > 1 and np.ptp(steps) <= _EQUAL * np.abs(distinct).max():
        return True
    return 2 * np.unique(np.abs(array)).size <= array.size + 1
