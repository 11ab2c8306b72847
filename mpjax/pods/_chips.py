"""The table of chips: products a second, memory, bandwidth, links. Numbers are peaks.

They bound a step's time from below; no program reaches all of them. Where each comes from, and when
it was read ("2026": when the row was written; "11/2026": compared with stored copies of the page in
November 2026; without a date: none was kept):

| chip    | bf16 products      | HBM bandwidth      | links              | network            |
| ------- | ------------------ | ------------------ | ------------------ | ------------------ |
| v4      | "TPU v4", 2026     | "TPU v4", 2026     | Jouppi et al. 2023 | that of v5p        |
| v5e     | "TPU v5e", 11/2026 | "TPU v5e", 11/2026 | "TPU v5e", 11/2026 | its pod's / 256    |
| v5p     | "TPU v5p", 2026    | "TPU v5p", 2026    | "TPU v5p", 2026    | "TPU v5p", 2026    |
| v6e     | "TPU v6e", 11/2026 | "TPU v6e", 11/2026 | "TPU v6e", 11/2026 | "TPU v6e", 2026    |
| tpu7x   | "TPU7x", 2026      | "TPU7x", 2026      | "TPU7x", 2026      | "TPU7x", 2026      |
| a100    | "A100 80GB SXM"    | XLA's description  | "A100 80GB SXM"    | "DGX A100"         |
| h100    | "H100 SXM"         | XLA's description  | "H100 SXM"         | "DGX H100"         |
| b200    | "DGX B200", 2026   | XLA's description  | "DGX B200", 2026   | "DGX B200", 2026   |
| gb200   | "GB200 NVL72" 2026 | XLA's description  | "GB200 NVL72" 2026 | "GB200 NVL72" 2026 |

* TPU: the pages of Google Cloud's documentation, a chip each: peak compute, HBM bandwidth,
  bidirectional inter-chip bandwidth and data center network bandwidth per chip, or per pod of 256.
  Versions of v5e's page differ: 819 GB/s, or 800 GiB/s, which are 859; the first is taken. A chip
  has two links on each axis of its torus, so that one link carries in one direction a quarter of
  the bandwidth in both, divided by the axes: 50 GB/s on v5e, 100 GB/s on v5p, v6e and TPU7x. v4's
  page is silent; "TPU v4: An Optically Reconfigurable Supercomputer" (Jouppi et al., 2023) has 6
  links of 50 GB/s. Its network between slices is nowhere stated. "How to Scale Your Model" (JAX ML,
  2025) reckons with 45 and 90 GB/s a link, as programs reach. Memory: what libtpu 0.0.50 lets a
  program use, which is less than the chip has. Float32 products: the compiler's cycles for 4096 x
  4096 x 4096.
* NVIDIA: the data sheets of the table: dense products (TF32 for float32), which are half of the
  sparse ones where only these are stated; NVLink 600, 900 and 1800 GB/s in both directions
  together; a network port of 200 or 400 Gbit/s a GPU; 18 hosts of four GPUs share the NVLink of a
  GB200's rack. Memory, its bandwidth and what the compiler must know of the four are XLA's own
  descriptions of them. JAX takes 75 % of a GPU's memory unless XLA_PYTHON_CLIENT_MEM_FRACTION says
  otherwise.
"""

from __future__ import annotations

import dataclasses
from typing import Any

GIB = 1 << 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """The peaks of one device in JAX's sense: half a chip on TPU7x."""

    key: str  # as in `mpjax table`: 'v5e', 'sm_90'
    name: str
    platform: str  # 'tpu', 'cuda' or 'cpu'
    dense_flops: float  # a second, bfloat16 operands
    float32_flops: float  # at JAX's default precision: rounded to bfloat16 (TPU) or TF32 (GPU)
    hbm_bytes: int  # that a program may use
    hbm_bandwidth: float  # bytes a second
    link_bandwidth: float  # bytes a second, sent over one link of a torus, or over all of NVLink
    network_bandwidth: float  # bytes a second and device between hosts or slices
    link: str  # 'ICI' or 'NVLink'
    per_host: int = 8  # GPUs of one host, where a name gives their number only
    linked_hosts: int = 1  # hosts whose GPUs NVLink joins: 18 in a rack of GB200 NVL72
    axes: int = 1  # of a TPU slice's torus: 2 or 3
    devices: int = 1  # that JAX sees on one chip
    counted: int = 1  # of what a TPU slice's name counts, on one chip: 2 TensorCores, or itself
    aliases: tuple[str, ...] = ()  # other names of gcloud, XPK and libtpu


def _tpu(
    name: str,
    tflops: float,
    f32_ratio: float,
    hbm_gib: float,
    hbm_gb: float,
    link_gb: float,
    network_gbit: float,
    **named: Any,
) -> Chip:
    return Chip(
        key=named.pop("key", name),
        name=f"TPU {name}",
        platform="tpu",
        dense_flops=tflops * 1e12,
        float32_flops=tflops * 1e12 / f32_ratio,
        hbm_bytes=round(hbm_gib * GIB),
        hbm_bandwidth=hbm_gb * 1e9,
        link_bandwidth=link_gb * 1e9,
        network_bandwidth=network_gbit * 1e9 / 8,
        link="ICI",
        **named,
    )


_CUBE = {"axes": 3, "counted": 2}  # names count TensorCores, two a chip
_FLAT = {"axes": 2}

