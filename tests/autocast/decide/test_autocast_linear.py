"""Between a product and what amplifies its errors stand linear operations: all of them, in any cut.

A spectrum's logarithm, a solve and a linear iteration need the product that they read in float32.
Frames that are stacked, a padded signal, a matrix of blocks, a boundary that is set: the need goes
through each of these, and ends at a function that is not linear.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mpjax

SIZE = 16
MASK = np.arange(SIZE) % 5 > 0

LINEAR = {  # of the last axis of an array of (8, 16)
    "a stack of frames": lambda y: jnp.stack([y[:, i : i + 8] for i in range(0, 9, 4)]),
    "frames by a gather": lambda y: y[:, np.arange(3)[:, None] * 4 + np.arange(8)],
    "two halves": lambda y: jnp.concatenate([y[:, 8:], y[:, :8]], -1),
    "zeros around": lambda y: jnp.pad(y, ((0, 0), (3, 3))),
    "a reflected edge": lambda y: jnp.pad(y, ((0, 0), (3, 3)), mode="reflect"),
    "a limit": lambda y: jnp.clip(y, -1e3, 1e3),
    "a lower limit": lambda y: jnp.maximum(y, -1e3),
    "a mask": lambda y: jnp.where(MASK, y, 0),
    "a mask that multiplies": lambda y: y * MASK.astype(y.dtype),
    "a boundary": lambda y: y.at[:, 0].set(1.0),
    "an overlap": lambda y: jnp.zeros((8, 20), y.dtype).at[:, :16].add(y).at[:, 4:].add(y),
    "a part of a buffer": lambda y: lax.dynamic_update_slice(
        jnp.zeros((8, 20), y.dtype), y, (0, 2)
    ),
    "a roll": lambda y: jnp.roll(y, 3, -1),
    "a running sum": lambda y: jnp.cumsum(y, -1),
    "sums of two": lambda y: y.reshape(8, 8, 2).sum(-1),
    "sums of windows": lambda y: lax.reduce_window(y, 0.0, lax.add, (1, 2), (1, 2), "VALID"),
    "less its mean": lambda y: y - y.mean(-1, keepdims=True),
    "scaled": lambda y: 0.5 * y * np.hanning(SIZE).astype(y.dtype) + 1,
    "sorted rows": lambda y: y[jnp.argsort(jnp.arange(8) % 3)],
}
FUNCTIONS = {
    "a relu": jax.nn.relu,
    "a relu by hand": lambda y: jnp.where(y > 0, y, 0),
    "a leaky one": jax.nn.leaky_relu,
    "a tanh": jnp.tanh,
    "a gelu": jax.nn.gelu,
    "a softmax": jax.nn.softmax,
}
CUTS = {"uncut": lambda fun: fun, "jit": jax.jit, "checkpoint": jax.checkpoint}


def _log_spectrum(y):
    return jnp.log(jnp.abs(jnp.fft.rfft(y)) ** 2 + 1e-10).mean()


def _log_transform(y):
    count = y.shape[-1]
    phases = 2 * np.pi / count * np.arange(count)[:, None] * np.arange(count // 2)
    real, imaginary = (y @ wave(phases).astype(np.float32) for wave in (np.cos, np.sin))
    return jnp.log(real**2 + imaginary**2 + 1e-10).mean()


def _solved(y):
    y = y.reshape(-1, y.shape[-1])
    return jnp.linalg.solve(y @ y.T + 1e-3 * jnp.eye(len(y)), y).sum()


def _determinant(y):
    y = y.reshape(-1, y.shape[-1])
    return jnp.linalg.slogdet(y.T @ y + 1e-3 * jnp.eye(y.shape[-1]))[1]


READERS = {
    "a log spectrum": _log_spectrum,
    "one by a matrix": _log_transform,
    "a solve": _solved,
    "a determinant": _determinant,
}


def _dtypes(fun, *args):
    rows = mpjax.explain(fun, "bf16-mixed")(*args).rows
    products = ("dot_general", "conv_general_dilated")
    return [r.dtype for r in rows if r.operation in products for _ in range(r.count)]


X, W = np.ones((8, 12), np.float32), np.full((12, SIZE), 0.1, np.float32)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", LINEAR)
def test_law_of_linearity_what_is_read_through_a_linear_operation_is_float32(name, reader, cut):
    between = CUTS[cut](LINEAR[name])
    assert set(_dtypes(lambda x, w: READERS[reader](between(x @ w)), X, W)) == {"f32"}


def _filtered(x, k):
    return lax.conv(x[:, None], k[None, None], (1,), "VALID")[:, 0]


@pytest.mark.parametrize("taps", [np.array([-0.97, 1.0], np.float32), None])
def test_law_of_linearity_a_convolution_makes_a_signal_as_a_product_does(taps):
    def loss(x, k):
        return _log_spectrum(jnp.pad(_filtered(x, k if taps is None else taps), ((0, 0), (2, 2))))

    assert _dtypes(loss, X, np.ones(3, np.float32)) == ["f32"]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_stands_before_a_function_that_is_not_linear_is_low(name, reader):
    dtypes = _dtypes(lambda x, w: READERS[reader](FUNCTIONS[name](x @ w)), X, W)
    assert dtypes[0] == "bf16"


KEEP_THE_SHAPE = [
    name for name in LINEAR if jax.eval_shape(LINEAR[name], np.ones((8, SIZE))).shape == (8, SIZE)
]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", KEEP_THE_SHAPE)
def test_law_of_linearity_a_linear_iteration_may_set_a_boundary(name, cut):
    def iterated(x, a):
        turn = CUTS[cut](lambda v: LINEAR[name](0.9 * v @ a + x))
        return lax.scan(lambda v, _: (turn(v), None), x, None, 20)[0]

    assert _dtypes(iterated, np.ones((8, SIZE), np.float32), np.eye(SIZE, dtype=np.float32)) == [
        "f32"
    ]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_iteration_by_a_function_that_is_not_linear_is_low(name):
    def iterated(x, a):
        return lax.scan(lambda v, _: (FUNCTIONS[name](v @ a + x), None), x, None, 20)[0]

    assert _dtypes(iterated, X[:, :8], np.ones((8, 8), np.float32)) == ["bf16"]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", [n for n in FUNCTIONS if n != "a softmax"])
def test_the_gradient_of_such_an_iteration_is_low_in_any_cut(name, cut):
    """`ct + slope * ct @ a.T` is linear in `ct`, and its slope is another one in each turn."""

    def loss(a, x):
        turn = CUTS[cut](lambda v: v + FUNCTIONS[name](v @ a) @ a.T / 20)
        return jnp.mean(lax.scan(lambda v, _: (turn(v), None), x, None, 20)[0] ** 2)

    dtypes = _dtypes(jax.value_and_grad(loss), np.ones((8, 24), np.float32), X[:, :8])
    assert set(dtypes) == {"bf16"}
