"""Residual blocks of a norm and a gate: `tanh` of one product times `sigmoid` of another."""

from typing import Any

import flax.linen as nn
import jax

from ._network import Network, full, language_model

SIZES = {
    "tiny": {"batch": 2, "time": 16, "width": 32, "layers": 2, "vocab": 32},
    "small": {"batch": 4, "time": 128, "width": 128, "layers": 4, "vocab": 256},
    "medium": {"batch": 16, "time": 1024, "width": 1024, "layers": 4, "vocab": 8192},
    "full": {"batch": 16, "time": 2048, "width": 2048, "layers": 12, "vocab": 8192},
}


class Gated(nn.Module):
    """Embeds tokens and lets each pass the blocks by itself."""

    vocab: int
    width: int
    layers: int
    dtype: Any

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns logits of the next token."""
        x = nn.Embed(self.vocab, self.width, dtype=full(self.dtype))(tokens).astype(self.dtype)
        for _ in range(self.layers):
            y = nn.LayerNorm(dtype=self.dtype)(x)
            value = nn.tanh(nn.Dense(2 * self.width, dtype=self.dtype)(y))
            gate = nn.sigmoid(nn.Dense(2 * self.width, dtype=self.dtype)(y))
            x = x + nn.Dense(self.width, dtype=self.dtype)(value * gate)
        return nn.Dense(self.vocab, dtype=self.dtype)(x)


def gated(size: str) -> Network:
    """Returns the network on random tokens."""
    s = SIZES[size]

    def model(dtype: Any) -> Gated:
        return Gated(s["vocab"], s["width"], s["layers"], dtype)

    return language_model("gated", size, s, model)
