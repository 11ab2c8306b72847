"""What is measured of a public model: errors against float64, and a step in float16."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from measure.errors import AS_WRITTEN, LOSS_SCALE, distance
from networks import Network

import mpjax

MOST_SKIPS = 24  # from 2¹⁵ down to where no scale helps
# Programs that run a few times: what they compute is the same, and they compile in two thirds.
QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def errors(loss: Any, network: Network, seeds: int) -> dict[str, list[float]]:
    """Returns |l − l64| / |l64| and ‖g − g64‖ / ‖g64‖ for each seed.

    Args:
      loss: a way to run the model.
      network: the model; its float64 form is the reference.
      seeds: how many sets of parameters and batches.
    """
    options = AS_WRITTEN | QUICKLY
    step = jax.jit(
        jax.value_and_grad(lambda p, b: loss(p, b) * LOSS_SCALE), compiler_options=options
    )
    of_loss: list[float] = []
    of_gradient: list[float] = []
    for seed, (true_loss, true_grads) in enumerate(references(network, seeds)):
        value, grads = step(*network.values(seed))
        grads = jax.tree.map(lambda g: g / LOSS_SCALE, grads)
        of_loss.append(abs(float(value) / LOSS_SCALE - true_loss) / abs(true_loss))
        of_gradient.append(distance(grads, true_grads))
    return {"loss_errors": of_loss, "gradient_errors": of_gradient}


@functools.cache
def references(network: Network, seeds: int) -> tuple[tuple[float, Any], ...]:
    """Returns for each seed the loss and the gradients of the same model in float64."""
    values = [network.values(seed) for seed in range(seeds)]
    with jax.enable_x64(True):
        step = jax.value_and_grad(network.written(jnp.float64))
        step = jax.jit(step, compiler_options=QUICKLY)
        found: list[tuple[float, Any]] = []
        for params, batch in values:
            loss, grads = step(jax.tree.map(lambda p: p.astype(jnp.float64), params), batch)
            found.append((float(loss), grads))
        return tuple(found)


def float16_step(network: Network) -> dict[str, Any]:
    """Returns how many steps in float16 were skipped before one was taken, and at what scale."""
    step = mpjax.make_train_step(network.loss, optax.adam(1e-4), "16-mixed")
    params, batch = network.values(0)
    state = step.init(params)
    for skips in range(MOST_SKIPS):
        state, metrics = step(state, batch)
        if int(metrics["skipped_steps"]) == skips:
            finite = all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(state.params))
            scale, loss = float(metrics["loss_scale"]), float(metrics["loss"])
            return {"skips": skips, "scale": scale, "loss": loss, "finite": finite}
    raise ArithmeticError(f"{MOST_SKIPS} steps in a row were skipped.")
