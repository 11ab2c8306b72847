"""An encoder of speech: attention, a gated depthwise convolution, two half steps."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from ._attention import SelfAttention
from ._network import Network, PyTree, labelled

_SPEECH = {"mels": 80, "kernel": 31}
SIZES: dict[str, dict[str, int]] = {
    "tiny": {"batch": 2, "time": 64, "mels": 8, "kernel": 7, "width": 32, "layers": 2, "vocab": 16},
    "small": {"batch": 4, "time": 512, "width": 144, "layers": 4, "vocab": 256} | _SPEECH,
    "medium": {"batch": 8, "time": 2048, "width": 512, "layers": 2, "vocab": 1024} | _SPEECH,
    "full": {"batch": 16, "time": 2048, "width": 512, "layers": 17, "vocab": 1024} | _SPEECH,
}
SLOWER = 4  # frames that become one
WIDER = 4


class Block(nn.Module):
    """Half a step, attention, a convolution, half a step; each has its own norm."""

    kernel: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the stream behind this block, normalised."""
        width = x.shape[-1]
        norm = functools.partial(nn.LayerNorm, dtype=self.dtype)
        dense = functools.partial(nn.Dense, dtype=self.dtype)

        def half_step(x: jax.Array) -> jax.Array:
            return x + 0.5 * dense(width)(nn.swish(dense(WIDER * width)(norm()(x))))

        x = half_step(x)
        everywhere = jnp.ones((1, 1, 1, 1), bool)
        x = x + SelfAttention(max(width // 64, 1), self.dtype)(norm()(x), everywhere)
        value, gate = jnp.split(dense(2 * width)(norm()(x)), 2, axis=-1)
        y = value * nn.sigmoid(gate)
        y = nn.Conv(width, (self.kernel,), feature_group_count=width, dtype=self.dtype)(y)
        x = x + dense(width)(nn.swish(norm()(y)))
        return norm()(half_step(x))


class Conformer(nn.Module):
    """Two convolutions with strides, blocks, logits of each frame."""

    width: int
    layers: int
    kernel: int
    vocab: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns logits [batch, time / 4, vocab]."""
        x = x[..., None]
        for _ in range(2):
            x = nn.relu(nn.Conv(self.width, (3, 3), (2, 2), dtype=self.dtype)(x))
        x = nn.Dense(self.width, dtype=self.dtype)(x.reshape(*x.shape[:2], -1))
        for _ in range(self.layers):
            x = Block(self.kernel, self.dtype)(x)
        return nn.Dense(self.vocab, dtype=self.dtype)(x)


def conformer(size: str) -> Network:
    """Returns the encoder on random spectra, with a label for each of its frames."""
    s = SIZES[size]
    shape = (s["batch"], s["time"], s["mels"])

    def model(dtype: Any) -> Conformer:
        return Conformer(s["width"], s["layers"], s["kernel"], s["vocab"], dtype)

    def sample(key: jax.Array) -> PyTree:
        k1, k2 = jax.random.split(key)
        frames = s["batch"], s["time"] // SLOWER
        labels = jax.random.randint(k2, frames, 0, s["vocab"], jnp.int32)
        return {"x": jax.random.normal(k1, shape, jnp.float32), "y": labels}

    return labelled("conformer", size, s, model, sample)
