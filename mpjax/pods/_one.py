"""Compiles for one accelerator that need not be here: for the doctor, which needs no pod."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax

from mpjax.pods._check import check
from mpjax.pods._chips import GPUS, TPUS
from mpjax.pods._topology import Topology, get_topology

Counted = tuple[int | None, int, float]  # bytes accessed, temporaries, seconds


def topology_of(accelerator: str) -> Topology | None:
    """Returns the smallest topology of an accelerator by its key, None where none is known."""
    for name, chip in (GPUS | TPUS).items():
        if chip.key == accelerator:
            if chip.platform == "cuda":
                return get_topology(f"1x{name}")
            return get_topology(f"{name}-1" if chip.axes == 2 else f"{name}-8")
    return None


def compiler_for(topology: Topology) -> Callable[[Callable[..., Any], Any], Counted]:
    """Returns a function that compiles `fun(args)` for one of the devices, and counts.

    Raises:
      ModuleNotFoundError: the compiler for this platform is not installed.
    """
    sharding = jax.sharding.SingleDeviceSharding(topology.devices[0])

    def compiled(fun: Callable[..., Any], args: Any) -> Counted:
        start = time.perf_counter()
        specs = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args
        )
        report = check(jax.jit(fun), (specs,), topology)
        seconds = time.perf_counter() - start
        temporaries = 0 if report.memory is None else report.memory.temporaries
        return report.hbm_bytes, temporaries, seconds

    return compiled
