"""How far gradients are from a float64 reference."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from .elsewhere import lowered_for
from .variants import Loss

# The loss is multiplied before, the gradients divided after, as in training with float16: a power
# of two, so that it rounds nothing; without it most float16 cotangents would be subnormal.
LOSS_SCALE = 2.0**10


# XLA:CPU computes 16-bit convolutions in float32 and then, by default, leaves out the roundings
# around them: what an accelerator rounds would go unmeasured.
AS_WRITTEN = {"xla_allow_excess_precision": False}


def gradient_errors(loss: Loss, network: Any, platform: str, seeds: int) -> list[float]:
    """Returns ‖g − g64‖ / ‖g64‖ over all parameters, for each seed.

    Args:
      loss: a way to run the network.
      network: what is differentiated.
      platform: whose program it is that runs here.
      seeds: how many sets of parameters and batches.
    """
    gradient = jax.grad(lambda p, b: loss(p, b) * LOSS_SCALE)
    lowered = lowered_for(platform, gradient, *network.values(0))
    scaled = jax.jit(lowered, compiler_options=AS_WRITTEN)
    errors: list[float] = []
    for seed, exact in enumerate(references(network, seeds)):
        grads = jax.tree.map(lambda g: g / LOSS_SCALE, scaled(*network.values(seed)))
        errors.append(distance(grads, exact))
    return errors


@functools.cache
def references(network: Any, seeds: int) -> tuple[Any, ...]:
    """Returns for each seed the gradients of the same definition, written in float64."""
    values = [network.values(seed) for seed in range(seeds)]
    with jax.enable_x64(True):
        differentiate = jax.jit(jax.grad(network.written(jnp.float64)))
        return tuple(
            differentiate(jax.tree.map(lambda p: p.astype(jnp.float64), params), batch)
            for params, batch in values
        )


def distance(grads: Any, exact: Any) -> float:
    """Returns ‖g − e‖ / ‖e‖ over two trees."""
    with jax.enable_x64(True):
        differences = jax.tree.map(lambda g, e: g.astype(jnp.float64) - e, grads, exact)
        return float(_norm(differences) / _norm(exact))


def _norm(tree: Any) -> jax.Array:
    return jnp.sqrt(sum(jnp.vdot(x, x) for x in jax.tree.leaves(tree)))
