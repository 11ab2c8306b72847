"""Real time of gradient steps on the device at hand, variants taking turns."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

Step = Callable[[], float]  # runs once and returns its seconds


def jax_step(value_and_grad: Callable[..., Any], network: Any) -> Step:
    """Returns a step of loss and gradients, compiled."""
    params, batch = network.values()
    differentiate = jax.jit(value_and_grad)

    def step() -> float:
        start = time.perf_counter()
        jax.block_until_ready(differentiate(params, batch))
        return time.perf_counter() - start

    return step


def interleaved(steps: dict[str, Step], rounds: int) -> dict[str, float]:
    """Returns each variant's median seconds a step.

    The variants take turns within every round, so that whatever else the machine does meets all
    of them alike: read the ratios, not the seconds.
    """
    for step in steps.values():
        step(), step()  # compiled, and warm
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            seconds[name].append(step())
    return {name: statistics.median(found) for name, found in seconds.items()}
