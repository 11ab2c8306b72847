"""Two decoders: one of separate blocks (GPT-2's), one scanned and rematerialised (Llama's)."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from ._attention import SelfAttention, causal
from ._network import Network, full, language_model

SIZES = {
    "tiny": {"batch": 4, "time": 16, "width": 32, "heads": 2, "layers": 2, "vocab": 64},
    "small": {"batch": 4, "time": 128, "width": 256, "heads": 4, "layers": 4, "vocab": 1024},
    "medium": {"batch": 4, "time": 512, "width": 768, "heads": 12, "layers": 2, "vocab": 8192},
    "full": {"batch": 8, "time": 1024, "width": 768, "heads": 12, "layers": 12, "vocab": 32000},
    # GPT-2 medium, for what is timed on a GPU.
    "large": {"batch": 4, "time": 1024, "width": 1024, "heads": 16, "layers": 24, "vocab": 50257},
    # As wide as 8 bits need to pay.
    "wide": {"batch": 4, "time": 1024, "width": 4096, "heads": 32, "layers": 2, "vocab": 32000},
}


class Block(nn.Module):
    """Pre-normalised attention and gelu layers, as in GPT-2."""

    heads: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the residual stream behind this block."""
        mask = causal(x.shape[1])
        y = nn.LayerNorm(dtype=self.dtype, name="norm1")(x)
        x = x + SelfAttention(self.heads, self.dtype, name="attention")(y, mask)
        y = nn.LayerNorm(dtype=self.dtype, name="norm2")(x)
        y = nn.gelu(nn.Dense(4 * x.shape[-1], dtype=self.dtype, name="up")(y))
        return x + nn.Dense(x.shape[-1], dtype=self.dtype, name="down")(y)


class TransformerLM(nn.Module):
    """Learned positions, blocks one by one, the embedding table as the output layer."""

    vocab: int
    width: int
    heads: int
    layers: int
    dtype: Any

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns logits."""
        normal = nn.initializers.normal(0.02)
        table = self.param("embedding", normal, (self.vocab, self.width), jnp.float32)
        places = self.param("positions", normal, (tokens.shape[1], self.width), jnp.float32)
        # Rows are cast after the lookup: the table's gradient is then summed in float32.
        x = (table[tokens] + places[None]).astype(self.dtype)
        for i in range(self.layers):
            x = Block(self.heads, self.dtype, name=f"block_{i}")(x)
        x = nn.LayerNorm(dtype=self.dtype, name="norm")(x)
        return x @ table.astype(self.dtype).T


class LlamaBlock(nn.Module):
    """Rotary attention and a gated layer behind root-mean-square norms; `scan`'s signature."""

    heads: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        """Returns the residual stream behind this block, and nothing to stack."""
        width = x.shape[-1]
        y = nn.RMSNorm(dtype=self.dtype, name="norm1")(x)
        attention = SelfAttention(
            self.heads, self.dtype, rotary=True, use_bias=False, name="attention"
        )
        x = x + attention(y, causal(x.shape[1]))
        y = nn.RMSNorm(dtype=self.dtype, name="norm2")(x)
        gate = nn.Dense(3 * width, use_bias=False, dtype=self.dtype, name="gate")(y)
        up = nn.Dense(3 * width, use_bias=False, dtype=self.dtype, name="up")(y)
        down = nn.Dense(width, use_bias=False, dtype=self.dtype, name="down")
        return x + down(nn.silu(gate) * up), None


class ScannedLM(nn.Module):
    """Blocks with stacked parameters in one `scan`, each rematerialised."""

    vocab: int
    width: int
    heads: int
    layers: int
    dtype: Any

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns logits."""
        # dtype=full: rows are cast after the lookup, see TransformerLM.
        embed = nn.Embed(self.vocab, self.width, dtype=full(self.dtype), name="embedding")
        x = embed(tokens).astype(self.dtype)
        blocks = nn.scan(
            nn.remat(LlamaBlock, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=self.layers,
        )
        x, _ = blocks(self.heads, self.dtype, name="blocks")(x, None)
        x = nn.RMSNorm(dtype=self.dtype, name="norm")(x)
        return nn.Dense(self.vocab, use_bias=False, dtype=self.dtype, name="head")(x)


def _decoder(name: str, size: str, kind: type[nn.Module], shorter: int = 1) -> Network:
    s = SIZES[size]
    s = {**s, "batch": s["batch"] * shorter, "time": s["time"] // shorter}

    def model(dtype: Any) -> Any:
        return kind(s["vocab"], s["width"], s["heads"], s["layers"], dtype)

    return language_model(name, size, s, model)


def transformer(size: str) -> Network:
    """Returns the decoder of separate blocks."""
    return _decoder("transformer", size, TransformerLM)


def short_transformer(size: str) -> Network:
    """Returns it for as many tokens in sequences of an eighth: attention is an eighth as large."""
    return _decoder("short_transformer", size, TransformerLM, shorter=8)


def scanned_transformer(size: str) -> Network:
    """Returns the decoder in one `scan`, with remat."""
    return _decoder("scanned_transformer", size, ScannedLM)
