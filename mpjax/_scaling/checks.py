"""Checks the numbers that a loss scale is made of."""

import math
from typing import Any

import jax
import jax.core
import numpy as np

from mpjax._base.dtypes import describe
from mpjax._base.errors import message
from mpjax._base.typing import ScalarLike

# The reciprocal of a larger scale would be subnormal, which CPUs flush to zero.
MAX_EXPONENT = 126
LARGEST = 2.0**MAX_EXPONENT
SMALLEST = 2.0**-MAX_EXPONENT

_ARRAYS = (jax.Array, np.ndarray, np.generic)


def known(*values: ScalarLike) -> bool:
    """Whether every value is known: none is traced."""
    return not any(isinstance(x, jax.core.Tracer) for x in values)


def _check_number(where: str, value: Any) -> None:
    is_real = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_real or (isinstance(value, _ARRAYS) and value.shape == () and np.isrealobj(value)):
        return
    shown = describe(value) if isinstance(value, _ARRAYS) else repr(value)
    got = f"must be a real number; got {shown}."
    fix = "Type a number; several loss scales at once are made under jax.vmap."
    raise TypeError(message(where, got, fix))


def _as_float32(value: ScalarLike) -> float:
    """Returns a number rounded to the dtype of the fields, float32: 1 + 1e-9 is 1 there."""
    try:
        with np.errstate(over="ignore", under="ignore"):
            return float(np.float32(value))
    except OverflowError:  # an int past the range of C's double
        return math.inf if int(value) > 0 else -math.inf


def check_scale(where: str, value: ScalarLike) -> None:
    _check_number(where, value)
    if not known(value):
        return
    number = _as_float32(value)
    if not (math.isfinite(number) and SMALLEST <= number <= LARGEST):
        got = f"must be a positive finite number; got {value}."
        allowed = "Allowed: 2**-126 to 2**126, so that its reciprocal is a normal float32."
        raise ValueError(message(where, got, allowed, "Type, for example, 2**15."))


def check_bounds(start: ScalarLike, low: ScalarLike, high: ScalarLike) -> None:
    named = {"loss_scale": start, "min_loss_scale": low, "max_loss_scale": high}
    for name, value in named.items():
        check_scale(f"DynamicLossScale({name})", value)
    if not known(low, high):
        return
    least, most = _as_float32(low), _as_float32(high)
    if least > most:
        got = f"min_loss_scale {least:g} is above max_loss_scale {most:g}."
        raise ValueError(message("DynamicLossScale", got, "Swap them, or widen the range."))
    if known(start) and not least <= _as_float32(start) <= most:
        got = f"loss_scale {_as_float32(start):g} is outside [{least:g}, {most:g}]."
        fix = "Start within the bounds, or set min_loss_scale or max_loss_scale."
        raise ValueError(message("DynamicLossScale", got, fix))


def check_factors(growth: ScalarLike, backoff: ScalarLike) -> None:
    where = "DynamicLossScale(growth_factor)"
    _check_number(where, growth)
    if known(growth) and not 1 < _as_float32(growth) < math.inf:
        got = f"must be more than 1 and finite, in float32; got {growth}."
        raise ValueError(message(where, got, "Type, for example, 2."))
    where = "DynamicLossScale(backoff_factor)"
    _check_number(where, backoff)
    if known(backoff) and not 0 < _as_float32(backoff) < 1:
        got = f"must lie between 0 and 1, in float32; got {backoff}."
        raise ValueError(message(where, got, "Type, for example, 0.5."))


def check_counts(interval: ScalarLike, counter: ScalarLike) -> None:
    rows = (("growth_interval", interval, 1, 2000), ("counter", counter, 0, 0))
    for name, value, least, default in rows:
        _check_number(f"DynamicLossScale({name})", value)
        if known(value) and not (float(value).is_integer() and least <= float(value) < 2**31):
            got = f"must be a whole number of at least {least}; got {value}."
            fix = f"Type, for example, {default}."
            raise ValueError(message(f"DynamicLossScale({name})", got, fix))
