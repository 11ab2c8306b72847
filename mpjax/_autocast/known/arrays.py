"""Tells coordinates, stencils and rotations by their numbers, among arrays that a program holds.

An array of whole numbers, or of numbers at equal distances, was written by a person or made by a
formula. Some weights of a layer are no such numbers, and are exactly 0 only where all are. Of such
weights nothing is told, not even a sign: a model that closes over its parameters is decided as one
that takes them.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._autocast.known import contraction
from mpjax._autocast.known.fact_flags import AMOUNTS, ASSEMBLED, EITHER, NEGATED, STENCIL
from mpjax._autocast.known.ranges import OUTSIDE
from mpjax._base import compat

_MOST_READ = 1 << 14
"""Larger arrays on a device are not read, and so many numbers of a larger one of NumPy are."""
_FEW = 256
"""So few random weights do not add up to 0 by chance."""
_LOST = 2.0**-6
"""So much of the root of a sum of squares may be lost to float16; of most arrays it is 2**-12."""
_EQUAL = 1e-6
"""So much of the largest number, or of the sum of all, is rounding in float32."""


def flags(value: Any) -> int:
    """Returns the flags of a constant array.

    Args:
      value: what a program closes over, such as a NumPy array, one on a device, or a random key.
    """
    if not _is_read(value):
        return 0
    array = np.asarray(jax.device_get(value))
    some = _some(array).astype(np.float64)
    if not np.isfinite(some).all():
        return 0
    outside = 0 if _is_held(array if array.size <= _MOST_READ else some) else OUTSIDE
    if not np.ptp(some):  # as all initial weights of a layer may be
        return outside | (NEGATED if some[0] < 0 and _are_whole(some) else 0)
    is_signed, is_grid = bool((some < 0).any()), _is_a_grid(some)
    made = outside | (ASSEMBLED if _turns(array) or not some.all() else 0)
    if is_grid or (some.max() > 1 and not is_signed):
        made |= AMOUNTS
    # A row of signs may add up to 0 by chance, but in a small matrix.
    few_in_rows = contraction.FEW**2 if is_grid else _FEW
    subtracts = (is_grid or array.size <= _FEW) and _subtracts(array)
    if is_signed and (subtracts or (array.size <= few_in_rows and _has_a_row(array))):
        made |= STENCIL | EITHER
    if is_signed and is_grid:
        made |= EITHER if some.max() > 0 else NEGATED
    return made


def name(value: Any) -> Hashable:
    """Returns what tells a constant from others: its numbers, or which object it is, if large.

    A function that makes a table has another object in each of its calls.
    """
    if not _is_read(value) or value.size > _MOST_READ:
        return id(value)
    array = np.asarray(jax.device_get(value))
    return array.shape, array.dtype, array.tobytes()


def _is_read(value: Any) -> bool:
    """Whether a value is an array of floats that is all on this machine."""
    if not isinstance(value, (np.ndarray, jax.Array)) or not value.size:
        return False
    if not jnp.issubdtype(value.dtype, jnp.floating):
        return False
    if isinstance(value, np.ndarray):
        return True
    is_here = compat.has_values(value) and value.is_fully_addressable and not value.is_deleted()
    return is_here and value.size <= _MOST_READ


def _some(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns the numbers of an array in one row, or of a large one some at random places."""
    row = array.reshape(-1)
    if row.size <= _MOST_READ:
        return row
    return row[np.random.default_rng(0).integers(row.size, size=_MOST_READ)]


def _is_held(array: np.ndarray[Any, Any]) -> bool:
    """Whether float16 holds an array, and each of its rows and columns.

    A table of constants of nature may have columns of 1e6 and of 1e-9. Weights have no such rows.
    """
    with np.errstate(over="ignore"):
        exact, held = (array.astype(d).astype(np.float64) for d in (np.float32, np.float16))
    lost = exact - held
    along = [None, *range(array.ndim)]
    sums = ((np.sum(lost**2, axis), np.sum(exact**2, axis)) for axis in along)
    return all((of_lost <= _LOST**2 * of_all).all() for of_lost, of_all in sums)


def _turns(array: np.ndarray[Any, Any]) -> bool:
    """Whether a matrix is a rotation of a few coordinates, or mirrors them."""
    if array.ndim != 2 or len(set(array.shape)) > 1 or len(array) > contraction.FEW:
        return False
    return np.allclose(array @ array.T, np.eye(len(array)), atol=1e-5)


def _subtracts(array: np.ndarray[Any, Any]) -> bool:
    """Whether sums over an array's elements subtract, as those over `1, -2, 1`.

    A matrix that turns by 90 degrees, or swaps places and signs, has one element in each row.
    """
    if not _cancel(array, None):
        return False
    return array.ndim != 2 or any(_is_mixed(array, axis).any() for axis in (0, 1))


def _has_a_row(array: np.ndarray[Any, Any]) -> bool:
    """Whether a row or a column of a matrix subtracts, as those of YCbCr that are no brightness."""
    if array.ndim != 2:
        return False
    return any((_is_mixed(array, axis) & _cancel(array, axis)).any() for axis in (0, 1))


def _is_mixed(array: np.ndarray[Any, Any], axis: int) -> Any:
    return (array < 0).any(axis) & (array > 0).any(axis)


def _cancel(array: np.ndarray[Any, Any], axis: int | None) -> Any:
    """Returns whether sums along an axis, or that of all, are 0 but for rounding."""
    sums, sizes = (np.sum(a, axis, dtype=np.float64) for a in (array, np.abs(array)))
    return np.abs(sums) <= _EQUAL * sizes


def _is_a_grid(numbers: np.ndarray[Any, Any]) -> bool:
    """Whether numbers are whole, at equal distances, or each there twice, but for its sign."""
    if _are_whole(numbers):
        return True
    distinct = np.unique(numbers)
    steps = np.diff(distinct)
    if steps.size > 1 and np.ptp(steps) <= _EQUAL * np.abs(distinct).max():
        return True
    return 2 * np.unique(np.abs(numbers)).size <= numbers.size + 1


def _are_whole(numbers: np.ndarray[Any, Any]) -> bool:
    return bool((numbers == np.round(numbers)).all())
