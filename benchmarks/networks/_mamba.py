"""Mamba: a selective state space a channel, scanned over time in full, between gated products."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from ._network import Network, full, language_model

SIZES = {
    "tiny": {"batch": 2, "time": 16, "width": 16, "states": 4, "layers": 2, "vocab": 64},
    "small": {"batch": 2, "time": 64, "width": 128, "states": 8, "layers": 2, "vocab": 512},
    "medium": {"batch": 4, "time": 256, "width": 256, "states": 16, "layers": 2, "vocab": 8192},
    "full": {"batch": 4, "time": 1024, "width": 768, "states": 16, "layers": 4, "vocab": 32000},
}
RANK = 8  # of what makes the time steps


def selective_scan(x: jax.Array, dt: jax.Array, a: jax.Array, b: jax.Array, c: jax.Array) -> Any:
    """Returns what each time reads of states [batch, channels, n] that are kept in the dtype of a.

    Args:
      x: [batch, time, channels]
      dt: like x, the length of each step
      a: [channels, n], how fast a state decays
      b: [batch, time, n], into which states a channel is written
      c: like b, of which states it is read
    """

    def step(state: jax.Array, now: Any) -> Any:
        x, dt, b, c = (array.astype(a.dtype) for array in now)
        state = jnp.exp(dt[..., None] * a) * state + (dt * x)[..., None] * b[:, None, :]
        return state, jnp.sum(state * c[:, None, :], axis=-1).astype(now[0].dtype)

    start = jnp.zeros((x.shape[0], *a.shape), a.dtype)
    along_time = [jnp.moveaxis(array, 1, 0) for array in (x, dt, b, c)]
    return jnp.moveaxis(jax.lax.scan(step, start, along_time)[1], 0, 1)


class Block(nn.Module):
    """A normalised branch: a short convolution, the scan, a gate."""

    states: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the residual stream behind this block."""
        inner, n, wide = 2 * x.shape[-1], self.states, full(self.dtype)

        def dense(width: int, *, use_bias: bool = False) -> nn.Dense:
            return nn.Dense(width, use_bias=use_bias, dtype=self.dtype)

        y, gate = jnp.split(dense(2 * inner)(nn.RMSNorm(dtype=self.dtype)(x)), 2, axis=-1)
        conv = nn.Conv(inner, (4,), padding="CAUSAL", feature_group_count=inner, dtype=self.dtype)
        y = nn.silu(conv(y))
        dt, b, c = jnp.split(dense(RANK + 2 * n)(y), (RANK, RANK + n), axis=-1)
        dt = nn.softplus(dense(inner, use_bias=True)(dt))
        decay = self.param("decay", lambda key, shape: jnp.ones(shape, jnp.float32), (inner, n))
        skip = self.param("skip", nn.initializers.ones, (inner,), jnp.float32)
        read = selective_scan(y, dt, -jnp.exp(decay.astype(wide)), b, c)
        y = (read + y * skip.astype(self.dtype)) * nn.silu(gate)
        return x + dense(x.shape[-1])(y)


class Mamba(nn.Module):
    """A table, blocks, the table again."""

    vocab: int
    width: int
    states: int
    layers: int
    dtype: Any

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns logits."""
        normal = nn.initializers.normal(0.02)
        table = self.param("embedding", normal, (self.vocab, self.width), jnp.float32)
        x = table[tokens].astype(self.dtype)
        for _ in range(self.layers):
            x = Block(self.states, self.dtype)(x)
        return nn.RMSNorm(dtype=self.dtype)(x) @ table.astype(self.dtype).T


def mamba(size: str) -> Network:
    """Returns the decoder."""
    s = SIZES[size]

    def model(dtype: Any) -> Mamba:
        return Mamba(s["vocab"], s["width"], s["states"], s["layers"], dtype)

    return language_model("mamba", size, s, model)
