"""Operands of an attention that do not agree: what is said of them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from mpjax._autocast.attention.program import Operands
from mpjax._dtypes import describe
from mpjax._errors import message, nearest

_NAME = "dot_product_attention"
_NDIM = 4
_IMPLEMENTATIONS = ("xla", "cudnn")


def with_axes(x: Any) -> Any:
    """Returns an operand with four axes: those in front that it lacks are of 1."""
    if x is None:
        return None
    x = jnp.asarray(x)
    return x.reshape((1,) * (_NDIM - x.ndim) + x.shape)


def checked(
    found: Operands, lengths: Any, window: Any, implementation: Any
) -> tuple[int | None, int | None]:
    """Returns how far before and after its place a query reads keys.

    Raises:
      ValueError, TypeError: as `dot_product_attention` says.
    """
    _check_arrays(found)
    batch, heads, queries, keys = found.sizes
    logits = (batch, heads, queries, keys)
    for name, x in (("bias", found.bias), ("mask", found.mask)):
        if x is not None:
            _check_logits(name, x, logits)
    if found.mask is not None and found.mask.dtype != bool:
        raise TypeError(
            message(
                f"{_NAME}(mask=)",
                f"got {describe(found.mask)}.",
                "Allowed: booleans, True where a row reads a key.",
                "Type mask=mask.astype(bool), or bias=mask for what is added to the logits.",
            )
        )
    named = {"query_seq_lengths": lengths, "key_value_seq_lengths": found.lengths}
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


def _check_arrays(found: Operands) -> None:
    given = {"query": found.query, "key": found.key, "value": found.value}
    shown = ", ".join(f"{name} {describe(x)}" for name, x in given.items())
    layout = "[batch, time, heads, size]"
    for name, x in given.items():
        if x.ndim != _NDIM:
            raise ValueError(
                message(
                    f"{_NAME}({name}=)",
                    f"got {describe(x)}.",
                    f"Allowed: {layout}, or without the batch.",
                    f"Type {name}={name}.reshape(batch, time, heads, size).",
                )
            )
    if any(not jnp.issubdtype(x.dtype, jnp.floating) for x in given.values()):
        got = f"operands are not floating: {shown}."
        raise TypeError(message(_NAME, got, "Allowed: floating arrays.", "Cast them to one dtype."))
    if len({x.dtype for x in given.values()}) > 1:
        raise TypeError(
            message(
                _NAME,
                f"operands have several dtypes: {shown}.",
                "Allowed: one dtype for query, key and value.",
                "Type key=key.astype(query.dtype), or leave them all in float32 and let "
                'mpjax.autocast(fun, "bf16-mixed") choose.',
            )
        )
    query, key, value = found.query.shape, found.key.shape, found.value.shape
    agree = query[0] == key[0] and query[-1] == key[-1] and key == value
    if not agree or query[2] % max(key[2], 1):
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
    fits = x.ndim == _NDIM and all(
        n in (1, whole) for n, whole in zip(x.shape, logits, strict=True)
    )
    if not fits:
        raise ValueError(
            message(
                f"{_NAME}({name}=)",
                f"got {describe(x)}.",
                f"Allowed: what can be broadcast to [batch, heads, queries, keys], {logits} here.",
                f"Type {name}={name}[:, None, None, :] for one value a key, [batch, keys].",
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
    pair = (window, window) if isinstance(window, int) else window
    is_pair = isinstance(pair, tuple) and len(pair) == 2
    if is_pair and all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in pair):
        return pair
    raise ValueError(
        message(
            f"{_NAME}(local_window_size=)",
            f"got {window!r}.",
            "Allowed: a number of keys, or a pair: how many before a query's place and after it, "
            "each 0 or more.",
            "Type local_window_size=(128, 0) for the last 128 keys and the own.",
        )
    )
