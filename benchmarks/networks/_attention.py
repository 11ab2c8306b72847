"""Self-attention as written by hand in mixed precision: low products, softmax in full.

Within `Network.hand_cast_by_cudnn` it asks JAX for cuDNN's kernel, which takes low operands alone.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from ._network import BY_CUDNN, full


def _kernel(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns attention by cuDNN: a mask of pairs is that of a decoder, others are of keys."""
    is_causal = mask.shape[-2] > 1
    of_keys = None
    if not is_causal and mask.size > 1:  # JAX takes one of pairs
        of_keys = jnp.broadcast_to(mask, (q.shape[0], 1, q.shape[1], k.shape[1]))
    return jax.nn.dot_product_attention(
        q, k, v, mask=of_keys, is_causal=is_causal, implementation="cudnn"
    )


def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, dtype: Any) -> jax.Array:
    """Returns softmax(q k / sqrt(d)) v for [batch, time, heads, d], where `mask` allows it."""
    if BY_CUDNN.get():
        return _kernel(q, k, v, mask)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q * q.shape[-1] ** -0.5, k)
    scores = jnp.where(mask, scores.astype(full(dtype)), -1e9)
    weights = jax.nn.softmax(scores, axis=-1).astype(dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def attend_grouped(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array,
    dtype: Any,
    cap: float | None = None,
) -> jax.Array:
    """Returns `attend` where several heads of `q` share one of `k` and `v`; scores end at `cap`."""
    batch, time, heads, dim = q.shape
    if BY_CUDNN.get() and cap is None:
        return _kernel(q, k, v, mask)
    q = q.reshape(batch, time, k.shape[2], -1, dim) * dim**-0.5
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", q, k)
    if cap is not None:
        scores = cap * jnp.tanh(scores / cap)
    scores = jnp.where(mask[:, :, None], scores.astype(full(dtype)), -1e9)
    weights = jax.nn.softmax(scores, axis=-1).astype(dtype)
    return jnp.einsum("bhgqk,bkhd->bqhgd", weights, v).reshape(batch, time, heads, dim)


def rotate(x: jax.Array, dtype: Any) -> jax.Array:
    """Returns [batch, time, heads, d] with rotary positions, rotated in `full(dtype)`."""
    _, time, _, dim = x.shape
    frequencies = 1e4 ** (-jnp.arange(0, dim, 2, dtype=full(dtype)) / dim)
    angles = jnp.arange(time, dtype=full(dtype))[:, None] * frequencies[None, :]
    cos, sin = jnp.cos(angles)[None, :, None, :], jnp.sin(angles)[None, :, None, :]
    a, b = jnp.split(x.astype(full(dtype)), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(dtype)


def causal(time: int) -> jax.Array:
    """Returns the mask [1, 1, time, time] of a decoder."""
    return jnp.tril(jnp.ones((time, time), bool))[None, None]


class SelfAttention(nn.Module):
    """Multi-head attention of `x` to itself."""

    heads: int
    dtype: Any
    rotary: bool = False
    use_bias: bool = True

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """Returns features like `x`."""
        width = x.shape[-1]

        def project(name: str) -> jax.Array:
            shape = (self.heads, width // self.heads)
            dense = nn.DenseGeneral(shape, use_bias=self.use_bias, dtype=self.dtype, name=name)
            return dense(x)

        q, k, v = project("query"), project("key"), project("value")
        if self.rotary:
            q, k = rotate(q, self.dtype), rotate(k, self.dtype)
        y = attend(q, k, v, mask, self.dtype)
        out = nn.DenseGeneral(width, axis=(-2, -1), use_bias=self.use_bias, dtype=self.dtype)
        return out(y)


class GroupedAttention(nn.Module):
    """Rotary attention without biases, in which groups of heads share keys and values."""

    heads: int
    groups: int
    dtype: Any
    cap: float | None = None

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """Returns features like `x`."""
        width = x.shape[-1]

        def project(name: str, heads: int) -> jax.Array:
            shape = (heads, width // self.heads)
            return nn.DenseGeneral(shape, use_bias=False, dtype=self.dtype, name=name)(x)

        q, k = project("query", self.heads), project("key", self.groups)
        q, k = rotate(q, self.dtype), rotate(k, self.dtype)
        y = attend_grouped(q, k, project("value", self.groups), mask, self.dtype, self.cap)
        out = nn.DenseGeneral(width, axis=(-2, -1), use_bias=False, dtype=self.dtype, name="out")
        return out(y)
