"""The values that a constant can have, where they are few: of a mask, of positions, of counts."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from mpjax._base.dtypes import keeps

Values = tuple[float, ...] | None
"""None where they are not known."""

_MAX_VALUES = 8


def few(*values: float) -> Values:
    """Returns some values, each once; None where they are many."""
    distinct = tuple(sorted(set(values), key=repr))
    return distinct if len(distinct) <= _MAX_VALUES else None


def positions(count: Any) -> Values:
    """Returns values of 0, 1, 2 ...: of the last two, one is odd and tells whether all fit."""
    if not isinstance(count, int):  # `jax.export` leaves it open
        return None
    return few(0.0, float(max(count - 2, 0)), float(max(count - 1, 0)))


def converted(source: Any) -> Values:
    """Returns the values that an array of a dtype that is no float can have."""
    if source == np.bool_:
        return few(0.0, 1.0)
    if source.itemsize == 1:
        return few(float(jnp.iinfo(source).min), float(jnp.iinfo(source).max))
    return None


@functools.lru_cache(maxsize=4096)
def fit(values: Values, dtype: Any) -> bool:
    """Whether values keep their meaning in `dtype`: no overflow, no underflow, exact integers.

    A mask of -1e9 or an epsilon of 1e-8 would be -inf and 0 in float16; 257 would be 256 in
    bfloat16.
    """
    return values is not None and all(keeps(dtype, v) for v in values)


def total(values: Values, dims: Sequence[Any]) -> Values:
    """Returns the values of a sum over some dimensions, such as of one-hot rows."""
    if values is None or not all(isinstance(n, int) for n in dims):
        return None
    least, most = math.prod(dims) * min(values), math.prod(dims) * max(values)
    if not all(math.isfinite(v) and v == int(v) for v in (*values, least, most)):
        return None
    if most - least < _MAX_VALUES:
        return few(*map(float, range(int(least), int(most) + 1)))
    # The two at either end: one of each is odd, and tells whether all between them fit.
    return few(least, least + 1, most - 1, most)


ARITHMETIC = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "max": np.maximum,
    "min": np.minimum,
    "neg": np.negative,
}
"""How operations are computed where the numbers are known."""


def arithmetic(name: str, operands: Sequence[Values]) -> Values:
    """Returns the values of an operation on constants."""
    sets = [values for values in operands if values is not None]
    is_known = name in ARITHMETIC and len(sets) == len(operands)
    if not is_known or math.prod(map(len, sets)) > _MAX_VALUES:
        return None
    with np.errstate(all="ignore"):
        grid = np.meshgrid(*(np.asarray(s, np.float32) for s in sets))
        return few(*np.ravel(ARITHMETIC[name](*grid)).tolist())
