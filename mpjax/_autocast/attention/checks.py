"""Checks the arguments of `dot_product_attention`, and says what to type instead."""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._autocast.attention.program import Operands
from mpjax._base import compat
from mpjax._base.dtypes import describe
from mpjax._base.errors import message, nearest

_NAME = "dot_product_attention"
_NDIM = 4
_IMPLEMENTATIONS = ("xla", "cudnn")


def as_array(name: str, x: Any) -> Any:
    """Returns an operand as an array.

    Raises:
      TypeError: it cannot be one.
    """
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError) as error:
        got = f"got {x!r}." if x is None or isinstance(x, str) else f"got {describe(x)}."
        raise TypeError(
            message(f"{_NAME}({name}=)", got, "Allowed: an array.", f"Type {name}=jnp.asarray(...)")
        ) from error


def with_axes(given: Operands) -> Operands:
    """Returns operands with four axes: missing leading axes are added with length 1."""
    arrays = [x if x is None else x.reshape((1,) * (_NDIM - x.ndim) + x.shape) for x in given[:5]]
    return Operands(*arrays, lengths=given.lengths)


def checked(
    given: Operands, lengths: Any, window: Any, implementation: Any
) -> tuple[int | None, int | None]:
    """Returns how far before and after its place a query reads keys.

    Args:
      given: the operands; the batch axis may be missing.
      lengths: `query_seq_lengths`.
      window: `local_window_size`, one number or two.
      implementation: the one that the user named, or None.

    Raises:
      ValueError, TypeError: as `dot_product_attention` says.
    """
    inputs = with_axes(given)
    _check_arrays(given, inputs)
    batch, heads, queries, keys = inputs.sizes
    for name, x in (("bias", given.bias), ("mask", given.mask)):
        if x is not None:
            _check_kind(name, x)
            _check_logits(name, x, (batch, heads, queries, keys))
    named = {"query_seq_lengths": lengths, "key_value_seq_lengths": inputs.lengths}
    for name, x in named.items():
        if x is not None and (x.dtype != jnp.int32 or x.shape != (batch,)):
            raise ValueError(
                message(
                    f"{_NAME}({name}=)",
                    f"got {describe(x)}.",
                    f"Allowed: one length for each example, i32[{batch}].",
                    f"Type {name}=jnp.asarray(lengths, jnp.int32).",
                )
            )
    _check_implementation(implementation)
    return _window(window)


def checked_flag(name: str, x: Any) -> bool:
    """Returns an option that is True or False.

    Raises:
      TypeError: it is neither, or known only when the program runs.
    """
    if isinstance(x, bool | np.bool_):
        return bool(x)
    got = repr(x) if compat.has_values(x) else "a traced array"
    raise TypeError(
        message(
            f"{_NAME}({name}=)",
            f"got {got}.",
            "Allowed: True or False.",
            f"Type {name}=True; which keys a row reads by what is computed is said by mask=.",
        )
    )


def checked_scale(x: Any) -> Any:
    """Returns a scale: a number, or a traced array of one.

    Raises:
      TypeError: it is neither.
    """
    is_number = isinstance(x, int | float | np.floating | np.integer) and not isinstance(x, bool)
    if is_number:
        return float(x)
    is_array = isinstance(x, jax.Array | np.ndarray)
    if is_array and x.ndim == 0 and jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.asarray(x)
    raise TypeError(
        message(
            f"{_NAME}(scale=)",
            f"got {describe(x) if hasattr(x, 'dtype') else repr(x)}.",
            "Allowed: one real number for all logits.",
            "Type query=query * scale for one a head, with scale=1.0.",
        )
    )


def _check_kind(name: str, x: Any) -> None:
    if name == "mask" and x.dtype != bool:
        raise TypeError(
            message(
                f"{_NAME}(mask=)",
                f"got {describe(x)}.",
                "Allowed: booleans, True where a row reads a key.",
                "Type mask=mask.astype(bool), or bias=mask for what is added to the logits.",
            )
        )
    if name == "bias" and not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(
            message(
                f"{_NAME}(bias=)",
                f"got {describe(x)}.",
                "Allowed: floating numbers, which are added to the logits.",
                "Type mask=... for booleans that say which keys a row reads, "
                "or bias=bias.astype(query.dtype).",
            )
        )


