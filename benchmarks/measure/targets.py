"""What programs are compiled for: this CPU, or an accelerator that need not be present.

A GPU target needs `jax-cuda12-plugin` and `jax-cuda12-pjrt`, a TPU target `libtpu`, all at the
versions that belong to the installed JAX; neither needs a driver or a device.
"""

import dataclasses
import importlib.util
import os
from typing import Any

import jax
from jax.experimental import topologies

from . import cudnn

# Values of XLA's own files in xla/backends/gpu/target_config/specs.
GPU_INFO = """
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: 0 }}
  core_count: {cores} fpus_per_core: {fpus} clock_rate_ghz: {clock} threads_per_warp: 32
  threads_per_block_limit: 1024 threads_per_core_limit: 2048
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {optin}
  shared_memory_per_core: {shared} block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: {bandwidth} l2_cache_size: {l2}
  device_memory_size: {memory}
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 8 }}
runtime_version {{ major: 12 minor: 8 }} device_description_str: "{description}"
"""
GPUS: dict[str, dict[str, Any]] = {
    "h100": {
        "major": 9,
        "cores": 132,
        "fpus": 128,
        "clock": 1.98,
        "optin": 232448,
        "shared": 233472,
        "bandwidth": 3352320000000,
        "l2": 52428800,
        "memory": 84942979072,
        "description": "NVIDIA H100 80GB HBM3",
    },
    "a100": {
        "major": 8,
        "cores": 108,
        "fpus": 64,
        "clock": 1.41,
        "optin": 166912,
        "shared": 167936,
        "bandwidth": 2039040000000,
        "l2": 41943040,
        "memory": 85100068864,
        "description": "NVIDIA A100-SXM4-80GB",
    },
}
TPUS = {"v5e": ("v5e:2x2", "v5litepod-4"), "v5p": ("v5p:2x2x1", "v5p-8")}
NAMES = ("cpu", *GPUS, *TPUS)


class UnavailableError(Exception):
    """The target cannot be compiled for here; the message says what is missing."""


@dataclasses.dataclass(frozen=True)
class Target:
    """A device to compile for."""

    name: str
    description: str
    device: Any

    def specs(self, tree: Any) -> Any:
        """Returns the tree's arrays or specs as specs of arrays on this device."""
        sharding = jax.sharding.SingleDeviceSharding(self.device)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
        )


def quiet_environment() -> None:
    """Keeps JAX to the CPU, and libtpu from looking for a TPU; call it before JAX's first use.

    For scripts that compile for what is not there, and time this CPU; `gpu.py` measures a GPU.
    """
    settings = {
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    jax.config.update("jax_platforms", "cpu")


def get_target(name: str) -> Target:
    """Returns the target of this name, or raises `UnavailableError`."""
    if name == "cpu":
        device = jax.devices("cpu")[0]
        return Target(name, "CPU, this machine", device)
    if name in GPUS:
        _need(name, "jax_plugins.xla_cuda12", "jax-cuda12-plugin jax-cuda12-pjrt")
        cudnn.assume()
        config = GPU_INFO.format(**GPUS[name])
        topology = topologies.get_topology_desc(
            "", platform="cuda", topology="1x1x1", target_config=config
        )
        return Target(name, GPUS[name]["description"] + ", ahead of time", topology.devices[0])
    if name in TPUS:
        _need(name, "libtpu", "libtpu")
        topology = topologies.get_topology_desc(TPUS[name][0], platform="tpu")
        return Target(name, f"TPU {name}, ahead of time", topology.devices[0])
    raise ValueError(f"target: unknown target {name!r}.\n  There are: {', '.join(NAMES)}.")


def _need(target: str, module: str, packages: str) -> None:
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise UnavailableError(f"{target}: pip install --no-deps {packages} (JAX's version)")
