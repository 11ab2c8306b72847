"""VGG with batch normalisation: 3x3 convolutions with biases, relu, and the maximum of four."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from ._network import Network, image_classifier

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"batch": 4, "pixels": 16, "stages": ((8, 2), (16, 2)), "classes": 10},
    "small": {"batch": 8, "pixels": 32, "stages": ((32, 2), (64, 2)), "classes": 10},
    "medium": {"batch": 256, "pixels": 32, "stages": ((64, 2), (128, 2), (256, 3)), "classes": 10},
    "full": {
        "batch": 64,
        "pixels": 224,
        "classes": 1000,
        "stages": ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)),
    },
}


class Vgg(nn.Module):
    """Stages of a width and a number of convolutions, each ending in a pooling."""

    stages: tuple[tuple[int, int], ...]
    classes: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns logits of the classes."""
        for width, count in self.stages:
            for _ in range(count):
                x = nn.Conv(width, (3, 3), dtype=self.dtype)(x)
                x = nn.relu(nn.BatchNorm(use_running_average=False, dtype=self.dtype)(x))
            x = nn.max_pool(x, (2, 2), (2, 2))
        return nn.Dense(self.classes, dtype=self.dtype)(jnp.mean(x, axis=(1, 2)))


def vgg(size: str) -> Network:
    """Returns the classifier on random images."""
    s = SIZES[size]

    def model(dtype: Any) -> Vgg:
        return Vgg(s["stages"], s["classes"], dtype)

    return image_classifier("vgg", size, s, model)
