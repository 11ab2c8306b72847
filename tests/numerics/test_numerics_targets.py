"""What a diagnosis reads in the program for an H100 that is not here: its values, run here."""

import _hlo_values
import jax.numpy as jnp
import numpy as np
import pytest
from _helpers import compiled_for

from mpjax.numerics import _bits

pytestmark = pytest.mark.gpu_compiler

X = np.array([1.0, 300.0, np.nan, -np.inf, 3.0001, 0.0], np.float32)  # 300² is inf in float16


def on_h100(fun, *args):
    """Returns what the program for an H100 makes of arguments."""
    return _hlo_values.run(compiled_for("h100", fun, *args), *map(np.asarray, args))


def test_an_overflow_that_xla_deletes_from_a_program_is_read_off_the_bits():
    def widened(x):
        return (x * x).astype(jnp.float16).astype(jnp.float32) * 2

    def read(x):
        rounded = (x * x).astype(jnp.float16)
        return tuple(part for part, _ in _bits.read(rounded)), rounded.astype(jnp.float32)

    assert np.asarray(on_h100(widened, X))[1] == 180_000  # the rounding is gone
    infs, nans, bits, _ = map(np.asarray, on_h100(read, X))
    assert infs.tolist() == [0, 1, 0, 1, 0, 0]
    assert nans.tolist() == [0, 0, 1, 0, 0, 0]
    assert bits.view(np.float16).tolist() == [1, 0, 0, 0, np.float16(np.float32(3.0001) ** 2), 0]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_inf_and_nan_are_told_from_the_largest(dtype):
    def read(x):
        return tuple(part for part, _ in _bits.read(x.astype(dtype)))

    infs, nans, bits = map(np.asarray, on_h100(read, X))
    rounded = X.astype(dtype)
    assert infs.tolist() == np.isinf(rounded).tolist()
    assert nans.tolist() == np.isnan(rounded).tolist()
    largest = bits.max(keepdims=True).view(rounded.dtype)  # NaN does not pass for it
    assert largest == np.abs(rounded[np.isfinite(rounded)]).max()
