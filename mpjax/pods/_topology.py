"""The TPU slices and GPU clusters that people rent, by the names they know."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh

from mpjax._base.dtypes import describe
from mpjax._base.errors import message, nearest
from mpjax._base.keywords import names_keywords
from mpjax.pods._chips import CPU, GPUS, TPUS, Chip
from mpjax.pods._devices import cpu_devices, gpu_devices, tpu_devices
from mpjax.pods._mesh import axis_sizes, make_mesh

_TPU_NAMES = {name: key for key, chip in TPUS.items() for name in (key, *chip.aliases)}
_CHIPS_PER_HOST = 4
_GPU_NAME = rf"(?:(\d+)x)?({'|'.join(GPUS)})(?:[a-z0-9\-]*?[:\-](\d+)(?:x(\d+))?)?"
_NO_SLICE = rf"\d*x?(?:cpu|{'|'.join(GPUS)})"

# Chips of a slice → its shape, for names that give the number only.
_SHAPES_2D = {
    1: (1, 1),
    4: (2, 2),
    8: (2, 4),
    16: (4, 4),
    32: (4, 8),
    64: (8, 8),
    128: (8, 16),
    256: (16, 16),
}
_SHAPES_3D = {
    4: (2, 2, 1),
    8: (2, 2, 2),
    16: (2, 2, 4),
    32: (2, 4, 4),
    64: (4, 4, 4),
    128: (4, 4, 8),
    256: (4, 8, 8),
    512: (8, 8, 8),
    768: (8, 8, 12),
    1024: (8, 8, 16),
    1536: (8, 12, 16),
    2048: (8, 16, 16),
    3072: (12, 16, 16),
    4096: (16, 16, 16),
    6144: (16, 16, 24),
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """Devices that need not be here: a TPU slice, GPUs, or virtual CPU devices.

    Attributes:
      name: as it was asked for, 'v5e-256'.
      chip: the peaks of one device.
      shape: chips of a TPU slice by axis; hosts and devices a host otherwise.
      num_slices: TPU slices that a slower network connects.
    """

    name: str
    chip: Chip
    shape: tuple[int, ...]
    num_slices: int = 1

    @property
    def num_devices(self) -> int:
        """The number of devices that JAX sees."""
        return math.prod(self.shape) * self.chip.devices * self.num_slices

    @property
    def num_hosts(self) -> int:
        """The number of machines, and so of processes, that drive them."""
        if self.chip.platform != "tpu":
            return self.shape[0]
        return max(1, math.prod(self.shape) // _CHIPS_PER_HOST) * self.num_slices

    @property
    def rings(self) -> tuple[bool, ...]:
        """The axes of a TPU slice that are closed: the last chip has a link to the first.

        Those of 16 chips on v5e and v6e; all of the others in slices of whole cubes, 4x4x4.
        """
        if self.chip.platform != "tpu":
            return (False,) * len(self.shape)
        whole = len(self.shape) == 3 and all(size % 4 == 0 for size in self.shape)
        return tuple(whole or size == 16 for size in self.shape)

    @functools.cached_property
    def devices(self) -> tuple[Any, ...]:
        """The devices, to build a mesh of. Programs can be compiled for them, not run.

        Raises:
          ModuleNotFoundError: the compiler for this platform is not installed.
          RuntimeError: fewer virtual CPU devices were started than 'cpu:N' asks for.
        """
        if self.chip.platform == "cpu":
            return cpu_devices(self.num_devices)
        if self.chip.platform == "cuda":
            return gpu_devices(self.name, self._key, self.shape)
        return tpu_devices(self.name, self._key, self.shape, self.num_slices)

    @property
    def _key(self) -> str:
        return next(key for key, chip in (TPUS | GPUS).items() if chip is self.chip)

    def make_mesh(self, axes: Mapping[str, int]) -> Mesh:
        """Returns a mesh of these devices, as `mpjax.pods.make_mesh` arranges them.

        Args:
          axes: the size of each axis by its name; one of them may be -1, for what is left.

        Raises:
          ValueError: the sizes do not multiply to the number of devices.

        Example:
          >>> dict(mpjax.pods.get_topology("cpu:1").make_mesh({"fsdp": -1}).shape)
          {'fsdp': 1}
        """
        axis_sizes(axes, self.num_devices, f"devices of {self.name!r}")
        return make_mesh(axes, self.devices)

    def __str__(self) -> str:
        slices = f"{self.num_slices} x " if self.num_slices > 1 else ""
        shape = "x".join(map(str, self.shape))
        hosts = f"{self.num_hosts} host{'s' if self.num_hosts > 1 else ''}"
        return (
            f"{self.name} ({slices}{self.chip.name} {shape}: {self.num_devices} devices, {hosts})"
        )


@names_keywords()
def get_topology(name: str | Topology, *, num_slices: int = 1) -> Topology:
    """Returns the devices of a topology by its name; it loads no compiler yet.

    Args:
      name: a TPU slice as gcloud and XPK call it ('v5e-256', 'v5litepod-16', 'v5p-128', 'v6e-64',
        'v4-8', 'tpu7x-128': v4, v5p and tpu7x count TensorCores, two a chip) or by its shape
        ('v5e:16x16', 'v5p:4x4x8'); GPUs ('h100', '8xh100', 'h100-64', or hosts and GPUs a host:
        'a100:2x8'; 'b200', and 'gb200' with four a host); 'cpu:8', virtual CPU devices, which need
        no compiler that JAX has not.
      num_slices: TPU slices over which the job runs.

    Raises:
      ValueError: the name is unknown, or no slice has that size; the message has the nearest. Or
        `num_slices` is more than 1 and the devices are no TPUs.
      TypeError: `name` is no string, or `num_slices` no whole number.

    Example:
      >>> print(mpjax.pods.get_topology("v5e-256"))
      v5e-256 (TPU v5e 16x16: 256 devices, 64 hosts)
      >>> mpjax.pods.get_topology("v5p-128").shape
      (4, 4, 4)
    """
    _check_slices(name, num_slices)
    if isinstance(name, Topology):
        return name
    text = name.lower().strip()
    if match := re.fullmatch(r"cpu(?:[:\-]([1-9]\d*))?", text):
        return Topology(name, CPU, (1, int(match[1] or 1)))
    if match := re.fullmatch(_GPU_NAME, text):
        return _gpu_topology(name, match)
    match = re.fullmatch(r"([a-z0-9]+?)(?:-(\d+)|:(\d+(?:x\d+)+))", text)
    if match is None or match[1] not in _TPU_NAMES:
        raise ValueError(_unknown(name))
    key = _TPU_NAMES[match[1]]
    shape = _tpu_shape(name, key, match[2], match[3])
    return Topology(name, TPUS[key], shape, num_slices)


def _check_slices(name: Any, num_slices: Any) -> None:
    where = "get_topology"
    if not isinstance(name, str | Topology):
        got = f"a topology is a name; got {describe(name)}."
        raise TypeError(message(where, got, "Type e.g. 'v5e-256', '8xh100' or 'cpu:8'."))
    if not isinstance(num_slices, int) or isinstance(num_slices, bool):
        got = f"num_slices must be a whole number; got {num_slices!r}."
        raise TypeError(message(where, got, "Leave it out for one slice."))
    if num_slices < 1:
        got = f"num_slices must be at least 1; got {num_slices}."
        raise ValueError(message(where, got, "Leave it out for one slice."))
    if num_slices == 1:
        return
    if isinstance(name, Topology) and name.num_slices != num_slices:
        got = f"num_slices={num_slices} for a topology that has {name.num_slices}."
        fix = f"Type get_topology({name.name!r}, num_slices={num_slices})."
        raise ValueError(message(where, got, fix))
    if isinstance(name, str) and re.match(_NO_SLICE, name.lower().strip()):
        got = f"num_slices={num_slices}, but {name!r} is no TPU slice."
        fix = "GPUs on several hosts are one topology: 'h100:2x8', hosts and GPUs a host."
        raise ValueError(message(where, got, fix))


def _gpu_topology(name: str, match: re.Match[str]) -> Topology:
    times, key, first, second = match.groups()
    if second is not None:
        hosts, local = int(first), int(second)
    else:
        count = int(times or first or 1)
        each = GPUS[key].per_host
        hosts, local = max(1, count // each), min(count, each)
        if hosts * local != count or count == 0:
            got = f"{count} GPUs are not whole hosts of {each}."
            fix = f"Type hosts and GPUs a host, e.g. '{key}:2x4'."
            raise ValueError(message(f"get_topology({name!r})", got, fix))
    return Topology(name, GPUS[key], (hosts, local))


def _tpu_shape(name: str, key: str, count: str | None, shape: str | None) -> tuple[int, ...]:
    flat = TPUS[key].axes == 2
    shapes = _SHAPES_2D if flat else _SHAPES_3D
    where = f"get_topology({name!r})"
    if shape is not None:
        dims = tuple(int(n) for n in shape.split("x"))
        wanted = TPUS[key].axes
        whole = math.prod(dims) == 1 or (all(n % 2 == 0 for n in dims[:2]) and min(dims) > 0)
        if len(dims) != wanted or not whole:
            example = "v5e:4x4" if flat else f"{key}:4x4x4"
            got = f"no slice of {key} has the shape {shape}."
            allowed = (
                f"It has {wanted} axes; a host is 2 x 2 chips, so that the first two are even."
            )
            raise ValueError(message(where, got, allowed, f"Type e.g. {example!r}."))
        return dims
    per_chip = TPUS[key].counted
    chips, rest = divmod(int(count or 0), per_chip)
    if rest or chips not in shapes:
        known = [n * per_chip for n in shapes]
        near = sorted(known, key=lambda n: abs(n - int(count or 0)))[:2]
        unit = "TensorCores, two a chip" if per_chip == 2 else "chips"
        got = f"no slice of {key} has {count} {unit}."
        allowed = f"There are {', '.join(f'{key}-{n}' for n in known)}."
        names = " or ".join(repr(f"{key}-{n}") for n in sorted(near))
        fix = f"Did you mean {names}? A shape works too, e.g. '{key}:{_text(shapes[max(shapes)])}'."
        raise ValueError(message(where, got, allowed, fix))
    return shapes[chips]


def _text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _unknown(name: str) -> str:
    examples = [
        f"{name}-{n * TPUS[key].counted}"
        for name, key in _TPU_NAMES.items()
        for n in (_SHAPES_2D if TPUS[key].axes == 2 else _SHAPES_3D)
    ]
    examples += [*GPUS, "8xh100", "h100-8", "h100-64", "8xa100", "a100-8", "cpu:8"]
    close = nearest(name, examples)
    return message(
        "get_topology",
        f"unknown topology {name!r}.",
        f"TPUs: {', '.join(TPUS)}, as in 'v5e-256' or 'v5e:16x16'.",
        f"GPUs: {', '.join(GPUS)}, as in 'h100', '8xh100', 'h100:8x8'. Neither: 'cpu:8'.",
        f"Did you mean {' or '.join(map(repr, close))}?" if close else "Type e.g. 'v5e-16'.",
    )
