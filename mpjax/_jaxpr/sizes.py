"""Sizes of values, as far as shapes tell, and which of them are float32."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from mpjax._base.dtypes import FLOAT32
from mpjax._jaxpr.equation import Eqn

_SYMBOLIC = 1024  # what a dimension counts for that `jax.export` leaves open


def is_float32(atom: Any) -> bool:
    """Whether a variable or literal is a float32 array: all that autocast ever moves."""
    return getattr(atom.aval, "dtype", None) == FLOAT32


def is_number(atom: Any) -> bool:
    """Whether a variable or literal holds floats or complex numbers, of any dtype."""
    return _is_inexact(getattr(atom.aval, "dtype", None))


@functools.cache
def _is_inexact(dtype: Any) -> bool:
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def size(shape: Sequence[Any]) -> int:
    """Returns the number of elements of a shape, to compare it with others."""
    return _size(tuple(shape))


@functools.lru_cache(maxsize=4096)
def _size(shape: tuple[Any, ...]) -> int:
    return math.prod(n if isinstance(n, int) else _SYMBOLIC for n in shape)


def copies(eqn: Eqn) -> int:
    """Returns how many copies of its operand a broadcast makes, 0 of one without elements."""
    return size(eqn.outvars[0].aval.shape) // max(size(eqn.invars[0].aval.shape), 1)
