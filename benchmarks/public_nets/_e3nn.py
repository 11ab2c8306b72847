"""A layer of messages between atoms, twice, as e3nn-jax's own example writes it in Flax."""

from typing import Any

import e3nn_jax as e3nn
import flax.linen as nn
import jax
import jax.numpy as jnp
from networks import Network

from ._written import mean_square, unswitched


class _Layer(nn.Module):
    irreps: str

    @nn.compact
    def __call__(self, nodes: Any, places: Any, senders: Any, receivers: Any) -> Any:
        vectors = e3nn.IrrepsArray("1o", places[receivers] - places[senders])
        harmonics = e3nn.spherical_harmonics([1, 2], vectors, True)
        messages = e3nn.concatenate(
            [nodes[senders], e3nn.tensor_product(harmonics, nodes[senders])]
        ).regroup()
        lengths = jnp.linalg.norm(vectors.array, axis=-1)
        radial = e3nn.bessel(lengths, 8)
        weights = e3nn.flax.MultiLayerPerceptron([64, messages.irreps.num_irreps], jax.nn.silu)
        messages = messages * weights(radial)
        summed = e3nn.scatter_sum(messages, dst=receivers, output_size=nodes.shape[0]) / 4.0
        both = e3nn.concatenate([nodes, summed]).regroup()
        return e3nn.flax.Linear(self.irreps, name="out")(both)


class _Energy(nn.Module):
    channels: int

    @nn.compact
    def __call__(self, places: Any, senders: Any, receivers: Any) -> Any:
        nodes = e3nn.IrrepsArray("0e", jnp.ones((len(places), 1), places.dtype))
        hidden = f"{self.channels}x0e + {self.channels}x1o"
        for _ in range(2):
            nodes = _Layer(hidden)(nodes, places, senders, receivers)
            nodes = e3nn.scalar_activation(nodes, [jax.nn.silu, None])
        return e3nn.flax.Linear("0e", name="energy")(nodes).array[:, 0]


def equivariant(size: str) -> Network:
    atoms, edges, channels = (16, 64, 8) if size == "tiny" else (2048, 32768, 32)
    model = _Energy(channels)

    def sample(key: jax.Array) -> Any:
        k1, k2, k3 = jax.random.split(key, 3)
        senders = jax.random.randint(k2, (edges,), 0, atoms)
        return {
            "places": 2 * jax.random.normal(k1, (atoms, 3)),
            "senders": senders,
            "receivers": (senders + 1 + jax.random.randint(k3, (edges,), 0, atoms - 1)) % atoms,
            "y": jax.random.normal(k3, (atoms,)),
        }

    def init(key: jax.Array) -> Any:
        batch = sample(key)
        return model.init(key, batch["places"], batch["senders"], batch["receivers"])["params"]

    def loss(params: Any, batch: Any) -> jax.Array:
        variables = {"params": params}
        out = model.apply(variables, batch["places"], batch["senders"], batch["receivers"])
        return mean_square(out, batch["y"], out.dtype)

    return unswitched("equivariant", size, loss, init, sample)
