"""Two critics of reinforcement learning: layers that are normalised before their activation."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from ._network import Loss, Network, PyTree, full

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"batch": 32, "state": 12, "action": 4, "width": 32, "layers": 2},
    "small": {"batch": 256, "state": 64, "action": 16, "width": 512, "layers": 3},
    "medium": {"batch": 16384, "state": 256, "action": 64, "width": 1024, "layers": 3},
    "full": {"batch": 16384, "state": 256, "action": 64, "width": 2048, "layers": 4},
}
CRITICS = 2


class Critic(nn.Module):
    """The first layer ends in a tanh, which bounds it; the others in an ELU."""

    width: int
    layers: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns a value for each row."""
        for i in range(self.layers):
            x = nn.LayerNorm(dtype=self.dtype)(nn.Dense(self.width, dtype=self.dtype)(x))
            x = nn.elu(x) if i else nn.tanh(x)
        return nn.Dense(1, dtype=self.dtype)(x)[..., 0]


def critic(size: str) -> Network:
    """Returns the critics on random states and actions, with the values that they should find."""
    s = SIZES[size]

    def models(dtype: Any) -> list[Critic]:
        return [Critic(s["width"], s["layers"], dtype) for _ in range(CRITICS)]

    def written(dtype: Any) -> Loss:
        def loss(params: PyTree, batch: PyTree) -> jax.Array:
            x = jnp.concatenate([batch["state"], batch["action"]], axis=-1)
            found = [
                model.apply({"params": p}, x)
                for model, p in zip(models(dtype), params, strict=True)
            ]
            errors = jnp.stack(found).astype(full(dtype)) - batch["y"]
            return jnp.mean(jnp.square(errors))

        return loss

    def sample(key: jax.Array) -> PyTree:
        k1, k2, k3 = jax.random.split(key, 3)
        return {
            "state": jax.random.normal(k1, (s["batch"], s["state"]), jnp.float32),
            "action": jnp.tanh(jax.random.normal(k2, (s["batch"], s["action"]), jnp.float32)),
            "y": jax.random.normal(k3, (s["batch"],), jnp.float32),
        }

    def init(key: jax.Array) -> PyTree:
        row = jnp.zeros((1, s["state"] + s["action"]), jnp.float32)
        keys = jax.random.split(key, CRITICS)
        both = zip(models(jnp.float32), keys, strict=True)
        return [model.init(k, row)["params"] for model, k in both]

    return Network("critic", size, s, written, init, sample)
