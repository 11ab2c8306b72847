"""What the arrays tell that a program closes over: which are coordinates, stencils, rotations.

An array of whole numbers, or of numbers at equal distances, was written by a person or made by a
formula. Some weights of a layer are no such numbers, and are exactly 0 only where all are. Of such
weights nothing is told, not even a sign: a model that closes over its parameters is decided as one
that takes them.
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
    if not np.isfinite(array).all():
        return 0
    if not np.ptp(array):  # as all initial weights of a layer may be
        return NEGATED if array.flat[0] < 0 and _are_whole(array) else 0
    is_signed, is_grid = bool((array < 0).any()), _is_a_grid(array)
    made = 0 if array.all() else ASSEMBLED
    if is_grid or (array.max() > 1 and not is_signed):
        made |= AMOUNTS
    if is_signed and _is_a_stencil(array, is_grid=is_grid):
        made |= STENCIL | EITHER
    if is_signed and is_grid:
        made |= EITHER if array.max() > 0 else NEGATED
    return made


def _is_read(value: Any) -> bool:
    """Whether a value is a small array of floats that is all on this machine."""
    if not isinstance(value, (np.ndarray, jax.Array)) or not 0 < value.size <= _MOST_READ:
        return False
    if not jnp.issubdtype(value.dtype, jnp.floating):
        return False
    if isinstance(value, np.ndarray):
        return True
    return compat.has_values(value) and value.is_fully_addressable and not value.is_deleted()


def _is_a_stencil(array: np.ndarray[Any, Any], *, is_grid: bool) -> bool:
    """Whether numbers add up to 0, and not by chance."""
    is_balanced = abs(array.sum()) <= _EQUAL * np.abs(array).sum()
    return bool(is_balanced) and (is_grid or array.size <= _FEW)


def _is_a_grid(array: np.ndarray[Any, Any]) -> bool:
    """Whether numbers are whole, at equal distances, or each there twice, but for its sign."""
    if _are_whole(array):
        return True
    distinct = np.unique(array)
    steps = np.diff(distinct)
    if steps.size > 1 and np.ptp(steps) <= _EQUAL * np.abs(distinct).max():
        return True
    return 2 * np.unique(np.abs(array)).size <= array.size + 1


def _are_whole(array: np.ndarray[Any, Any]) -> bool:
    return bool((array == np.round(array)).all())