# name, bf16 TFLOP/s, f32 is slower by, GiB a program may use, HBM GB/s, GB/s a link, network Gbit/s
TPUS = {
    "v4": _tpu("v4", 275, 1.03, 30.75, 1200, 50, 50, **_CUBE),
    "v5e": _tpu("v5e", 197, 1.02, 15.75, 819, 50, 25, **_FLAT, aliases=("v5litepod", "v5lite")),
    "v5p": _tpu("v5p", 459, 1.57, 95.74, 2765, 100, 50, **_CUBE),
    "v6e": _tpu("v6e", 918, 1.06, 31.25, 1638, 100, 100, **_FLAT),
    # A device is one of the chip's two halves, with half of everything.
    "tpu7x": _tpu(
        *("tpu7x", 1153.5, 1.78, 94.75, 3690, 50, 50),
        **_CUBE,
        key="v7x",
        devices=2,
        aliases=("v7x",),
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuTarget:
    """XLA's description of a GPU, to compile for it (`GpuTargetConfigProto`)."""

    capability: int
    cores: int
    fpus_per_core: int
    clock_ghz: float
    shared_per_block: int
    shared_per_core: int
    bandwidth: int
    l2_bytes: int
    memory_bytes: int
    description: str

    def text(self) -> str:
        """Returns the description in protobuf's text form."""
        device = {
            "core_count": self.cores,
            "fpus_per_core": self.fpus_per_core,
            "clock_rate_ghz": self.clock_ghz,
            "threads_per_warp": 32,
            "threads_per_block_limit": 1024,
            "threads_per_core_limit": 2048,
            "registers_per_core_limit": 65536,
            "registers_per_block_limit": 65536,
            "shared_memory_per_block": 49152,
            "shared_memory_per_block_optin": self.shared_per_block,
            "shared_memory_per_core": self.shared_per_core,
            "block_dim_limit_x": 2147483647,
            "block_dim_limit_y": 65535,
            "block_dim_limit_z": 65535,
            "memory_bandwidth": self.bandwidth,
            "l2_cache_size": self.l2_bytes,
            "device_memory_size": self.memory_bytes,
        }
        fields = " ".join(f"{key}: {value}" for key, value in device.items())
        capability = f"cuda_compute_capability {{ major: {self.capability} minor: 0 }}"
        return (
            f"gpu_device_info {{ {capability} {fields} }}\n"
            'platform_name: "CUDA"\ndnn_version_info { major: 9 minor: 8 }\n'
            "runtime_version { major: 12 minor: 8 }\n"
            f'device_description_str: "{self.description}"\n'
        )


GPU_TARGETS = {
    "a100": GpuTarget(
        capability=8,
        cores=108,
        fpus_per_core=64,
        clock_ghz=1.41,
        shared_per_block=166912,
        shared_per_core=167936,
        bandwidth=2039040000000,
        l2_bytes=41943040,
        memory_bytes=85100068864,
        description="NVIDIA A100-SXM4-80GB",
    ),
    "h100": GpuTarget(
        capability=9,
        cores=132,
        fpus_per_core=128,
        clock_ghz=1.98,
        shared_per_block=232448,
        shared_per_core=233472,
        bandwidth=3352320000000,
        l2_bytes=52428800,
        memory_bytes=84942979072,
        description="NVIDIA H100 80GB HBM3",
    ),
    "b200": GpuTarget(
        capability=10,
        cores=148,
        fpus_per_core=128,
        clock_ghz=1.965,
        shared_per_block=232448,
        shared_per_core=233472,
        bandwidth=7672320000000,
        l2_bytes=132644864,
        memory_bytes=191514411008,
        description="NVIDIA B200",
    ),
    "gb200": GpuTarget(
        capability=10,
        cores=152,
        fpus_per_core=128,
        clock_ghz=2.062,
        shared_per_block=232448,
        shared_per_core=233472,
        bandwidth=7928064000000,
        l2_bytes=135528448,
        memory_bytes=197897748480,
        description="NVIDIA GB200",
    ),
}


def _gpu(
    key: str,
    sm: str,
    tflops: float,
    nvlink_gb: float,
    network_gb: float,
    per_host: int = 8,
    linked_hosts: int = 1,
) -> Chip:
    target = GPU_TARGETS[key]
    return Chip(
        key=sm,
        name=target.description,
        platform="cuda",
        dense_flops=tflops * 1e12,
        float32_flops=tflops * 1e12 / 2,  # TF32
        hbm_bytes=target.memory_bytes,
        hbm_bandwidth=float(target.bandwidth),
        link_bandwidth=nvlink_gb * 1e9 / 2,
        network_bandwidth=network_gb * 1e9,
        link="NVLink",
        per_host=per_host,
        linked_hosts=linked_hosts,
    )


GPUS = {
    "a100": _gpu("a100", "sm_80", 312, 600, 25),
    "h100": _gpu("h100", "sm_90", 989, 900, 50),
    "b200": _gpu("b200", "sm_100", 2250, 1800, 50),
    "gb200": _gpu("gb200", "sm_100", 2500, 1800, 50, per_host=4, linked_hosts=18),
}

# For a look at a program without the compilers above; its speed is not known.
CPU = Chip(
    key="cpu",
    name="virtual CPU devices",
    platform="cpu",
    dense_flops=0.0,
    float32_flops=0.0,
    hbm_bytes=0,
    hbm_bandwidth=0.0,
    link_bandwidth=0.0,
    network_bandwidth=0.0,
    link="memory",
)
