"""Computes the bandwidth between devices of a mesh, from their links along its axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from mpjax.pods._topology import Topology

_ON_ONE_CHIP = 6.0
"""Two devices of one TPU7x chip: the link between its halves, in links of the torus."""


def bandwidth(topology: Topology, mesh: Mesh, axes: Sequence[str]) -> float:
    """Returns the bytes a second that a device can send to those along some axes of a mesh.

    It is an upper bound. Along an axis of a TPU slice's torus a device has a link to either side;
    collectives use both, and those of all axes at once. If the axis is no ring, the devices at its
    ends have one link, and the others wait for them.

    Args:
      topology: whose devices they are.
      mesh: of these devices.
      axes: over which is sent; none of them for all.
    """
    chip, group = topology.chip, _group(mesh, axes or mesh.axis_names)
    if chip.platform == "tpu":
        places = {getattr(device, "slice_index", 0) for device in group}
    else:  # NVLink may join the hosts of a rack
        places = {device.process_index // chip.linked_hosts for device in group}
    if len(places) > 1:
        return chip.network_bandwidth
    if chip.platform != "tpu":
        return chip.link_bandwidth
    coordinates = np.array([device.coords for device in group])
    links = sum(map(_links, topology.shape, topology.rings, coordinates.T))
    return chip.link_bandwidth * (links or _ON_ONE_CHIP)


def crossing(mesh: Mesh, place: str) -> tuple[str, ...]:
    """Returns the mesh axes whose devices are in several places: slices, or hosts."""
    return tuple(axis for axis in mesh.axis_names if _differ(_group(mesh, [axis]), place))


def _group(mesh: Mesh, axes: Sequence[str]) -> list[Any]:
    """Returns the devices that differ along some axes only, the first ones along the others."""
    chosen = tuple(slice(None) if name in axes else 0 for name in mesh.axis_names)
    return list(np.ravel(mesh.devices[chosen]))


def _differ(devices: Sequence[Any], place: str) -> bool:
    return len({getattr(device, place, 0) for device in devices}) > 1


def _links(size: int, ring: bool, places: np.ndarray[Any, Any]) -> int:
    """Returns the number of links that a device has to its group along one axis of the torus."""
    count = len(set(places.tolist()))
    return 0 if count == 1 else 2 if ring and count == size else 1
