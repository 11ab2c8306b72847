"""Message passing on graphs: messages are made anew in each round, and nodes read their mean."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from ._graph import NormalisedMLP, of_nodes
from ._network import Network, PyTree, full

SIZES = {
    "tiny": {"nodes": 24, "edges": 96, "features": 6, "width": 16, "rounds": 2},
    "small": {"nodes": 1024, "edges": 8192, "features": 16, "width": 64, "rounds": 3},
    "medium": {"nodes": 8192, "edges": 65536, "features": 16, "width": 128, "rounds": 3},
    "full": {"nodes": 16384, "edges": 131072, "features": 16, "width": 256, "rounds": 8},
}


class Messages(nn.Module):
    """Embeds nodes, passes messages, and reads a number off each node."""

    width: int
    rounds: int
    dtype: Any

    @nn.compact
    def __call__(self, batch: Any) -> jax.Array:
        """Returns a number a node."""
        senders, receivers = batch["senders"], batch["receivers"]
        nodes = NormalisedMLP(self.width, self.dtype)(batch["nodes"])

        def sums(x: jax.Array) -> jax.Array:
            return jax.ops.segment_sum(x, receivers, nodes.shape[0])

        edges = jnp.ones((senders.shape[0], 1), full(self.dtype))
        count = jnp.maximum(sums(edges), 1)
        for _ in range(self.rounds):
            wide = nodes.astype(full(self.dtype))  # whose gradient is a sum over its edges
            ends = [wide[i].astype(nodes.dtype) for i in (senders, receivers)]
            messages = NormalisedMLP(self.width, self.dtype)(jnp.concatenate(ends, axis=-1))
            mean = (sums(messages.astype(full(self.dtype))) / count).astype(self.dtype)
            read = jnp.concatenate([nodes, mean], axis=-1)
            nodes = nodes + NormalisedMLP(self.width, self.dtype)(read)
        return nn.Dense(1, dtype=self.dtype)(nodes)[:, 0]


def messages(size: str) -> Network:
    """Returns the network on one random graph; its hand cast adds up rows' gradients in float32."""
    s = SIZES[size]

    def model(dtype: Any) -> Messages:
        return Messages(s["width"], s["rounds"], dtype)

    def sample(key: jax.Array) -> PyTree:
        k1, k2, k3 = jax.random.split(key, 3)
        ends = jax.random.randint(k1, (2, s["edges"]), 0, s["nodes"], jnp.int32)
        return {
            "nodes": jax.random.normal(k2, (s["nodes"], s["features"]), jnp.float32),
            "senders": ends[0],
            "receivers": ends[1],
            "y": jax.random.normal(k3, (s["nodes"],), jnp.float32),
        }

    return of_nodes("messages", size, s, model, sample)
