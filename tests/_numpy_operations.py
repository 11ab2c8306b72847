"""What JAX's operations compute, in NumPy: nothing is compiled, whatever the shapes.

Operands of 16 bits come widened, and results are cast by the caller to what the operation gives.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import scipy.special


def _logsumexp_running(x: np.ndarray, axis: int) -> np.ndarray:
    return np.logaddexp.accumulate(x, axis=axis)


def _along(ufunc: Callable[..., Any]) -> Callable[..., Any]:
    def run(x: np.ndarray, *, axis: int, reverse: bool) -> np.ndarray:
        if reverse:
            return np.flip(ufunc(np.flip(x, axis), axis=axis), axis)
        return ufunc(x, axis=axis)

    return run


def _dot(x: np.ndarray, y: np.ndarray, *, dimension_numbers: Any, **_: Any) -> np.ndarray:
    (contract_x, contract_y), (batch_x, batch_y) = dimension_numbers
    letters = iter("abcdefghijklmnop")
    of_x, of_y = [next(letters) for _ in x.shape], [next(letters) for _ in y.shape]
    for i, j in zip((*contract_x, *batch_x), (*contract_y, *batch_y), strict=True):
        of_y[j] = of_x[i]
    free_x = [c for i, c in enumerate(of_x) if i not in (*contract_x, *batch_x)]
    free_y = [c for i, c in enumerate(of_y) if i not in (*contract_y, *batch_y)]
    out = [*(of_x[i] for i in batch_x), *free_x, *free_y]
    return np.einsum(f"{''.join(of_x)},{''.join(of_y)}->{''.join(out)}", x, y)


def _convolve(
    x: np.ndarray,
    kernel: np.ndarray,
    *,
    window_strides: Sequence[int],
    padding: Any,
    lhs_dilation: Sequence[int],
    rhs_dilation: Sequence[int],
    dimension_numbers: Any,
    feature_group_count: int,
    batch_group_count: int,
    **_: Any,
) -> np.ndarray:
    of_x, of_kernel, of_out = dimension_numbers
    spatial = range(2, x.ndim)
    around = [(*ends, gap - 1) for ends, gap in zip(padding, lhs_dilation, strict=True)]
    holes = [(0, 0, gap - 1) for gap in rhs_dilation]
    none = [(0, 0, 0)] * 2
    x = _pad(np.transpose(x, of_x), x.dtype.type(0), padding_config=[*none, *around])
    kernel = np.transpose(kernel, of_kernel)
    kernel = _pad(kernel, kernel.dtype.type(0), padding_config=[*none, *holes])
    windows = np.lib.stride_tricks.sliding_window_view(x, kernel.shape[2:], tuple(spatial))
    windows = windows[(slice(None), slice(None), *(slice(None, None, n) for n in window_strides))]
    groups = feature_group_count * batch_group_count
    parts = np.split(windows, groups, axis=0 if batch_group_count > 1 else 1)
    summed = (1, *range(x.ndim, windows.ndim)), (1, *spatial)
    outs = [
        np.tensordot(*pair, summed) for pair in zip(parts, np.split(kernel, groups), strict=True)
    ]
    out = np.moveaxis(np.concatenate(outs, axis=-1), -1, 1)
    return np.moveaxis(out, range(x.ndim), of_out)


def _sort(*xs: np.ndarray, dimension: int, num_keys: int, **_: Any) -> list[np.ndarray]:
    order = np.lexsort(xs[:num_keys][::-1], axis=dimension)
    return [np.take_along_axis(x, order, dimension) for x in xs]


def _top_k(x: np.ndarray, *, k: int, axis: int, **_: Any) -> list[np.ndarray]:
    order = np.flip(np.argsort(np.flip(x, axis), axis, stable=True), axis)
    order = np.take(x.shape[axis] - 1 - order, range(k), axis)
    return [np.take_along_axis(x, order, axis), order]


def _shift(x: np.ndarray, by: np.ndarray) -> np.ndarray:
    unsigned = np.dtype(f"u{x.dtype.itemsize}")
    return np.right_shift(x.view(unsigned), by.view(unsigned)).view(x.dtype)


def _broadcast(
    x: np.ndarray, *, shape: Any, broadcast_dimensions: Sequence[int], **_: Any
) -> np.ndarray:
    kept = [1] * len(shape)
    for position, size in zip(broadcast_dimensions, x.shape, strict=True):
        kept[position] = size
    return np.broadcast_to(x.reshape(kept), shape)


def _slice(x: np.ndarray, *, start_indices: Any, limit_indices: Any, strides: Any) -> np.ndarray:
    steps = strides or (1,) * x.ndim
    bounds = zip(start_indices, limit_indices, steps, strict=True)
    return x[tuple(slice(*bound) for bound in bounds)]


def _pad(x: np.ndarray, fill: np.ndarray, *, padding_config: Any) -> np.ndarray:
    inner = [
        max(n + (n - 1) * gap, 0) for n, (_, _, gap) in zip(x.shape, padding_config, strict=True)
    ]
    spread = np.full(inner, fill, x.dtype)
    spread[tuple(slice(None, None, gap + 1) for _, _, gap in padding_config)] = x
    spread = spread[
        tuple(
            slice(max(-a, 0), n - max(-b, 0))
            for n, (a, b, _) in zip(inner, padding_config, strict=True)
        )
    ]
    outer = [(max(a, 0), max(b, 0)) for a, b, _ in padding_config]
    return np.pad(spread, outer, constant_values=fill)


def _window(x: np.ndarray, starts: Sequence[Any], sizes: Sequence[int]) -> tuple[slice, ...]:
    begins = [min(max(int(i), 0), n - k) for i, n, k in zip(starts, x.shape, sizes, strict=True)]
    return tuple(slice(i, i + k) for i, k in zip(begins, sizes, strict=True))


def _dynamic_slice(x: np.ndarray, *starts: Any, slice_sizes: Any) -> np.ndarray:
    return x[_window(x, starts, slice_sizes)]


def _dynamic_update_slice(x: np.ndarray, new: np.ndarray, *starts: Any) -> np.ndarray:
    out = x.copy()
    out[_window(x, starts, new.shape)] = new
    return out


def _clamp(low: np.ndarray, x: np.ndarray, high: np.ndarray) -> np.ndarray:
    return np.minimum(np.maximum(x, low), high)


def _select(which: np.ndarray, *cases: np.ndarray) -> np.ndarray:
    return np.choose(np.broadcast_to(which, cases[0].shape).astype(int), cases)


def _round(x: np.ndarray, *, rounding_method: Any) -> np.ndarray:
    if int(rounding_method) == 1:  # lax.RoundingMethod.TO_NEAREST_EVEN
        return np.round(x)
    return np.where(np.abs(x) % 1 == 0.5, x + np.copysign(0.5, x), np.round(x))


def _reshape(x: np.ndarray, *, new_sizes: Any, dimensions: Any, **_: Any) -> np.ndarray:
    return (x if dimensions is None else np.transpose(x, dimensions)).reshape(new_sizes)


def _reduce(fun: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, *, axes, **_: fun(x, axis=tuple(axes))


def _pick(fun: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, *, axes, index_dtype: fun(x, axis=axes[0])


def _psum(x: np.ndarray, *, axes: Any, **_: Any) -> np.ndarray:
    """A sum over one device, and over the axes that `vmap` has made of names."""
    return np.sum(x, axis=tuple(a for a in axes if isinstance(a, int)))


def _iota(*_: Any, dtype: Any, shape: Any, dimension: int, **__: Any) -> np.ndarray:
    along = [shape[dimension] if i == dimension else 1 for i in range(len(shape))]
    return np.broadcast_to(np.arange(shape[dimension]).reshape(along), shape)


def _split(x: np.ndarray, *, sizes: Any, axis: int) -> list[np.ndarray]:
    return np.split(x, np.cumsum(sizes)[:-1], axis=axis)


def _plain(fun: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **_: fun(*args)


# JAX's name, and NumPy's where it is another.
_NUMPYS = """
abs floor ceil sign square sqrt cbrt exp exp2 expm1 log log1p
sin cos tan asin acos atan atan2 sinh cosh tanh asinh acosh atanh
add add_any=add sub=subtract mul=multiply rem=fmod max=maximum min=minimum neg=negative
eq=equal ne=not_equal lt=less le=less_equal gt=greater ge=greater_equal is_finite=isfinite
and=bitwise_and or=bitwise_or xor=bitwise_xor not=invert
"""
_SCIPYS = "erf erfc digamma erf_inv=erfinv lgamma=gammaln logistic=expit"
# Values as they are; then autocast's identity around a product; then collectives over one device.
_IDENTITIES = """
copy copy_p stop_gradient name convert_element_type
hidden_operand
psum_invariant pvary pcast all_gather all_gather_invariant reduce_scatter ppermute
"""


def named(library: Any, names: str) -> dict[str, Callable[..., Any]]:
    """Returns functions of a library by their names elsewhere, as `sub=subtract`."""
    pairs = (name.partition("=") for name in names.split())
    return {name: getattr(library, of or name) for name, _, of in pairs}


_PLAIN: dict[str, Callable[..., Any]] = {
    **named(np, _NUMPYS),
    **named(scipy.special, _SCIPYS),
    **dict.fromkeys(_IDENTITIES.split(), np.asarray),
    "div": lambda x, y: np.divide(x, y) if x.dtype.kind == "f" else _truncated(x, y),
    "pow": lambda x, y: np.power(x, np.asarray(y, x.dtype)),
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "one_minus_square": lambda x: 1 - x * x,
    "shift_right_logical": _shift,
    "reattached_value": lambda low, _: low,  # another identity of autocast's around a product
    "clamp": _clamp,
    "select_n": _select,
    "axis_index": lambda: np.int32(0),
    "debug_callback": lambda *_: [],
}

WITH_PARAMS: dict[str, Callable[..., Any]] = {
    "linked_product": lambda out, *_, dtype, **__: np.asarray(out).astype(dtype),
    "integer_pow": lambda x, *, y: x**y if y >= 0 else 1 / x**-y,
    "round": _round,
    "psum": _psum,
    "reshape": _reshape,
    "squeeze": lambda x, *, dimensions: np.squeeze(x, axis=tuple(dimensions)),
    "expand_dims": lambda x, *, dimensions: np.expand_dims(x, axis=tuple(dimensions)),
    "transpose": lambda x, *, permutation: np.transpose(x, permutation),
    "rev": lambda x, *, dimensions: np.flip(x, axis=tuple(dimensions)),
    "broadcast_in_dim": _broadcast,
    "concatenate": lambda *xs, dimension: np.concatenate(xs, axis=dimension),
    "slice": _slice,
    "split": _split,
    "iota": _iota,
    "stack": lambda *xs, axis: np.stack(xs, axis=axis),
    "unstack": lambda x, *, axis: list(np.moveaxis(x, axis, 0)),
    "pad": _pad,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "dot_general": _dot,
    "conv_general_dilated": _convolve,
    "sort": _sort,
    "top_k": _top_k,
    "reduce_sum": _reduce(np.sum),
    "reduce_max": _reduce(np.max),
    "reduce_min": _reduce(np.min),
    "reduce_prod": _reduce(np.prod),
    "reduce_and": _reduce(np.all),
    "reduce_or": _reduce(np.any),
    "argmax": _pick(np.argmax),
    "argmin": _pick(np.argmin),
    "cumsum": _along(np.cumsum),
    "cumprod": _along(np.cumprod),
    "cummax": _along(np.maximum.accumulate),
    "cummin": _along(np.minimum.accumulate),
    "cumlogsumexp": _along(_logsumexp_running),
    "pure_callback": lambda *xs, callback, **_: [np.asarray(x) for x in callback(*xs)],
}

TABLE = {name: _plain(fun) for name, fun in _PLAIN.items()} | WITH_PARAMS


def _truncated(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return (np.sign(x) * np.sign(y)) * (np.abs(x) // np.abs(y))
