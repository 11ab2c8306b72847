"""Two GRU layers over embedded tokens, as Flax's cells write them: six products a step."""

from typing import Any

import flax.linen as nn
import jax

from ._network import Network, full, language_model

SIZES = {
    "tiny": {"batch": 4, "time": 12, "width": 32, "layers": 2, "vocab": 32},
    "small": {"batch": 16, "time": 64, "width": 256, "layers": 2, "vocab": 256},
    "medium": {"batch": 16, "time": 256, "width": 512, "layers": 2, "vocab": 8192},
    "full": {"batch": 64, "time": 512, "width": 1024, "layers": 2, "vocab": 8192},
}


class Gru(nn.Module):
    """Reads tokens one after the other."""

    vocab: int
    width: int
    layers: int
    dtype: Any

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns logits of the next token."""
        x = nn.Embed(self.vocab, self.width, dtype=full(self.dtype))(tokens).astype(self.dtype)
        for _ in range(self.layers):
            # A carry starts in the dtype of parameters.
            cell = nn.GRUCell(self.width, dtype=self.dtype, param_dtype=full(self.dtype))
            x = nn.RNN(cell)(x)
        return nn.Dense(self.vocab, dtype=self.dtype)(x)


def gru(size: str) -> Network:
    """Returns the network on random tokens."""
    s = SIZES[size]

    def model(dtype: Any) -> Gru:
        return Gru(s["vocab"], s["width"], s["layers"], dtype)

    return language_model("gru", size, s, model)
