"""How fast a mesh sends: links of a torus, rings, halves of a chip, hosts and slices.

The devices are stand-ins, numbered as libtpu numbers them; that libtpu's own are laid out so is
tested in test_pods_topology.py.
"""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from mpjax.pods import get_topology
from mpjax.pods._network import bandwidth, crossing

GB = 1e9


def mesh_of(name, num_slices=1, **axes):
    """Returns a topology, and a mesh of devices in the order of their coordinates."""
    topology = get_topology(name, num_slices=num_slices)
    cores = range(topology.chip.devices)
    places = itertools.product(range(num_slices), *map(range, topology.shape), cores)
    devices = [
        SimpleNamespace(slice_index=s, coords=coords, core_on_chip=core, process_index=coords[0])
        for s, *coords, core in places
    ]
    shaped = np.array(devices, dtype=object).reshape(tuple(axes.values()))
    return topology, SimpleNamespace(devices=shaped, axis_names=tuple(axes))


@pytest.mark.parametrize(
    ("name", "rings"),
    [
        ("v5e-16", (False, False)),
        ("v5e-256", (True, True)),
        ("v6e:8x16", (False, True)),
        ("v5p:2x2x4", (False, False, False)),
        ("tpu7x:4x8x8", (True, True, True)),
        ("8xh100", (False, False)),
    ],
)
def test_a_torus_is_closed_where_the_slice_is_whole(name, rings):
    assert get_topology(name).rings == rings


@pytest.mark.parametrize(
    ("name", "axes", "along", "links"),
    [
        # 16 chips of an open axis pair: the corner has one link to either side.
        ("v5e-16", {"fsdp": 16}, ["fsdp"], 2),
        ("v5e-256", {"fsdp": 256}, ["fsdp"], 4),
        ("v5e-256", {"data": 16, "fsdp": 16}, ["fsdp"], 2),
        ("v5e-256", {"data": 16, "fsdp": 16}, ["data", "fsdp"], 4),
        ("v6e-256", {"fsdp": 128, "tensor": 2}, ["tensor"], 1),
        ("v6e-256", {"fsdp": 32, "tensor": 8}, ["tensor"], 1),  # half of a ring is none
        ("v5p-128", {"fsdp": 64}, ["fsdp"], 6),
        ("v4-8", {"fsdp": 4}, ["fsdp"], 2),
        ("tpu7x-128", {"fsdp": 64, "tensor": 2}, ["fsdp"], 6),
        ("tpu7x-128", {"fsdp": 64, "tensor": 2}, ["tensor"], 6),  # the halves of a chip
    ],
)
def test_what_is_sent_takes_all_links_to_its_group(name, axes, along, links):
    topology, mesh = mesh_of(name, **axes)
    assert bandwidth(topology, mesh, along) == links * topology.chip.link_bandwidth


def test_links_are_those_of_the_vendors_pages():
    """Twice a chip's links, each way, are the bidirectional bandwidth that the pages state."""
    stated = {"v5e": 400, "v5p": 1200, "v6e": 800, "tpu7x": 1200 / 2}
    for key, gigabytes in stated.items():
        topology = get_topology(f"{key}:16x16" if key in ("v5e", "v6e") else f"{key}:4x4x4")
        links = 2 * len(topology.shape)
        assert 2 * links * topology.chip.link_bandwidth == gigabytes * GB, key


def test_hosts_and_slices_are_told_from_the_fast_network():
    topology, mesh = mesh_of("h100:8x8", data=8, fsdp=8)
    assert crossing(mesh, "process_index") == ("data",)
    assert bandwidth(topology, mesh, ["fsdp"]) == 450 * GB
    assert bandwidth(topology, mesh, ["data"]) == bandwidth(topology, mesh, []) == 50 * GB
    topology, mesh = mesh_of("gb200:36x4", rack=2, data=18, fsdp=4)  # two racks of NVLink
    assert bandwidth(topology, mesh, ["data", "fsdp"]) == 900 * GB
    assert bandwidth(topology, mesh, ["rack"]) == 50 * GB
    topology, mesh = mesh_of("v5e-16", num_slices=2, data=2, fsdp=16)
    assert crossing(mesh, "slice_index") == ("data",)
    assert bandwidth(topology, mesh, ["fsdp"]) == 100 * GB
    assert bandwidth(topology, mesh, ["data"]) == 25 / 8 * GB
