"""Real time of gradient steps on the device at hand, variants taking turns."""

import statistics
import time
from typing import Any

import jax

from .variants import Loss


def interleaved(losses: dict[str, Loss], network: Any, rounds: int) -> dict[str, float]:
    """Returns each variant's median seconds a step: loss and gradients, compiled.

    The variants take turns within every round, so that whatever else the machine does meets all
    of them alike: read the ratios, not the seconds.
    """
    params, batch = network.values()
    steps = {name: jax.jit(jax.value_and_grad(loss)) for name, loss in losses.items()}
    for step in steps.values():
        jax.block_until_ready(step(params, batch))  # compiled, and warm
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            jax.block_until_ready(step(params, batch))
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(found) for name, found in seconds.items()}