def _check_arrays(given: Operands, inputs: Operands) -> None:
    named = {"query": given.query, "key": given.key, "value": given.value}
    shown = ", ".join(f"{name} {describe(x)}" for name, x in named.items())
    layout = "[batch, time, heads, size]"
    for name, x in named.items():
        if x.ndim not in (_NDIM - 1, _NDIM):
            raise ValueError(
                message(
                    f"{_NAME}({name}=)",
                    f"got {describe(x)}.",
                    f"Allowed: {layout}, or without the batch.",
                    f"Type {name}={name}.reshape(batch, time, heads, size).",
                )
            )
    if any(not jnp.issubdtype(x.dtype, jnp.floating) for x in named.values()):
        got = f"operands are not floating: {shown}."
        raise TypeError(message(_NAME, got, "Allowed: floating arrays.", "Cast them to one dtype."))
    if len({x.dtype for x in named.values()}) > 1:
        raise TypeError(
            message(
                _NAME,
                f"operands have several dtypes: {shown}.",
                "Allowed: one dtype for query, key and value.",
                "Type key=key.astype(query.dtype), or leave them all in float32 and let "
                'mpjax.autocast(fun, "bf16-mixed") choose.',
            )
        )
    query, key, value = inputs.query.shape, inputs.key.shape, inputs.value.shape
    agree = query[0] == key[0] and query[-1] == key[-1] and key == value
    if not agree or key[2] == 0 or query[2] % key[2]:
        raise ValueError(
            message(
                _NAME,
                f"shapes do not agree: {shown}.",
                f"Allowed: {layout} of one batch and one size; value like key; as many heads of "
                "the query as of the key, or a multiple.",
                "Type x.swapaxes(1, 2) for arrays [batch, heads, time, size].",
            )
        )


def _check_logits(name: str, x: Any, logits: tuple[int, ...]) -> None:
    fits = x.ndim <= _NDIM and all(
        n in (1, whole) for n, whole in zip(x.shape[::-1], logits[::-1], strict=False)
    )
    if not fits:
        typed = f"{name}[:, None]", "one value a query and key, [batch, queries, keys]"
        if x.ndim < _NDIM - 1:
            typed = f"{name}[:, None, None, :]", "one value a key, [batch, keys]"
        raise ValueError(
            message(
                f"{_NAME}({name}=)",
                f"got {describe(x)}.",
                f"Allowed: what can be broadcast to [batch, heads, queries, keys], {logits} here.",
                f"Type {name}={typed[0]} for {typed[1]}.",
            )
        )


def _check_implementation(implementation: Any) -> None:
    if implementation is None or implementation in _IMPLEMENTATIONS:
        return
    close = nearest(str(implementation), _IMPLEMENTATIONS)
    word = close[0] if close else "xla"
    raise ValueError(
        message(
            f"{_NAME}(implementation=)",
            f"unknown implementation {implementation!r}.",
            "Accepted: 'xla', 'cudnn', or None to choose where the program is compiled; the kernel "
            "of a TPU is chosen so.",
            f'Type implementation="{word}", or leave it out.',
        )
    )


def _window(window: Any) -> tuple[int | None, int | None]:
    if window is None:
        return None, None
    pair = window if isinstance(window, tuple) else (window, window)
    whole = all(isinstance(n, int | np.integer) and not isinstance(n, bool) for n in pair)
    if len(pair) == 2 and whole and min(pair) >= 0:
        return operator.index(pair[0]), operator.index(pair[1])
    raise ValueError(
        message(
            f"{_NAME}(local_window_size=)",
            f"got {window!r}.",
            "Allowed: a number of keys, or a pair: how many before a query's place and after it, "
            "each 0 or more.",
            "Type local_window_size=(128, 0) for the last 128 keys and the own.",
        )
    )
