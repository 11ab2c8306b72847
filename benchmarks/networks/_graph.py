"""A network on graphs, as for meshes: edges read both their nodes, nodes add up their edges."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from ._network import Loss, Network, PyTree, full

SIZES = {
    "tiny": {"nodes": 24, "edges": 96, "features": 6, "width": 16, "layers": 2},
    "small": {"nodes": 1024, "edges": 6144, "features": 16, "width": 64, "layers": 3},
    "medium": {"nodes": 8192, "edges": 49152, "features": 16, "width": 128, "layers": 2},
    "full": {"nodes": 16384, "edges": 98304, "features": 16, "width": 128, "layers": 12},
}


class NormalisedMLP(nn.Module):
    """Two layers and a norm."""

    width: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns normalised features of `width` channels."""
        x = nn.relu(nn.Dense(self.width, dtype=self.dtype)(x))
        return nn.LayerNorm(dtype=self.dtype)(nn.Dense(self.width, dtype=self.dtype)(x))


class Graph(nn.Module):
    """Embeds nodes and edges, passes messages, and reads a number off each node.

    A node's gradient is a sum over its edges: in `dtype`, or if `careful` in float32.
    """

    width: int
    layers: int
    dtype: Any
    careful: bool

    @nn.compact
    def __call__(self, batch: Any) -> jax.Array:
        """Returns a number a node."""
        nodes = NormalisedMLP(self.width, self.dtype)(batch["nodes"])
        edges = NormalisedMLP(self.width, self.dtype)(batch["edges"])
        senders, receivers = batch["senders"], batch["receivers"]
        for _ in range(self.layers):
            rows = nodes.astype(full(self.dtype)) if self.careful else nodes
            ends = [rows[i].astype(nodes.dtype) for i in (senders, receivers)]
            read = jnp.concatenate([edges, *ends], axis=-1)
            edges = edges + NormalisedMLP(self.width, self.dtype)(read)
            wide = edges.astype(full(self.dtype))
            sums = jax.ops.segment_sum(wide, receivers, nodes.shape[0]).astype(self.dtype)
            read = jnp.concatenate([nodes, sums], axis=-1)
            nodes = nodes + NormalisedMLP(self.width, self.dtype)(read)
        return nn.Dense(1, dtype=self.dtype)(nodes)[:, 0]


def of_nodes(
    name: str,
    size: str,
    numbers: dict[str, int],
    model: Callable[[Any], nn.Module],
    sample: Callable[[jax.Array], PyTree],
) -> Network:
    """Returns a model of a graph that finds a number `y` for each node."""

    def written(dtype: Any) -> Loss:
        def loss(params: PyTree, batch: PyTree) -> jax.Array:
            found = model(dtype).apply({"params": params}, batch)
            return jnp.mean((found.astype(full(dtype)) - batch["y"].astype(full(dtype))) ** 2)

        return loss

    def init(key: jax.Array) -> PyTree:
        return model(jnp.float32).init(key, sample(key))["params"]

    return Network(name, size, numbers, written, init, sample)


def careful_graph(size: str) -> Network:
    """Returns the network whose hand cast adds up gathered rows' gradients in float32."""
    return graph(size, careful=True)


def graph(size: str, *, careful: bool = False) -> Network:
    """Returns the network on one random graph."""
    s = SIZES[size]

    def model(dtype: Any) -> Graph:
        return Graph(s["width"], s["layers"], dtype, careful)

    def sample(key: jax.Array) -> Any:
        keys = jax.random.split(key, 5)
        ends = jax.random.randint(keys[0], (2, s["edges"]), 0, s["nodes"], jnp.int32)
        return {
            "nodes": jax.random.normal(keys[1], (s["nodes"], s["features"]), jnp.float32),
            "edges": jax.random.normal(keys[2], (s["edges"], s["features"]), jnp.float32),
            "senders": ends[0],
            "receivers": ends[1],
            "y": jax.random.normal(keys[3], (s["nodes"],), jnp.float32),
        }

    return of_nodes("careful_graph" if careful else "graph", size, s, model, sample)
