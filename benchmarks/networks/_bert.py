"""A BERT encoder: post-normalised blocks, exact gelu, a padding mask, masked-token loss."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from ._attention import SelfAttention
from ._network import Network, full

SIZES = {
    "tiny": {"batch": 4, "time": 16, "width": 32, "heads": 2, "layers": 2, "vocab": 64},
    "small": {"batch": 4, "time": 128, "width": 256, "heads": 4, "layers": 4, "vocab": 1024},
    "medium": {"batch": 4, "time": 512, "width": 768, "heads": 12, "layers": 2, "vocab": 8192},
    "full": {"batch": 16, "time": 512, "width": 768, "heads": 12, "layers": 12, "vocab": 30522},
    # BERT-large.
    "large": {"batch": 16, "time": 512, "width": 1024, "heads": 16, "layers": 24, "vocab": 30522},
}


class EncoderBlock(nn.Module):
    """Attention and gelu layers, each normalised behind its residual sum."""

    heads: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """Returns the features behind this block."""
        y = SelfAttention(self.heads, self.dtype, name="attention")(x, mask)
        x = nn.LayerNorm(epsilon=1e-12, dtype=self.dtype, name="norm1")(x + y)
        y = nn.Dense(4 * x.shape[-1], dtype=self.dtype, name="up")(x)
        y = nn.Dense(x.shape[-1], dtype=self.dtype, name="down")(nn.gelu(y, approximate=False))
        return nn.LayerNorm(epsilon=1e-12, dtype=self.dtype, name="norm2")(x + y)


class Bert(nn.Module):
    """The encoder and its head for masked tokens."""

    vocab: int
    width: int
    heads: int
    layers: int
    dtype: Any

    @nn.compact
    def __call__(self, batch: Any) -> jax.Array:
        """Returns logits [batch, masked, vocab] at the positions asked for."""
        normal, time = nn.initializers.normal(0.02), batch["tokens"].shape[1]
        table = self.param("tokens", normal, (self.vocab, self.width), jnp.float32)
        places = self.param("positions", normal, (time, self.width), jnp.float32)
        segments = self.param("segments", normal, (2, self.width), jnp.float32)
        x = table[batch["tokens"]] + places[None] + segments[batch["segments"]]
        x = nn.LayerNorm(epsilon=1e-12, dtype=self.dtype, name="norm")(x)
        mask = batch["is_token"][:, None, None, :]
        for i in range(self.layers):
            x = EncoderBlock(self.heads, self.dtype, name=f"block_{i}")(x, mask)
        x = jnp.take_along_axis(x, batch["positions"][:, :, None], axis=1)
        x = nn.gelu(nn.Dense(self.width, dtype=self.dtype, name="head")(x), approximate=False)
        x = nn.LayerNorm(epsilon=1e-12, dtype=self.dtype, name="head_norm")(x)
        bias = self.param("bias", nn.initializers.zeros, (self.vocab,), jnp.float32)
        return x @ table.astype(self.dtype).T + bias.astype(self.dtype)


def masked_loss(logits: jax.Array, batch: Any, dtype: Any) -> jax.Array:
    """Returns the mean loss over the positions with weight 1."""
    log_probs = jax.nn.log_softmax(logits.astype(full(dtype)), axis=-1)
    picked = jnp.take_along_axis(log_probs, batch["labels"][:, :, None], axis=-1)[..., 0]
    weights = batch["weights"].astype(full(dtype))
    return -jnp.sum(picked * weights) / (jnp.sum(weights) + 1e-5)


def bert(size: str) -> Network:
    """Returns the encoder on random, padded sentences."""
    s = SIZES[size]

    def model(dtype: Any) -> Bert:
        return Bert(s["vocab"], s["width"], s["heads"], s["layers"], dtype)

    def written(dtype: Any) -> Any:
        def loss(params: Any, batch: Any) -> jax.Array:
            return masked_loss(model(dtype).apply({"params": params}, batch), batch, dtype)

        return loss

    def sample(key: jax.Array) -> Any:
        sentences, places = (s["batch"], s["time"]), (s["batch"], s["time"] // 6)
        keys = jax.random.split(key, 5)
        lengths = jax.random.randint(keys[0], (s["batch"], 1), s["time"] // 2, s["time"], jnp.int32)
        index = jnp.arange(s["time"], dtype=jnp.int32)[None]
        return {
            "tokens": jax.random.randint(keys[1], sentences, 0, s["vocab"], jnp.int32),
            "segments": (index > lengths // 2).astype(jnp.int32),
            "is_token": index < lengths,
            "positions": jax.random.randint(keys[2], places, 0, s["time"] // 2, jnp.int32),
            "labels": jax.random.randint(keys[3], places, 0, s["vocab"], jnp.int32),
            "weights": jax.random.bernoulli(keys[4], 0.9, places).astype(jnp.float32),
        }

    def init(key: jax.Array) -> Any:
        batch = jax.tree.map(lambda x: jnp.zeros((1, *x.shape[1:]), x.dtype), sample(key))
        return model(jnp.float32).init(key, batch)["params"]

    return Network("bert", size, s, written, init, sample)
