"""A Bayesian network in numpyro: the log density of its weights and of the data."""

from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from networks import Network
from numpyro.infer.util import log_density

from ._written import unswitched


def bayesian_network(size: str) -> Network:
    rows, features, width = (64, 8, 32) if size == "tiny" else (16384, 128, 1024)
    shapes = {"w1": (features, width), "w2": (width, width), "w3": (width, 1)}

    def model(x: jax.Array, y: jax.Array) -> None:
        hidden = x
        for name, shape in shapes.items():
            scale = shape[0] ** -0.5
            w = numpyro.sample(name, dist.Normal(0.0, scale).expand(shape).to_event(2))
            hidden = hidden @ w
            hidden = hidden if name == "w3" else jnp.tanh(hidden)
        noise = numpyro.sample("noise", dist.LogNormal(0.0, 1.0))
        with numpyro.plate("rows", len(x)):
            numpyro.sample("y", dist.Normal(hidden[:, 0], noise), obs=y)

    def loss(params: Any, batch: Any) -> jax.Array:
        return -log_density(model, (batch["x"], batch["y"]), {}, params)[0] / rows

    def init(key: jax.Array) -> Any:
        keys = jax.random.split(key, len(shapes))
        pairs = zip(shapes.items(), keys, strict=True)
        weights = {n: jax.random.normal(k, s) * s[0] ** -0.5 for (n, s), k in pairs}
        return {**weights, "noise": jnp.float32(0.7)}

    def sample(key: jax.Array) -> Any:
        k1, k2 = jax.random.split(key)
        return {"x": jax.random.normal(k1, (rows, features)), "y": jax.random.normal(k2, (rows,))}

    return unswitched("bayes", size, loss, init, sample)
