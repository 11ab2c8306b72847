"""A vision transformer: patches, pre-normalised blocks of gelu layers, the mean of all places."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from ._attention import SelfAttention
from ._network import Network, image_classifier

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"batch": 4, "pixels": 16, "patch": 4, "width": 32, "layers": 2, "classes": 10},
    "small": {"batch": 8, "pixels": 64, "patch": 8, "width": 256, "layers": 4, "classes": 100},
    "medium": {"batch": 16, "pixels": 224, "patch": 16, "width": 768, "layers": 2, "classes": 1000},
    "full": {"batch": 32, "pixels": 224, "patch": 16, "width": 768, "layers": 12, "classes": 1000},
    "large": {
        "batch": 128,
        "pixels": 224,
        "patch": 16,
        "width": 768,
        "layers": 12,
        "classes": 1000,
    },
}
HEAD = 16  # features of a head at width 32; 64 at 256 and above


class Block(nn.Module):
    """Attention and a gelu layer, each added to the stream of its own norm."""

    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the residual stream behind this block."""
        heads = x.shape[-1] // (64 if x.shape[-1] >= 256 else HEAD)
        everywhere = jnp.ones((1, 1, 1, 1), bool)
        y = nn.LayerNorm(dtype=self.dtype)(x)
        x = x + SelfAttention(heads, self.dtype)(y, everywhere)
        y = nn.LayerNorm(dtype=self.dtype)(x)
        y = nn.gelu(nn.Dense(4 * x.shape[-1], dtype=self.dtype)(y))
        return x + nn.Dense(x.shape[-1], dtype=self.dtype)(y)


class ViT(nn.Module):
    """Patches, blocks, a classifier."""

    patch: int
    width: int
    layers: int
    classes: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns logits."""
        patch = (self.patch, self.patch)
        x = nn.Conv(self.width, patch, patch, "VALID", dtype=self.dtype)(x)
        x = x.reshape(x.shape[0], -1, self.width)
        normal = nn.initializers.normal(0.02)
        places = self.param("positions", normal, (x.shape[1], self.width), jnp.float32)
        x = x + places[None].astype(self.dtype)
        for _ in range(self.layers):
            x = Block(self.dtype)(x)
        x = jnp.mean(nn.LayerNorm(dtype=self.dtype)(x), axis=1)
        return nn.Dense(self.classes, dtype=self.dtype)(x)


def vit(size: str) -> Network:
    """Returns the classifier on random images."""
    s = SIZES[size]

    def model(dtype: Any) -> ViT:
        return ViT(s["patch"], s["width"], s["layers"], s["classes"], dtype)

    return image_classifier("vit", size, s, model)
