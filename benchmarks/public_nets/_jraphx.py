"""jraphx's graph attention network, in Flax NNX."""

from typing import Any

import jax
from flax import nnx
from jraphx.nn import models
from networks import Network

from ._written import cross_entropy, unswitched


def gat(size: str) -> Network:
    nodes, edges, width, classes = (64, 256, 32, 7) if size == "tiny" else (2708, 10556, 256, 7)

    def model(key: jax.Array) -> Any:
        rngs = nnx.Rngs(key)
        return models.GAT(width, width, 3, classes, heads=4, norm="layer_norm", rngs=rngs)

    def init(key: jax.Array) -> Any:
        return nnx.to_pure_dict(nnx.state(model(key), nnx.Param))

    def loss(params: Any, batch: Any) -> jax.Array:
        network = nnx.eval_shape(lambda: model(jax.random.key(0)))
        graph, state, rest = nnx.split(network, nnx.Param, ...)
        nnx.replace_by_pure_dict(state, params)
        network = nnx.merge(graph, state, rest)
        network.eval()  # no dropout: its keys stay unread
        return cross_entropy(network(batch["x"], batch["edges"]), batch["y"], params_dtype(params))

    def sample(key: jax.Array) -> Any:
        k1, k2, k3 = jax.random.split(key, 3)
        return {
            "x": jax.random.normal(k1, (nodes, width)),
            "edges": jax.random.randint(k2, (2, edges), 0, nodes),
            "y": jax.random.randint(k3, (nodes,), 0, classes),
        }

    return unswitched("gat", size, loss, init, sample)


def params_dtype(params: Any) -> Any:
    return jax.tree.leaves(params)[0].dtype
