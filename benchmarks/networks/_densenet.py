"""DenseNet: every layer reads what all before it made, normalised in groups."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from ._network import Network, image_classifier

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"batch": 4, "pixels": 8, "growth": 8, "blocks": (2, 2), "classes": 10},
    "small": {"batch": 8, "pixels": 32, "growth": 16, "blocks": (3, 3), "classes": 10},
    "medium": {"batch": 128, "pixels": 32, "growth": 32, "blocks": (4, 4), "classes": 10},
    "full": {"batch": 64, "pixels": 224, "growth": 32, "blocks": (6, 12, 24, 16), "classes": 1000},
}


class DenseNet(nn.Module):
    """Blocks of layers of `growth` channels, each ending in half of its channels and pixels."""

    growth: int
    blocks: tuple[int, ...]
    classes: int
    dtype: Any

    def activated(self, x: jax.Array) -> jax.Array:
        """Returns relu of `x`, normalised in groups of `growth` channels."""
        norm = nn.GroupNorm(num_groups=None, group_size=self.growth, dtype=self.dtype)
        return nn.relu(norm(x))

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns logits of the classes."""
        x = nn.Conv(2 * self.growth, (3, 3), dtype=self.dtype)(x)
        for count in self.blocks:
            for _ in range(count):
                conv = nn.Conv(self.growth, (3, 3), use_bias=False, dtype=self.dtype)
                x = jnp.concatenate([x, conv(self.activated(x))], axis=-1)
            half = x.shape[-1] // 2 // self.growth * self.growth
            x = nn.Conv(half, (1, 1), dtype=self.dtype)(self.activated(x))
            batch, height, width, _ = x.shape
            x = x.reshape(batch, height // 2, 2, width // 2, 2, half).mean(axis=(2, 4))
        return nn.Dense(self.classes, dtype=self.dtype)(jnp.mean(x, axis=(1, 2)))


def densenet(size: str) -> Network:
    """Returns the classifier on random images."""
    s = SIZES[size]

    def model(dtype: Any) -> DenseNet:
        return DenseNet(s["growth"], s["blocks"], s["classes"], dtype)

    return image_classifier("densenet", size, s, model)
