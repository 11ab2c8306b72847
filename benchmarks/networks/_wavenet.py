"""WaveNet: dilated causal convolutions, each with a gate, and the sum of all their skips."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from ._network import Network, full, language_model

SIZES = {
    "tiny": {"batch": 2, "time": 32, "width": 16, "layers": 3, "vocab": 32},
    "small": {"batch": 4, "time": 512, "width": 64, "layers": 6, "vocab": 256},
    "medium": {"batch": 8, "time": 4096, "width": 128, "layers": 4, "vocab": 256},
    "full": {"batch": 8, "time": 16384, "width": 128, "layers": 20, "vocab": 256},
}
CYCLE = 10  # layers after which the dilation starts again at 1


class WaveNet(nn.Module):
    """Embeds samples, convolves, and ends in two pointwise layers."""

    vocab: int
    width: int
    layers: int
    dtype: Any

    @nn.compact
    def __call__(self, samples: jax.Array) -> jax.Array:
        """Returns logits of the next sample."""
        embed = nn.Embed(self.vocab, self.width, dtype=full(self.dtype))
        x = embed(samples).astype(self.dtype)
        skips = 0.0
        for i in range(self.layers):
            dilation = (2 ** (i % CYCLE),)
            conv = nn.Conv(
                2 * self.width, (2,), padding="CAUSAL", kernel_dilation=dilation, dtype=self.dtype
            )
            value, gate = jnp.split(conv(x), 2, axis=-1)
            y = nn.tanh(value) * nn.sigmoid(gate)
            skips = skips + nn.Dense(2 * self.width, dtype=self.dtype)(y)
            x = x + nn.Dense(self.width, dtype=self.dtype)(y)
        y = nn.relu(nn.Dense(2 * self.width, dtype=self.dtype)(nn.relu(skips)))
        return nn.Dense(self.vocab, dtype=self.dtype)(y)


def wavenet(size: str) -> Network:
    """Returns the network on random samples."""
    s = SIZES[size]

    def model(dtype: Any) -> WaveNet:
        return WaveNet(s["vocab"], s["width"], s["layers"], dtype)

    return language_model("wavenet", size, s, model)
