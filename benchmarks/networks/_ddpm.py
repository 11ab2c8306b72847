"""The U-Net of denoising diffusion: attention on its lowest level, two blocks a level up."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from ._network import Network, full
from ._unet import ResidualBlock, denoiser, enlarged, time_features

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"batch": 2, "pixels": 8, "width": 16, "levels": (1, 2), "groups": 4},
    "small": {"batch": 4, "pixels": 32, "width": 32, "levels": (1, 2), "groups": 8},
    "medium": {"batch": 8, "pixels": 64, "width": 128, "levels": (1, 2), "groups": 32},
    "full": {"batch": 32, "pixels": 64, "width": 128, "levels": (1, 2, 2, 2), "groups": 32},
}


class Attention(nn.Module):
    """One head over all places, behind a norm and beside a skip."""

    groups: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns an image like `x`."""
        batch, height, width, channels = x.shape
        project = functools.partial(nn.Dense, channels, dtype=self.dtype)
        y = nn.GroupNorm(self.groups, dtype=self.dtype)(x)
        q, k, v = (project()(y).reshape(batch, height * width, channels) for _ in range(3))
        logits = jnp.einsum("bqc,bkc->bqk", q, k) * channels**-0.5
        weights = nn.softmax(logits.astype(full(self.dtype))).astype(self.dtype)
        return x + project()((weights @ v).reshape(x.shape))


class Ddpm(nn.Module):
    """A residual block a level down, attention between two in the middle, two a level up."""

    width: int
    levels: tuple[int, ...]
    groups: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, t: jax.Array) -> jax.Array:
        """Returns an image like `x`."""
        block = functools.partial(ResidualBlock, groups=self.groups, dtype=self.dtype)
        conv = functools.partial(nn.Conv, kernel_size=(3, 3), dtype=self.dtype)
        channels = x.shape[-1]
        time = time_features(t, self.width, self.dtype)
        x = conv(self.width)(x)
        skips = [x]
        for multiple in self.levels:
            x = block(self.width * multiple)(x, time)
            skips.append(x)
            x = conv(x.shape[-1], strides=(2, 2))(x)
        x = block(x.shape[-1])(x, time)
        x = block(x.shape[-1])(Attention(self.groups, self.dtype)(x), time)
        for multiple in reversed(self.levels):
            x = enlarged(x)
            x = jnp.concatenate([conv(x.shape[-1])(x), skips.pop()], axis=-1)
            for _ in range(2):
                x = block(self.width * multiple)(x, time)
        x = jnp.concatenate([x, skips.pop()], axis=-1)
        x = nn.silu(nn.GroupNorm(self.groups, dtype=self.dtype)(x))
        return conv(channels)(x)


def ddpm(size: str) -> Network:
    """Returns the network with the loss of a denoiser."""
    s = SIZES[size]

    def model(dtype: Any) -> Ddpm:
        return Ddpm(s["width"], s["levels"], s["groups"], dtype)

    return denoiser("ddpm", size, s, model)
