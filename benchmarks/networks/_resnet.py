"""ResNet-50 (v1.5: the stride in the 3x3 convolution), batch normalisation in training mode."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from ._network import Network, image_classifier

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"batch": 16, "pixels": 64, "width": 8, "blocks": (1, 1, 1, 1), "classes": 10},
    "small": {"batch": 8, "pixels": 96, "width": 32, "blocks": (1, 1, 1, 1), "classes": 100},
    "medium": {"batch": 32, "pixels": 112, "width": 64, "blocks": (2, 2), "classes": 1000},
    "full": {"batch": 64, "pixels": 224, "width": 64, "blocks": (3, 4, 6, 3), "classes": 1000},
    "large": {"batch": 128, "pixels": 224, "width": 64, "blocks": (3, 4, 6, 3), "classes": 1000},
}


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions around a shortcut."""

    width: int
    stride: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the features of the next block."""
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(nn.BatchNorm, use_running_average=False, dtype=self.dtype)
        strides = (self.stride, self.stride)
        y = nn.relu(norm()(conv(self.width, (1, 1))(x)))
        y = nn.relu(norm()(conv(self.width, (3, 3), strides)(y)))
        y = norm()(conv(4 * self.width, (1, 1))(y))
        if x.shape != y.shape:
            x = norm()(conv(4 * self.width, (1, 1), strides)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """A stem, four stages of bottlenecks, a classifier."""

    width: int
    blocks: tuple[int, ...]
    classes: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns logits."""
        x = nn.Conv(self.width, (7, 7), (2, 2), use_bias=False, dtype=self.dtype)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=False, dtype=self.dtype)(x))
        x = nn.max_pool(x, (3, 3), (2, 2), padding="SAME")
        for stage, count in enumerate(self.blocks):
            for block in range(count):
                stride = 2 if stage > 0 and block == 0 else 1
                x = Bottleneck(self.width * 2**stage, stride, self.dtype)(x)
        return nn.Dense(self.classes, dtype=self.dtype)(jnp.mean(x, axis=(1, 2)))


def resnet50(size: str) -> Network:
    """Returns the classifier on random images."""
    s = SIZES[size]

    def model(dtype: Any) -> ResNet:
        return ResNet(s["width"], s["blocks"], s["classes"], dtype)

    return image_classifier("resnet50", size, s, model)
