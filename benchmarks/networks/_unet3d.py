"""A U-Net on volumes, as for segmenting scans: group normalisation, leaky relu, transposed ups."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from ._network import Network, cross_entropy

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"batch": 2, "voxels": 8, "widths": (8, 16), "groups": 4, "classes": 3},
    "small": {"batch": 1, "voxels": 16, "widths": (16, 32), "groups": 8, "classes": 4},
    "medium": {"batch": 2, "voxels": 64, "widths": (32, 64), "groups": 8, "classes": 4},
    "full": {"batch": 2, "voxels": 128, "widths": (32, 64, 128, 256), "groups": 8, "classes": 4},
}


class TwoConvolutions(nn.Module):
    """Two normalised 3x3x3 convolutions, the first with a stride."""

    width: int
    groups: int
    dtype: Any
    stride: int = 1

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns features of `width` channels."""
        for stride in (self.stride, 1):
            x = nn.Conv(self.width, (3, 3, 3), (stride,) * 3, dtype=self.dtype)(x)
            x = nn.leaky_relu(nn.GroupNorm(self.groups, dtype=self.dtype)(x))
        return x


class UNet3D(nn.Module):
    """Down by strides, up by transposed convolutions, joined at each level."""

    widths: tuple[int, ...]
    groups: int
    classes: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns logits a voxel."""
        two = functools.partial(TwoConvolutions, groups=self.groups, dtype=self.dtype)
        skips = []
        for i, width in enumerate(self.widths):
            x = two(width, stride=2 if i else 1)(x)
            skips.append(x)
        for width, skip in zip(self.widths[-2::-1], skips[-2::-1], strict=True):
            x = nn.ConvTranspose(width, (2, 2, 2), (2, 2, 2), dtype=self.dtype)(x)
            x = two(width)(jnp.concatenate([x, skip], axis=-1))
        return nn.Conv(self.classes, (1, 1, 1), dtype=self.dtype)(x)


def unet3d(size: str) -> Network:
    """Returns the network on random volumes of one channel."""
    s = SIZES[size]
    shape = (s["batch"], *[s["voxels"]] * 3)

    def model(dtype: Any) -> UNet3D:
        return UNet3D(s["widths"], s["groups"], s["classes"], dtype)

    def written(dtype: Any) -> Any:
        def loss(params: Any, batch: Any) -> jax.Array:
            return cross_entropy(
                model(dtype).apply({"params": params}, batch["x"]), batch["y"], dtype
            )

        return loss

    def sample(key: jax.Array) -> Any:
        k1, k2 = jax.random.split(key)
        x = jax.random.normal(k1, (*shape, 1), jnp.float32)
        return {"x": x, "y": jax.random.randint(k2, shape, 0, s["classes"], jnp.int32)}

    def init(key: jax.Array) -> Any:
        return model(jnp.float32).init(key, jnp.zeros((1, *shape[1:], 1), jnp.float32))["params"]

    return Network("unet3d", size, s, written, init, sample)
