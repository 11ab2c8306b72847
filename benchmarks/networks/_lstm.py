"""A two-layer LSTM over characters, in plain JAX: `scan` with a weight read in every step."""

from typing import Any

import jax
import jax.numpy as jnp

from ._network import Network, cross_entropy, full

SIZES = {
    "tiny": {"batch": 8, "steps": 16, "width": 32, "vocab": 50, "layers": 2},
    "small": {"batch": 32, "steps": 64, "width": 256, "vocab": 256, "layers": 2},
    "medium": {"batch": 128, "steps": 64, "width": 512, "vocab": 256, "layers": 2},
    "full": {"batch": 256, "steps": 256, "width": 1024, "vocab": 256, "layers": 2},
}


def layer(params: Any, x: jax.Array, dtype: Any) -> jax.Array:
    """Returns the hidden states [steps, batch, width]; the cell state is kept in `full(dtype)`."""
    # All steps' inputs in one product; only the recurrent one has to wait for its turn.
    inputs = x @ params["input"].astype(dtype) + params["bias"].astype(dtype)

    def step(carry: Any, gates: jax.Array) -> Any:
        hidden, cell = carry
        gates = gates + hidden @ params["recurrent"].astype(dtype)
        i, f, g, o = jnp.split(gates, 4, axis=-1)
        new = (jax.nn.sigmoid(i) * jnp.tanh(g)).astype(full(dtype))
        cell = jax.nn.sigmoid(f).astype(full(dtype)) * cell + new
        hidden = jax.nn.sigmoid(o) * jnp.tanh(cell.astype(dtype))
        return (hidden, cell), hidden

    shape = (x.shape[1], params["recurrent"].shape[0])
    start = (jnp.zeros(shape, dtype), jnp.zeros(shape, full(dtype)))
    return jax.lax.scan(step, start, inputs)[1]


def lstm(size: str) -> Network:
    """Returns the language model on random characters."""
    s = SIZES[size]
    width, vocab = s["width"], s["vocab"]
    shape = (s["steps"], s["batch"])

    def written(dtype: Any) -> Any:
        def loss(params: Any, batch: Any) -> jax.Array:
            x = params["embedding"][batch["x"]].astype(dtype)
            for layer_params in params["layers"]:
                x = layer(layer_params, x, dtype)
            logits = x @ params["head"].astype(dtype)
            return cross_entropy(logits, batch["y"], dtype)

        return loss

    def sample(key: jax.Array) -> Any:
        k1, k2 = jax.random.split(key)
        return {
            "x": jax.random.randint(k1, shape, 0, vocab, jnp.int32),
            "y": jax.random.randint(k2, shape, 0, vocab, jnp.int32),
        }

    def init(key: jax.Array) -> Any:
        keys = iter(jax.random.split(key, 2 + 2 * s["layers"]))

        def matrix(rows: int, columns: int) -> jax.Array:
            return jax.random.normal(next(keys), (rows, columns), jnp.float32) / rows**0.5

        layers = [
            {
                "input": matrix(width, 4 * width),
                "recurrent": matrix(width, 4 * width),
                "bias": jnp.zeros((4 * width,), jnp.float32),
            }
            for _ in range(s["layers"])
        ]
        embedding = matrix(vocab, width)
        return {"embedding": embedding, "layers": layers, "head": matrix(width, vocab)}

    return Network("lstm", size, s, written, init, sample)
