"""Gemma's blocks: a norm before and after each layer, capped scores and logits, a gelu gate."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from ._attention import GroupedAttention, causal
from ._llama import SHARED, SIZES, Gated
from ._network import Network, language_model

SCORES, LOGITS = 50.0, 30.0  # where scores and logits end


class Block(nn.Module):
    """Attention and gated layer between two norms each."""

    heads: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the residual stream behind this block."""

        def norm(name: str) -> nn.RMSNorm:
            return nn.RMSNorm(dtype=self.dtype, name=name)

        attention = GroupedAttention(self.heads, self.heads // SHARED, self.dtype, SCORES)
        x = x + norm("after1")(attention(norm("before1")(x), causal(x.shape[1])))
        return x + norm("after2")(Gated(self.dtype, nn.gelu)(norm("before2")(x)))


class Gemma(nn.Module):
    """A scaled table, blocks, the table again."""

    vocab: int
    width: int
    heads: int
    layers: int
    dtype: Any

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns logits."""
        normal = nn.initializers.normal(self.width**-0.5)
        table = self.param("embedding", normal, (self.vocab, self.width), jnp.float32)
        x = (table[tokens] * self.width**0.5).astype(self.dtype)
        for i in range(self.layers):
            x = Block(self.heads, self.dtype, name=f"block_{i}")(x)
        x = nn.RMSNorm(dtype=self.dtype, name="norm")(x)
        logits = x @ table.astype(self.dtype).T
        return LOGITS * jnp.tanh(logits / LOGITS)


def gemma(size: str) -> Network:
    """Returns the decoder."""
    s = SIZES[size]

    def model(dtype: Any) -> Gemma:
        return Gemma(s["vocab"], s["width"], s["heads"], s["layers"], dtype)

    return language_model("gemma", size, s, model)
