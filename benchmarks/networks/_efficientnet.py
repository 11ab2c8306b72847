"""EfficientNet-B0: inverted bottlenecks of depthwise convolutions, with gates of channel means."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from ._network import Network, image_classifier

# Of each stage: expansion, channels, blocks, stride, kernel.
STAGES = (
    (1, 16, 1, 1, 3),
    (6, 24, 2, 2, 3),
    (6, 40, 2, 2, 5),
    (6, 80, 3, 2, 3),
    (6, 112, 3, 1, 5),
    (6, 192, 4, 2, 5),
    (6, 320, 1, 1, 3),
)
FEW = ((1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 1, 2, 5))
TINY = ((1, 8, 1, 1, 3), (2, 8, 2, 2, 3))
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"batch": 8, "pixels": 16, "stem": 8, "stages": TINY, "classes": 10},
    "small": {"batch": 8, "pixels": 64, "stem": 16, "stages": FEW, "classes": 100},
    "medium": {"batch": 32, "pixels": 112, "stem": 32, "stages": FEW, "classes": 1000},
    "full": {"batch": 64, "pixels": 224, "stem": 32, "stages": STAGES, "classes": 1000},
}


class Excite(nn.Module):
    """Channels gated by what a small network makes of their means."""

    hidden: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns `x`, gated."""
        means = jnp.mean(x, axis=(1, 2), keepdims=True)
        hidden = nn.silu(nn.Dense(self.hidden, dtype=self.dtype)(means))
        return x * nn.sigmoid(nn.Dense(x.shape[-1], dtype=self.dtype)(hidden))


class InvertedBottleneck(nn.Module):
    """Wider by a pointwise convolution, mixed by a depthwise one, gated, narrow again."""

    expansion: int
    channels: int
    stride: int
    kernel: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the features of the next block."""
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(nn.BatchNorm, use_running_average=False, dtype=self.dtype)
        wide, y = self.expansion * x.shape[-1], x
        if self.expansion > 1:
            y = nn.silu(norm()(conv(wide, (1, 1))(y)))
        kernel, strides = (self.kernel, self.kernel), (self.stride, self.stride)
        y = nn.silu(norm()(conv(wide, kernel, strides, feature_group_count=wide)(y)))
        y = Excite(max(x.shape[-1] // 4, 1), self.dtype)(y)
        y = norm()(conv(self.channels, (1, 1))(y))
        return x + y if x.shape == y.shape else y


class EfficientNet(nn.Module):
    """A stem, stages of bottlenecks, a classifier."""

    stem: int
    stages: tuple[tuple[int, ...], ...]
    classes: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns logits."""
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(nn.BatchNorm, use_running_average=False, dtype=self.dtype)
        x = nn.silu(norm()(conv(self.stem, (3, 3), (2, 2))(x)))
        for expansion, channels, count, stride, kernel in self.stages:
            for i in range(count):
                step = stride if i == 0 else 1
                x = InvertedBottleneck(expansion, channels, step, kernel, self.dtype)(x)
        x = nn.silu(norm()(conv(4 * x.shape[-1], (1, 1))(x)))
        return nn.Dense(self.classes, dtype=self.dtype)(jnp.mean(x, axis=(1, 2)))


def efficientnet(size: str) -> Network:
    """Returns the classifier on random images."""
    s = SIZES[size]

    def model(dtype: Any) -> EfficientNet:
        return EfficientNet(s["stem"], s["stages"], s["classes"], dtype)

    return image_classifier("efficientnet", size, s, model)
