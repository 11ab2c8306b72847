"""The flash attention that JAX ships for TPUs: both passes separately, as in `cudnn`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from mpjax._autocast.attention.program import Operands, Spec
from mpjax._autocast.attention.traced import Forward, first_pass, second_pass
from mpjax._jaxpr.equation import Eqn

NAME = "flash attention"
_BLOCK = 128  # lengths are multiples of it; statistics of a row are repeated so many times
_LEAST = 512 * 128
"""Length × size of a head. On a v5e the kernel moves 2.2, 1.6, .90 and .45 times the bytes of XLA's
form at 128, 256, 512 and 1024 × 128, and 3.5, 1.2 and .35 times at 256, 512 and 1024 × 64 (counted,
libtpu 0.0.50)."""
_LONGEST = 512  # of blocks: longer ones do not fit the chip's memory


def why_not(operands: Operands, spec: Spec) -> str:
    """Returns why the kernel does not take operands, empty if it does."""
    _, _, queries, keys = operands.sizes
    size, values = operands.query.shape[-1], operands.value.shape[-1]
    dtypes = {x.dtype.name for x in operands[:3]}
    if dtypes != {"bfloat16"}:
        return f"operands are {', '.join(sorted(dtypes))}, and not bfloat16"
    if queries < _BLOCK // 2 or keys < _BLOCK // 2:
        return f"{queries} × {keys} are too few queries and keys"
    if min(queries, keys) * min(size, _BLOCK) < _LEAST:
        return f"of {queries} × {keys} with heads of {size} XLA's form moves fewer bytes"
    if values != size or (size % _BLOCK and size > _BLOCK):
        return f"heads are of {size}, and not up to 128 or of a multiple"
    if operands.bias is not None:
        return "it has a bias"
    if operands.mask is not None and math.prod(operands.mask.shape[1:3]) != 1:
        return "its mask is of queries or heads too, and not of keys alone"
    if spec.left is not None or spec.right not in (None, 0):
        return "it has a window"
    return ""


def why_not_installed(operands: Operands, spec: Spec) -> str:
    """Returns an empty string: the kernel is part of JAX."""
    del operands, spec
    return ""


def _function(operands: Operands, spec: Spec) -> Callable[..., Any]:
    """Returns the flash attention as a function of query, key and value."""
    # Imported here: Pallas takes a second to import, and programs for a TPU alone need it.
    from jax.experimental.pallas.ops.tpu import flash_attention as kernel

    batch, heads, queries, keys = operands.sizes
    longer = -queries % _BLOCK, -keys % _BLOCK
    read, segments = _keys_read(operands, spec, longer[1]), None
    if read is not None:
        ones = jnp.ones((batch, queries + longer[0]), jnp.int32)
        segments = kernel.SegmentIds(ones, jnp.broadcast_to(read, (batch, keys + longer[1])))
    blocks = _blocks(kernel, queries + longer[0], keys + longer[1])

    def fun(*floats: Any) -> Any:
        lengths = (longer[0], longer[1], longer[1])
        padded = (_padded(x.swapaxes(1, 2), n) for x, n in zip(floats, lengths, strict=True))
        query, key, value = padded
        group = heads // key.shape[1]
        key, value = (jnp.repeat(x, group, axis=1) if group > 1 else x for x in (key, value))
        out = kernel.flash_attention(
            *(query, key, value, None, segments),
            causal=spec.right == 0,
            sm_scale=spec.scale,
            block_sizes=blocks,
        )
        return out[:, :, :queries].swapaxes(1, 2)

    return fun


def _is_forward(eqn: Eqn) -> bool:
    return eqn.primitive.name == "pallas_call"


def _padded(x: Any, longer: int) -> Any:
    """Returns [batch, heads, time, ...] with zeros appended along time."""
    return jnp.pad(x, [(0, 0), (0, 0), (0, longer), *[(0, 0)] * (x.ndim - 3)]) if longer else x


def _keys_read(operands: Operands, spec: Spec, longer: int) -> Any:
    """Returns 1 for each key of each example that is read and 0 for others, or None for all.

    Keys of the padding are not read; behind the last query, a causal mask excludes them already.
    """
    _, _, queries, keys = operands.sizes
    read = None if operands.mask is None else operands.mask[:, 0, 0]
    if operands.lengths is not None:
        first = jnp.arange(keys) < operands.lengths[:, None]
        read = first if read is None else read & first
    if read is None and longer and not (spec.right == 0 and queries <= keys):
        read = jnp.ones((1, keys), bool)
    if read is None:
        return None
    each = jnp.broadcast_to(read, (read.shape[0], keys)).astype(jnp.int32)
    return jnp.pad(each, [(0, 0), (0, longer)])


def _blocks(kernel: Any, queries: int, keys: int) -> Any:
    """Returns the sizes of the blocks that are on the chip at once: the largest that fit."""
    q, k = (math.gcd(n, _LONGEST) for n in (queries, keys))
    return kernel.BlockSizes(
        block_q=q,
        block_k_major=k,
        block_k=k,
        block_b=1,
        block_q_major_dkv=q,
        block_k_major_dkv=k,
        block_k_dkv=k,
        block_q_dkv=q,
        block_k_major_dq=_BLOCK,  # a value of each row is stored as often as this block is long
        block_k_dq=_BLOCK,
        block_q_dq=q,
    )


def forward(operands: Operands, spec: Spec) -> tuple[Any, Any]:
    """Returns the result, and the logarithm of each row's sum, f32[batch, heads, queries]."""
    kernel, queries = Forward(_is_forward), operands.sizes[2]
    first_pass(_function(operands, spec), operands[:3], kernel)
    out, total, largest = kernel.found(NAME)
    rows = (largest + jnp.log(total))[:, :, :queries, 0]
    return out[:, :, :queries].swapaxes(1, 2), rows


def backward(operands: Operands, spec: Spec, out: Any, rows: Any, ct: Any) -> Sequence[Any]:
    """Returns the cotangents of query, key and value."""
    longer = -rows.shape[2] % _BLOCK
    rows = _padded(rows[..., None], longer)
    # The kernel reads a row's largest logit and its sum separately: rows + log(1) = rows.
    largest = jnp.broadcast_to(rows, (*rows.shape[:3], _BLOCK))
    known = [_padded(out.swapaxes(1, 2), longer), jnp.ones_like(largest), largest]
    kernel = Forward(_is_forward, known)
    grads = second_pass(_function(operands, spec), operands[:3], ct, kernel)
    kernel.found(NAME)
    return grads
