"""The device that is measured: asked for by kind, never another in silence."""

import os
import platform
import shutil
import subprocess
import tempfile
from typing import Any

import jax
from measure import machine

KINDS = ("gpu", "cpu")
_PLATFORMS = {"gpu": "cuda,cpu", "cpu": "cpu"}  # the host's own beside a GPU: it has float64
_ASKED = ("name", "driver_version", "memory.total", "power.limit")
_CLOCKS = ("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw", "utilization.gpu")
_KEEPS = "--xla_gpu_per_fusion_autotune_cache_dir"
TRY_ON_A_CPU = "python benchmarks/gpu.py --device cpu --size tiny --out DIR"


class NoGpuError(Exception):
    """There is no GPU for JAX; the message says what to type."""


def start(kind: str) -> jax.Device:
    """Starts JAX on the kind of device that was asked for, and returns the device."""
    # Memory as it is needed: PyTorch takes its own from the same GPU.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", ".9")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    _remember_kernels()
    jax.config.update("jax_platforms", _PLATFORMS[kind])
    try:
        device = jax.devices()[0]
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise NoGpuError(_no_gpu(reason)) from error
    if device.platform != kind:
        raise NoGpuError(_no_gpu(f"its first device is {device}"))
    return device


def _remember_kernels() -> None:
    """Lets XLA keep on the disk which kernels were fastest, for the next process on this machine.

    Choosing them takes most of the time in which a program compiles. XLA checks no version: each
    version of JAX gets a folder of its own.
    """
    if _KEEPS in (flags := os.environ.get("XLA_FLAGS", "")):
        return
    folder = os.path.join(tempfile.gettempdir(), f"gpu_kernels_{jax.__version__}")
    os.makedirs(folder, exist_ok=True)
    os.environ["XLA_FLAGS"] = f"{flags} {_KEEPS}={folder}".lstrip()


def _flags() -> str:
    """Returns XLA's flags, without the folder, which only this machine has."""
    words = os.environ.get("XLA_FLAGS", "").split()
    return " ".join(f"{_KEEPS}=DIR" if word.startswith(_KEEPS) else word for word in words)


def _no_gpu(reason: str) -> str:
    driver = "works" if nvidia_smi(("name",)) else "is missing or shows no GPU"
    return (
        f"gpu.py: no GPU that JAX can use: {reason}.\n"
        f"  A GPU needs NVIDIA's driver (`nvidia-smi` {driver}) and JAX's plugin:\n"
        f"  pip install 'jax[cuda13]=={jax.__version__}'\n"
        f"  To try the script without a GPU: {TRY_ON_A_CPU}"
    )


def about(device: jax.Device) -> dict[str, Any]:
    """Returns what a run has to say about its device and programs."""
    return {
        "device": device.device_kind if device.platform != "cpu" else machine.cpu(),
        "platform_version": " ".join(device.client.platform_version.split()),
        "driver": nvidia_smi(_ASKED),
        "versions": machine.versions(),
        "commit": machine.commit(),
        "tree": machine.tree_hash("mpjax"),
        "host": f"{machine.cpu()}; {platform.platform()}",
        "xla_flags": _flags(),
    }


def clocks() -> dict[str, str]:
    """Returns the GPU's clocks, temperature and power now; nothing without NVIDIA's tool."""
    return nvidia_smi(_CLOCKS)


def nvidia_smi(fields: tuple[str, ...]) -> dict[str, str]:
    """Returns what NVIDIA's tool says of the first GPU; it is asked, and nothing is set."""
    if shutil.which("nvidia-smi") is None:
        return {}
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    done = subprocess.run([*command, "--id=0"], capture_output=True, text=True, check=False)
    values = done.stdout.strip().split(", ")
    return dict(zip(fields, values, strict=True)) if len(values) == len(fields) else {}
