"""A U-Net as diffusion models use it: group normalisation, silu, time embedding, skips."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from ._network import Network, full

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"batch": 4, "pixels": 16, "width": 16, "levels": (1, 2), "groups": 4},
    "small": {"batch": 4, "pixels": 32, "width": 32, "levels": (1, 2, 2), "groups": 8},
    "medium": {"batch": 8, "pixels": 64, "width": 128, "levels": (1, 2), "groups": 32},
    "full": {"batch": 32, "pixels": 128, "width": 128, "levels": (1, 2, 2, 4), "groups": 32},
}


def time_embedding(t: jax.Array, width: int, dtype: Any) -> jax.Array:
    """Returns sines and cosines of geometric frequencies, in `full(dtype)`."""
    exponents = jnp.arange(width // 2, dtype=full(dtype)) / (width // 2)
    angles = t.astype(full(dtype))[:, None] * jnp.exp(-jnp.log(1e4) * exponents)[None, :]
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


def time_features(t: jax.Array, width: int, dtype: Any) -> jax.Array:
    """Returns what every block reads of the time; for use inside a module."""
    time = time_embedding(t, width, dtype).astype(dtype)
    return nn.silu(nn.Dense(4 * width, dtype=dtype)(time))


def enlarged(x: jax.Array) -> jax.Array:
    """Returns an image of twice the height and width, each pixel as four."""
    return jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)


class ResidualBlock(nn.Module):
    """Two normalised 3x3 convolutions with the time added between them."""

    width: int
    groups: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        """Returns features of `width` channels."""
        conv = functools.partial(nn.Conv, self.width, dtype=self.dtype)
        norm = functools.partial(nn.GroupNorm, self.groups, dtype=self.dtype)
        y = conv((3, 3))(nn.silu(norm()(x)))
        y = y + nn.Dense(self.width, dtype=self.dtype)(time)[:, None, None, :]
        y = conv((3, 3))(nn.silu(norm()(y)))
        return y + (x if x.shape == y.shape else conv((1, 1))(x))


class UNet(nn.Module):
    """One residual block a level down, two in the middle, one a level up."""

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
        skips = []
        for multiple in self.levels:
            x = block(self.width * multiple)(x, time)
            skips.append(x)
            x = conv(x.shape[-1], strides=(2, 2))(x)
        for _ in range(2):
            x = block(x.shape[-1])(x, time)
        for multiple, skip in zip(reversed(self.levels), reversed(skips), strict=True):
            x = enlarged(x)
            x = jnp.concatenate([conv(skip.shape[-1])(x), skip], axis=-1)
            x = block(self.width * multiple)(x, time)
        x = nn.silu(nn.GroupNorm(self.groups, dtype=self.dtype)(x))
        return conv(channels)(x)


def unet(size: str) -> Network:
    """Returns the U-Net with the loss of a denoiser."""
    s = SIZES[size]

    def model(dtype: Any) -> UNet:
        return UNet(s["width"], s["levels"], s["groups"], dtype)

    return denoiser("unet", size, s, model)


def denoiser(
    name: str, size: str, numbers: dict[str, Any], model: Callable[[Any], nn.Module]
) -> Network:
    """Returns a model of noisy images and their times, with the loss of the noise it finds."""
    shape = (numbers["batch"], numbers["pixels"], numbers["pixels"], 3)

    def written(dtype: Any) -> Any:
        def loss(params: Any, batch: Any) -> jax.Array:
            noise = model(dtype).apply({"params": params}, batch["x"], batch["t"])
            return jnp.mean((noise.astype(full(dtype)) - batch["noise"].astype(full(dtype))) ** 2)

        return loss

    def sample(key: jax.Array) -> Any:
        k1, k2, k3 = jax.random.split(key, 3)
        x = jax.random.normal(k1, shape, jnp.float32)
        t = jax.random.uniform(k2, shape[:1], jnp.float32, 0.0, 1000.0)
        return {"x": x, "t": t, "noise": jax.random.normal(k3, shape, jnp.float32)}

    def init(key: jax.Array) -> Any:
        image, t = jnp.zeros((1, *shape[1:]), jnp.float32), jnp.zeros((1,), jnp.float32)
        return model(jnp.float32).init(key, image, t)["params"]

    return Network(name, size, numbers, written, init, sample)
