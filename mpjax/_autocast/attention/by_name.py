"""`dot_product_attention`: attention by name, in one kernel where there is one."""

from __future__ import annotations

import functools
import math
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from mpjax._autocast.attention import written
from mpjax._autocast.attention.checks import (
    as_array,
    checked,
    checked_flag,
    checked_scale,
    with_axes,
)
from mpjax._autocast.attention.primitives import attention
from mpjax._autocast.attention.program import LEAST, AttentionProgram, Operands, Spec
from mpjax._base.foreign_keywords import ATTENTION
from mpjax._base.keywords import names_keywords

Lengths = ArrayLike | None
Window = int | tuple[int, int] | None


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = ...,
    mask: ArrayLike | None = ...,
    *,
    scale: float | None = ...,
    is_causal: bool = ...,
    query_seq_lengths: Lengths = ...,
    key_value_seq_lengths: Lengths = ...,
    local_window_size: Window = ...,
    implementation: Literal["xla", "cudnn"] | None = ...,
    return_residual: Literal[False] = ...,
) -> jax.Array: ...
@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = ...,
    mask: ArrayLike | None = ...,
    *,
    scale: float | None = ...,
    is_causal: bool = ...,
    query_seq_lengths: Lengths = ...,
    key_value_seq_lengths: Lengths = ...,
    local_window_size: Window = ...,
    implementation: Literal["xla", "cudnn"] | None = ...,
    return_residual: Literal[True],
) -> tuple[jax.Array, jax.Array]: ...
@names_keywords(ATTENTION)
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Lengths = None,
    key_value_seq_lengths: Lengths = None,
    local_window_size: Window = None,
    implementation: Literal["xla", "cudnn"] | None = None,
    return_residual: bool = False,
) -> Any:
    """Returns `softmax(scale * query keyᵀ + bias) value`, in one kernel where there is one.

    The kernel is chosen where the program is compiled: cuDNN's on NVIDIA GPUs, JAX's flash
    attention on TPUs, XLA's form elsewhere and for what they do not take; `mpjax.explain` says
    which. No value of the size queries × keys is saved for the backward pass on any platform.

    Args:
      query: [batch, queries, heads, size], or without the batch.
      key: [batch, keys, key heads, size]; the heads are a multiple of the key heads.
      value: like `key`.
      bias: is added to the logits; to be broadcast to [batch, heads, queries, keys].
      mask: True where a row reads a key, bool; to be broadcast like `bias`.
      scale: of the logits; by default `1 / sqrt(size)`.
      is_causal: whether query `i` reads no key after `i`.
      query_seq_lengths: int32[batch]; the result is 0 from there on.
      key_value_seq_lengths: int32[batch]; keys from there on are not read.
      local_window_size: how many keys before and after its place a row reads; one number is both.
      implementation: "xla" or "cudnn" to insist on one.
      return_residual: whether to return the logarithm of each row's sum of exponentials too.

    Returns:
      An array like `query`; with `return_residual` also f32[batch, queries, heads].

    Raises:
      ValueError: shapes that do not agree, or a window or an implementation that there is not.
      TypeError: operands of several dtypes, or a mask that is not of booleans.
      NotImplementedError: "cudnn" was asked for, where it cannot run; when the program is lowered.

    Dtypes:
      That of `query`, `key` and `value`. Under autocast its policy says in which dtype they are
      read, 16 bits under float8 and int8 policies too. Kernels read bfloat16 and float16.

    Transforms:
      All of JAX's. Forward mode and second derivatives are those of XLA's form.

    Example:
      >>> q = k = v = jnp.ones((2, 16, 4, 8))
      >>> attend = mpjax.autocast(mpjax.dot_product_attention, "bf16-mixed")
      >>> attend(q, k, v, is_causal=True).shape
      (2, 16, 4, 8)

    References:
      Dao, FlashAttention-2, 2023, https://arxiv.org/abs/2307.08691
    """
    lengths = None if query_seq_lengths is None else jnp.asarray(query_seq_lengths)
    operands = {"query": query, "key": key, "value": value}
    others = {"bias": bias, "mask": mask, "key_value_seq_lengths": key_value_seq_lengths}
    arrays = [as_array(name, x) for name, x in operands.items()]
    arrays += [None if x is None else as_array(name, x) for name, x in others.items()]
    inputs = Operands(*arrays)
    left, right = checked(inputs, lengths, local_window_size, implementation)
    is_causal = checked_flag("is_causal", is_causal)
    return_residual = checked_flag("return_residual", return_residual)
    inputs = with_axes(inputs)
    factor = 1 / math.sqrt(inputs.query.shape[-1]) if scale is None else checked_scale(scale)
    arrays = [x for x in inputs if x is not None]
    if isinstance(factor, jax.Array):  # a kernel takes a Python number alone
        arrays[0], factor = arrays[0] * factor.astype(arrays[0].dtype), 1.0
    spec = Spec(factor, left, 0 if is_causal else right)
    given = tuple(x is not None for x in inputs)
    program = _program(spec, given, inputs.query.shape[0], implementation, return_residual)
    out, rows = attention(program, *arrays)
    rows = rows.swapaxes(1, 2)
    if lengths is not None:
        exists = jnp.arange(out.shape[1]) < lengths[:, None]
        out = jnp.where(exists[..., None, None], out, jnp.zeros((), out.dtype))
        rows = jnp.where(exists[..., None], rows, LEAST)
    shape = jnp.shape(query)
    out = out.reshape(shape)
    return (out, rows.reshape(shape[:-1])) if return_residual else out


@functools.lru_cache(maxsize=4096)
def _program(
    spec: Spec,
    given: tuple[bool, ...],
    batch: int,
    implementation: str | None,
    shows_rows: bool,
) -> AttentionProgram:
    def operands(*arrays: Any) -> Operands:
        rest = iter(arrays)
        return Operands(*(next(rest) if has else None for has in given))

    return AttentionProgram(
        spec=spec,
        form=lambda *arrays: written.form(operands(*arrays), spec),
        operands=operands,
        result=lambda x: x,
        lead=(batch,),
        implementation=implementation,
        shows_rows=shows_rows,
    )
