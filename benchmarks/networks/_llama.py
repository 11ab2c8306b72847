"""Llama's blocks one by one: root-mean-square norms, rotary grouped queries, a gated layer."""

from typing import Any

import flax.linen as nn
import jax

from ._attention import GroupedAttention, causal
from ._network import Network, full, language_model

SIZES = {
    "tiny": {"batch": 2, "time": 16, "width": 32, "heads": 4, "layers": 2, "vocab": 64},
    "small": {"batch": 4, "time": 128, "width": 256, "heads": 4, "layers": 4, "vocab": 1024},
    "medium": {"batch": 4, "time": 512, "width": 768, "heads": 12, "layers": 2, "vocab": 8192},
    "full": {"batch": 4, "time": 1024, "width": 1024, "heads": 16, "layers": 12, "vocab": 32000},
    "large": {"batch": 4, "time": 2048, "width": 2048, "heads": 16, "layers": 8, "vocab": 32000},
}
SHARED = 4  # heads of queries that share one of keys and values


class Gated(nn.Module):
    """Three products, and a gate between them."""

    dtype: Any
    activation: Any = nn.silu

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns features like `x`."""

        def dense(name: str, width: int) -> nn.Dense:
            return nn.Dense(width, use_bias=False, dtype=self.dtype, name=name)

        gate, up = dense("gate", 3 * x.shape[-1])(x), dense("up", 3 * x.shape[-1])(x)
        return dense("down", x.shape[-1])(self.activation(gate) * up)


class Block(nn.Module):
    """Pre-normalised attention and gated layer."""

    heads: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the residual stream behind this block."""
        attention = GroupedAttention(self.heads, self.heads // SHARED, self.dtype)
        y = nn.RMSNorm(dtype=self.dtype, name="norm1")(x)
        x = x + attention(y, causal(x.shape[1]))
        y = nn.RMSNorm(dtype=self.dtype, name="norm2")(x)
        return x + Gated(self.dtype)(y)


class Llama(nn.Module):
    """A table, blocks, a head of its own."""

    vocab: int
    width: int
    heads: int
    layers: int
    dtype: Any

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns logits."""
        embed = nn.Embed(self.vocab, self.width, dtype=full(self.dtype), name="embedding")
        x = embed(tokens).astype(self.dtype)
        for i in range(self.layers):
            x = Block(self.heads, self.dtype, name=f"block_{i}")(x)
        x = nn.RMSNorm(dtype=self.dtype, name="norm")(x)
        return nn.Dense(self.vocab, use_bias=False, dtype=self.dtype, name="head")(x)


def llama(size: str) -> Network:
    """Returns the decoder of separate blocks."""
    s = SIZES[size]

    def model(dtype: Any) -> Llama:
        return Llama(s["vocab"], s["width"], s["heads"], s["layers"], dtype)

    return language_model("llama", size, s, model)
