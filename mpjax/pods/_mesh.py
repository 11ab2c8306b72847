"""Meshes of accelerators: axes laid along the torus of a TPU slice, slices on the first axis."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from mpjax._base.errors import message
from mpjax._base.keywords import names_keywords


@names_keywords()
def make_mesh(axes: Mapping[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """Returns a mesh of devices, for arrays that are laid out by `jit` or `shard_map`.

    It works as `jax.make_mesh`, with three additions. A size of -1 takes the remaining devices. An
    axis of the mesh may be a part of an axis of the torus (16 x 16 chips as 128 x 2), which
    `jax.make_mesh` refuses on all TPUs but v5e. Several TPU slices lie along the first axis, so
    only this axis crosses the slower network between them.

    Args:
      axes: the size of each axis by its name, the one that sends most last.
      devices: None for all of the job, `jax.devices()`.

    Raises:
      ValueError: the sizes do not multiply to the number of devices.
      TypeError: `axes` is not a mapping of whole numbers by name.

    Dtypes:
      None are concerned.

    Transforms:
      None: call it before the step is traced.

    Example:
      >>> dict(mpjax.pods.make_mesh({"data": 1, "fsdp": -1}, jax.devices()[:1]).shape)
      {'data': 1, 'fsdp': 1}
    """
    devices = jax.devices() if devices is None else devices
    sizes = axis_sizes(axes, len(devices), "devices")
    return Mesh(_arranged(sizes, devices), tuple(axes), axis_types=(AxisType.Auto,) * len(sizes))


def axis_sizes(axes: Any, count: int, whose: str) -> tuple[int, ...]:
    """Returns the sizes with -1 filled in; `whose` follows the number in the error's text."""
    if not isinstance(axes, Mapping) or not all(_is_axis(*axis) for axis in axes.items()):
        got = f"must be sizes by axis name; got {axes!r}."
        raise TypeError(message("make_mesh(axes)", got, "Type e.g. {'data': 1, 'fsdp': -1}."))
    sizes = tuple(filled(axes, count).values())
    if not sizes or min(sizes) < 1 or math.prod(sizes) != count:
        asked = " x ".join(f"{name}={size}" for name, size in axes.items()) or "no axes"
        got = f"a mesh of {asked} does not have the {count} {whose}."
        fix = f"Sizes multiply to {count}; one may be -1, e.g. {{'data': 1, 'fsdp': -1}}."
        raise ValueError(message("make_mesh(axes)", got, fix))
    return sizes


def filled(axes: Mapping[str, int], count: int) -> dict[str, int]:
    """Returns the axes, with one -1 replaced so that their product is `count`, if it can be."""
    free = [name for name, size in axes.items() if size == -1]
    rest = math.prod(size for size in axes.values() if size != -1)
    return {**axes, free[0]: count // rest} if len(free) == 1 and rest > 0 else dict(axes)


def _is_axis(name: Any, size: Any) -> bool:
    return isinstance(name, str) and isinstance(size, int) and not isinstance(size, bool)


def _arranged(sizes: tuple[int, ...], devices: Sequence[Any]) -> np.ndarray[Any, Any]:
    slices: dict[int, list[Any]] = {}
    for device in devices:
        slices.setdefault(getattr(device, "slice_index", 0), []).append(device)
    if devices[0].platform != "tpu" or sizes[0] % len(slices):
        return np.array(devices).reshape(sizes)
    parts = (sizes[0] // len(slices), *sizes[1:])
    return np.concatenate([_on_torus(parts, slices[number]) for number in sorted(slices)])


def _on_torus(sizes: tuple[int, ...], devices: Sequence[Any]) -> np.ndarray[Any, Any]:
    # Whole axes of the torus where the sizes allow it; parts of them only where they do not.
    return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
