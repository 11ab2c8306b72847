"""Describes devices that are not here, to compile for, by means of each platform's compiler."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
from collections.abc import Generator, Sequence
from typing import Any

import jax
from jax.experimental import topologies

from mpjax._base.errors import message
from mpjax.pods._chips import GPU_TARGETS


def cpu_devices(count: int) -> tuple[Any, ...]:
    devices = jax.devices("cpu")
    if len(devices) < count:
        got = f"{count} virtual CPU devices were asked for; JAX started {len(devices)}."
        fix = f"Before the first use of JAX: jax.config.update('jax_num_cpu_devices', {count})."
        raise RuntimeError(message(f"topology 'cpu:{count}'", got, fix))
    return tuple(devices[:count])


def gpu_devices(name: str, key: str, shape: Sequence[int]) -> tuple[Any, ...]:
    """Returns GPUs of one kind, `shape` being hosts and GPUs a host."""
    _need(name, shape, "jax_plugins.xla_cuda12", "jax-cuda12-plugin", "jax-cuda12-pjrt")
    topology = topologies.get_topology_desc(
        "",
        platform="cuda",
        topology=f"1x{shape[0]}x{shape[1]}",
        target_config=GPU_TARGETS[key].text(),
    )
    return tuple(topology.devices)


def tpu_devices(name: str, key: str, shape: Sequence[int], num_slices: int) -> tuple[Any, ...]:
    """Returns the devices of TPU slices, `shape` being the chips of one."""
    _need(name, shape, "libtpu", "libtpu")
    options: dict[str, Any] = {}
    if key == "v4":
        options["chip_config_name"] = "megacore"  # JAX's own choice: a chip's two cores as one
    if num_slices > 1:
        options["num_slices"] = num_slices
    if max(shape) == 1:
        options["chips_per_host_bounds"] = [1] * 3
    with _libtpu_environment():
        text = f"{key}:{'x'.join(map(str, shape))}"
        return tuple(topologies.get_topology_desc(text, platform="tpu", **options).devices)


@contextlib.contextmanager
def _libtpu_environment() -> Generator[None]:
    """Keeps libtpu from looking for a TPU, and from locking others out, while it is loaded."""
    settings = {
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-16",  # any: without the two it warns that it has none
        "TPU_WORKER_HOSTNAMES": "localhost",
    }
    added = {key: value for key, value in settings.items() if key not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for key in added:
            del os.environ[key]


def _need(name: str, shape: Sequence[int], module: str, *packages: str) -> None:
    parent = module.partition(".")[0]
    if importlib.util.find_spec(parent) and importlib.util.find_spec(module):
        return
    if packages == ("libtpu",):
        install = "pip install 'jax[tpu]' (in a checkout of mpjax: pip install -e '.[tpu]')"
    else:
        install = f"pip install --no-deps {' '.join(f'{p}=={jax.__version__}' for p in packages)}"
    raise ModuleNotFoundError(
        message(
            f"topology {name!r}",
            f"its compiler, {packages[0]}, is not installed.",
            f"No accelerator is needed for it: {install}.",
            f"Without it, a topology such as 'cpu:{math.prod(shape)}' checks all but memory, speed "
            "and what the accelerator's own compiler does.",
        ),
        name=module,
    )
