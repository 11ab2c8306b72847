"""A multilayer perceptron: nothing but large products, biases and relu."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from ._network import Network, cross_entropy

SIZES = {
    "tiny": {"batch": 64, "inputs": 64, "width": 128, "depth": 3, "classes": 10},
    "small": {"batch": 512, "inputs": 512, "width": 1024, "depth": 4, "classes": 1000},
    "medium": {"batch": 4096, "inputs": 1024, "width": 2048, "depth": 3, "classes": 1000},
    "full": {"batch": 8192, "inputs": 1024, "width": 4096, "depth": 4, "classes": 1000},
}


class MLP(nn.Module):
    """Dense layers with relu between them."""

    width: int
    depth: int
    classes: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns logits."""
        for _ in range(self.depth):
            x = nn.relu(nn.Dense(self.width, dtype=self.dtype)(x))
        return nn.Dense(self.classes, dtype=self.dtype)(x)


def mlp(size: str) -> Network:
    """Returns the perceptron with a classification loss."""
    s = SIZES[size]

    def model(dtype: Any) -> MLP:
        return MLP(s["width"], s["depth"], s["classes"], dtype)

    def written(dtype: Any) -> Any:
        def loss(params: Any, batch: Any) -> jax.Array:
            logits = model(dtype).apply({"params": params}, batch["x"])
            return cross_entropy(logits, batch["y"], dtype)

        return loss

    def sample(key: jax.Array) -> Any:
        k1, k2 = jax.random.split(key)
        x = jax.random.normal(k1, (s["batch"], s["inputs"]), jnp.float32)
        return {"x": x, "y": jax.random.randint(k2, (s["batch"],), 0, s["classes"], jnp.int32)}

    def init(key: jax.Array) -> Any:
        return model(jnp.float32).init(key, jnp.zeros((1, s["inputs"]), jnp.float32))["params"]

    return Network("mlp", size, s, written, init, sample)
