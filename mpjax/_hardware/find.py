"""Finds the row of the support table of a device, or of the name of a device that is not here."""

import functools
import itertools
import pathlib
import re
from typing import Protocol

import jax

from mpjax._base.errors import message, nearest
from mpjax._hardware.table import DTYPES, NO_ROW, SUPPORT, Accelerator


def _compact(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


# Names in use: models, jax.Device.device_kind ('TPU v5 lite'), gcloud ('v5litepod-16').
# Names are compared by their letters and digits only.
_ALSO = {
    "gpu": "cuda",
    "sm_52": "p100 gtx1080",
    "sm_70": "v100",
    "sm_75": "t4 rtx2080",
    "sm_80": "a100 a30",
    "sm_86": "a10 a10g a40 a6000 rtx3080 rtx3090",
    "sm_89": "l4 l40 l40s rtx4080 rtx4090",
    "sm_90": "h100 h200 h800 gh200",
    "sm_100": "b200 gb200",
    "sm_103": "b300 gb300",
    "sm_120": "rtx5080 rtx5090",
    "gfx908": "mi100",
    "gfx90a": "mi210 mi250 mi250x",
    "gfx942": "mi300 mi300a mi300x mi325x",
    "gfx950": "mi350x mi355x",
    "v2": "tpuv2",
    "v3": "tpuv3",
    "v4": "tpuv4",
    "v5e": "tpuv5e tpuv5lite v5lite v5litepod",
    "v5p": "tpuv5p tpuv5",
    "v6e": "tpuv6e tpuv6lite trillium",
    "v7x": "tpuv7x tpu7x tpuv7 ironwood",
}
_BY_NAME = {_compact(key): key for key in SUPPORT} | {
    name: key for key, names in _ALSO.items() for name in names.split()
}


class DeviceLike(Protocol):
    """The part of `jax.Device` that is read here; an ahead-of-time topology's devices have it."""

    @property
    def platform(self) -> str:
        """'cpu', 'gpu' or 'tpu'."""
        ...

    @property
    def device_kind(self) -> str:
        """The vendor's name for the device."""
        ...


def find_accelerator(device: DeviceLike | str | None = None, where: str = "device") -> Accelerator:
    """Returns the row of the table for a device, or for the name of one that need not be here.

    Args:
      device: a device; or a name such as 'v5e', 'v5litepod-16', 'h100', 'sm_90', 'gfx942' or
        'cpu' (the processor of this machine); None for `jax.devices()[0]`, which starts the
        backend if nothing did before.
      where: the function that was called, for the message.

    Returns:
      A row of `SUPPORT`. A device newer than its family's last row gets that row; one of a kind
      that the table does not know gets a row that says 'unknown' throughout.

    Raises:
      ValueError: `device` is a name that the table does not know; the message has the nearest.
      TypeError: it is neither a device nor a name.
    """
    if device is None:
        return _by_device(jax.devices()[0])
    if isinstance(device, str):
        return _by_name(device, where)
    if not hasattr(device, "platform"):
        raise TypeError(
            message(
                where,
                f"no device: {device!r}.",
                "Accepted: a jax.Device, a name such as 'v5e', 'a100' or 'cpu', or None.",
                "Type jax.devices()[0] for the first device of the default backend.",
            )
        )
    return _by_device(device)


def _by_device(device: DeviceLike) -> Accelerator:
    if device.platform == "cpu":
        return host_cpu()
    # "9.0" on NVIDIA, "gfx90a:sramecc+:xnack-" on AMD; TPUs have none.
    key = _search(str(getattr(device, "compute_capability", "") or device.device_kind))
    if key is None and device.platform == "tpu":
        key = "tpu"  # a generation that is not in the table yet
    if key is None:
        name = f"{device.platform} {device.device_kind}"
        return Accelerator("unknown", "unknown", name, *[NO_ROW] * len(DTYPES))
    return SUPPORT[key]


def _by_name(name: str, where: str) -> Accelerator:
    if _compact(name) == "cpu":
        return host_cpu()
    key = _search(name)
    if key is not None:
        return SUPPORT[key]
    close = nearest(name, [*SUPPORT, *" ".join(_ALSO.values()).split()])
    raise ValueError(
        message(
            where,
            f"unknown device {name!r}.",
            "Accepted: a jax.Device, or a name: 'cpu', 'tpu', 'v5e', 'a100', 'sm_90', 'gfx942'...",
            "`python -m mpjax table` lists all of them.",
            f"Did you mean {' or '.join(map(repr, close))}?" if close else "E.g. device='h100'.",
        )
    )


def _search(name: str) -> str | None:
    """Returns the name of the row for a device's name, None if no row has it."""
    text = name.split(":")[0]  # 'v5e:4x4' is a topology, 'v5litepod-16' a slice
    for whole in (text, re.sub(r"-\d+$", "", text)):
        key = _BY_NAME.get(_compact(whole)) or _nvidia_key(whole)
        if key is not None:
            return key
    words = re.findall(r"\w+", text)  # 'NVIDIA A100-SXM4-80GB', 'NVIDIA GeForce RTX 4090'
    for part in (*map("".join, itertools.pairwise(words)), *words):
        key = _BY_NAME.get(_compact(part), "")
        if key.startswith(("sm_", "gfx")):  # 'Xeon v4' is no TPU
            return key
    return None


def _nvidia_key(capability: str) -> str | None:
    """Returns the newest row that is not newer than '9.0', 'sm_90' or 'sm_90a'; None if none is."""
    match = re.fullmatch(r"(?:sm_?(\d+)(\d)|(\d+)\.(\d))[af]?", capability.lower())
    if match is None:
        return None
    asked = int("".join(part for part in match.groups() if part))
    older = [int(key[3:]) for key in SUPPORT if key.startswith("sm_") and int(key[3:]) <= asked]
    return f"sm_{max(older)}" if older else None


@functools.cache
def host_cpu() -> Accelerator:
    """Returns the row of this machine's processor; the plain one where Linux does not tell."""
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux: macOS and Windows have no such file
        text = ""
    return SUPPORT[cpu_key(text)]


def cpu_key(cpuinfo: str) -> str:
    """Returns the name of the row that the text of a `/proc/cpuinfo` calls for."""
    flags = set(re.findall(r"\b(amx_bf16|avx512_bf16)\b", cpuinfo))
    if "amx_bf16" in flags:
        return "cpu-amx"
    return "cpu-avx512-bf16" if flags else "cpu-plain"
