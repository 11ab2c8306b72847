"""A neural ODE: diffrax's solver around a network of Equinox."""

from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
from networks import Network

from ._written import mean_square, unswitched


def neural_ode(size: str) -> Network:
    batch, state, width = (16, 8, 32) if size == "tiny" else (1024, 64, 512)

    def model(key: jax.Array) -> Any:
        return eqx.nn.MLP(state, state, width, 2, jax.nn.softplus, key=key)

    def init(key: jax.Array) -> Any:
        return eqx.filter(model(key), eqx.is_inexact_array)

    def loss(params: Any, batch: Any) -> jax.Array:
        shapes = eqx.filter_eval_shape(model, jax.random.key(0))
        field = eqx.combine(params, eqx.filter(shapes, lambda x: not hasattr(x, "dtype")))

        def solve(start: jax.Array) -> jax.Array:
            return diffrax.diffeqsolve(
                diffrax.ODETerm(lambda t, y, args: field(y)),
                diffrax.Tsit5(),
                t0=0.0,
                t1=1.0,
                dt0=0.125,
                y0=start,
                saveat=diffrax.SaveAt(ts=jnp.linspace(0.0, 1.0, 5)),
                max_steps=16,
            ).ys

        return mean_square(jax.vmap(solve)(batch["x"]), batch["y"], batch["x"].dtype)

    def sample(key: jax.Array) -> Any:
        k1, k2 = jax.random.split(key)
        x = jax.random.normal(k1, (batch, state))
        return {"x": x, "y": jax.random.normal(k2, (batch, 5, state))}

    return unswitched("ode", size, loss, init, sample)
