"""A coupling flow of distrax's rational-quadratic splines, as its own example writes it."""

from typing import Any

import distrax
import flax.linen as nn
import jax
import jax.numpy as jnp
from networks import Network

from ._written import unswitched

BINS = 8
EACH = 3 * BINS + 1  # numbers that a spline takes


class _Conditioner(nn.Module):
    width: int
    features: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = nn.relu(nn.Dense(self.width)(x))
        x = nn.Dense(self.features * EACH, kernel_init=nn.initializers.normal(0.05))(x)
        return x.reshape(*x.shape[:-1], self.features, EACH)


class _Flow(nn.Module):
    width: int
    features: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def spline(numbers: jax.Array) -> distrax.Bijector:
            return distrax.RationalQuadraticSpline(numbers, range_min=-4.0, range_max=4.0)

        mask = jnp.arange(self.features) % 2 == 0
        couplings = [
            distrax.MaskedCoupling(
                mask if i % 2 else ~mask, _Conditioner(self.width, self.features), spline
            )
            for i in range(4)
        ]
        base = distrax.MultivariateNormalDiag(
            jnp.zeros(self.features, x.dtype), jnp.ones(self.features, x.dtype)
        )
        flow = distrax.Inverse(distrax.Chain(couplings))
        return distrax.Transformed(base, flow).log_prob(x)


def spline_flow(size: str) -> Network:
    batch, features, width = (32, 6, 32) if size == "tiny" else (4096, 32, 512)
    model = _Flow(width, features)

    def init(key: jax.Array) -> Any:
        return model.init(key, jnp.zeros((2, features)))["params"]

    def loss(params: Any, batch: Any) -> jax.Array:
        return -jnp.mean(model.apply({"params": params}, batch["x"]))

    def sample(key: jax.Array) -> Any:
        return {"x": jax.random.normal(key, (batch, features))}

    return unswitched("spline_flow", size, loss, init, sample)
