"""A gated PixelCNN: convolutions of what is above and to the left, a `tanh` times a `sigmoid`."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from ._network import Network, PyTree, labelled

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"batch": 2, "pixels": 8, "width": 16, "layers": 2, "levels": 8},
    "small": {"batch": 4, "pixels": 16, "width": 64, "layers": 4, "levels": 256},
    "medium": {"batch": 16, "pixels": 32, "width": 128, "layers": 4, "levels": 256},
    "full": {"batch": 64, "pixels": 32, "width": 256, "layers": 15, "levels": 256},
}


class PixelCNN(nn.Module):
    """The causal convolutions of one stream: each reads two rows, up to the place before."""

    width: int
    layers: int
    levels: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns logits of the level of each pixel."""

        def causal(features: int, x: jax.Array) -> jax.Array:
            x = jnp.pad(x, ((0, 0), (1, 0), (2, 0), (0, 0)))
            return nn.Conv(features, (2, 3), padding="VALID", dtype=self.dtype)(x)

        def point(features: int, x: jax.Array) -> jax.Array:
            return nn.Conv(features, (1, 1), dtype=self.dtype)(x)

        x = jnp.pad(x, ((0, 0), (0, 0), (1, 0), (0, 0)))[:, :, :-1]
        x = causal(self.width, x)
        skips = point(self.width, x)
        for _ in range(self.layers):
            value, gate = jnp.split(causal(2 * self.width, x), 2, axis=-1)
            y = nn.tanh(value) * nn.sigmoid(gate)
            skips = skips + point(self.width, y)
            x = x + point(self.width, y)
        return point(self.levels, nn.relu(point(self.width, nn.relu(skips))))


def pixelcnn(size: str) -> Network:
    """Returns the network on random images of one channel."""
    s = SIZES[size]
    shape = (s["batch"], s["pixels"], s["pixels"])

    def model(dtype: Any) -> PixelCNN:
        return PixelCNN(s["width"], s["layers"], s["levels"], dtype)

    def sample(key: jax.Array) -> PyTree:
        levels = jax.random.randint(key, shape, 0, s["levels"], jnp.int32)
        return {"x": levels[..., None].astype(jnp.float32) / (s["levels"] / 2) - 1, "y": levels}

    return labelled("pixelcnn", size, s, model, sample)
