"""A diffusion transformer: blocks whose norms a time scales and shifts, with gated gelu layers."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from ._attention import SelfAttention
from ._network import Network
from ._unet import denoiser, time_features

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"batch": 2, "pixels": 8, "patch": 2, "width": 32, "layers": 2},
    "small": {"batch": 4, "pixels": 32, "patch": 4, "width": 128, "layers": 4},
    "medium": {"batch": 8, "pixels": 64, "patch": 2, "width": 768, "layers": 2},
    "full": {"batch": 32, "pixels": 32, "patch": 2, "width": 1152, "layers": 28},
}
WIDER = 4


class Block(nn.Module):
    """Attention and a gated layer; the time scales and shifts both, and scales what they give."""

    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        """Returns the stream behind this block."""
        width = x.shape[-1]
        dense = functools.partial(nn.Dense, dtype=self.dtype)

        def norm(x: jax.Array, scale: jax.Array, shift: jax.Array) -> jax.Array:
            bare = nn.LayerNorm(use_scale=False, use_bias=False, dtype=self.dtype)
            return bare(x) * (1 + scale) + shift

        six = jnp.split(dense(6 * width)(time)[:, None], 6, axis=-1)
        scale, shift, size, scale_of_layer, shift_of_layer, size_of_layer = six
        everywhere = jnp.ones((1, 1, 1, 1), bool)
        attention = SelfAttention(max(width // 64, 1), self.dtype)
        x = x + size * attention(norm(x, scale, shift), everywhere)
        y = dense(2 * WIDER * width)(norm(x, scale_of_layer, shift_of_layer))
        value, gate = jnp.split(y, 2, axis=-1)
        return x + size_of_layer * dense(width)(value * nn.gelu(gate))


class Dit(nn.Module):
    """Patches, blocks, patches again."""

    patch: int
    width: int
    layers: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, t: jax.Array) -> jax.Array:
        """Returns an image like `x`."""
        batch, *_, channels = x.shape
        patch = (self.patch, self.patch)
        time = time_features(t, self.width, self.dtype)
        y = nn.Conv(self.width, patch, patch, "VALID", dtype=self.dtype)(x)
        rows, columns = y.shape[1:3]
        y = y.reshape(batch, rows * columns, self.width)
        normal = nn.initializers.normal(0.02)
        places = self.param("positions", normal, (rows * columns, self.width), jnp.float32)
        y = y + places[None].astype(self.dtype)
        for _ in range(self.layers):
            y = Block(self.dtype)(y, time)
        y = nn.Dense(self.patch**2 * channels, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(y))
        y = y.reshape(batch, rows, columns, self.patch, self.patch, channels)
        return y.transpose(0, 1, 3, 2, 4, 5).reshape(x.shape)


def dit(size: str) -> Network:
    """Returns the denoiser on random images and times."""
    s = SIZES[size]

    def model(dtype: Any) -> Dit:
        return Dit(s["patch"], s["width"], s["layers"], dtype)

    return denoiser("dit", size, s, model)
