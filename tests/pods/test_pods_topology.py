"""Names of slices and clusters: what people call them, and what is said to a wrong one."""

import jax
import pytest

from mpjax.pods import Topology, get_topology, make_mesh
from mpjax.pods import _devices as devices_of
from mpjax.pods._chips import GPU_TARGETS, GPUS, TPUS
from mpjax.pods._network import bandwidth


@pytest.mark.parametrize(
    ("name", "shape", "devices", "hosts"),
    [
        ("v5e-16", (4, 4), 16, 4),
        ("v5litepod-256", (16, 16), 256, 64),
        ("v5e:4x8", (4, 8), 32, 8),
        ("v4-8", (2, 2, 1), 4, 1),  # TensorCores, two a chip
        ("v5p-128", (4, 4, 4), 64, 16),
        ("v5p:4x4x8", (4, 4, 8), 128, 32),
        ("tpu7x-128", (4, 4, 4), 128, 16),  # a chip is two devices
        ("TPU7x:2x2x1", (2, 2, 1), 8, 1),
        ("h100", (1, 1), 1, 1),
        ("8xh100", (1, 8), 8, 1),
        ("h100-64", (8, 8), 64, 8),
        ("gb200-72", (18, 4), 72, 18),
        ("h100-mega-80gb-8", (1, 8), 8, 1),
        ("a100:2x4", (2, 4), 8, 2),
        ("cpu", (1, 1), 1, 1),
        ("cpu:8", (1, 8), 8, 1),
    ],
)
def test_names_that_people_use(name, shape, devices, hosts):
    topology = get_topology(name)
    assert (topology.shape, topology.num_devices, topology.num_hosts) == (shape, devices, hosts)
    assert get_topology(topology) is topology


def test_slices_multiply_devices_and_hosts():
    topology = get_topology("v5e-256", num_slices=2)
    assert (topology.num_devices, topology.num_hosts) == (512, 128)
    assert str(topology) == "v5e-256 (2 x TPU v5e 16x16: 512 devices, 128 hosts)"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("v5e256", r"unknown topology 'v5e256'(.|\n)*Did you mean 'v5e-256'"),
        ("v7-8", r"unknown topology 'v7-8'(.|\n)*TPUs: v4, v5e"),
        ("h200-8", r"unknown topology 'h200-8'(.|\n)*'h100-8'"),
        ("", r"unknown topology ''(.|\n)*Type e.g. 'v5e-16'"),
        ("v5e-100", r"no slice of v5e has 100 chips(.|\n)*Did you mean 'v5e-64' or 'v5e-128'"),
        ("v5p-9", r"no slice of v5p has 9 TensorCores, two a chip(.|\n)*'v5p-8' or 'v5p-16'"),
        ("v5e:3x3", r"no slice of v5e has the shape 3x3(.|\n)*Type e.g. 'v5e:4x4'"),
        ("v5p:4x4", r"no slice of v5p has the shape 4x4\.(.|\n)*3 axes"),
        ("cpu:0", r"unknown topology 'cpu:0'(.|\n)*'cpu:8'"),
        ("h100-12", r"12 GPUs are not whole hosts of 8(.|\n)*'h100:2x4'"),
    ],
)
def test_a_wrong_name_is_an_error_with_the_nearest(name, said):
    with pytest.raises(ValueError, match=said):
        get_topology(name)


@pytest.mark.parametrize(
    ("name", "count", "error", "said"),
    [
        ("v5e-16", 0, ValueError, "num_slices must be at least 1; got 0"),
        ("v5e-16", 1.5, TypeError, "num_slices must be a whole number; got 1.5"),
        ("8xh100", 2, ValueError, r"'8xh100' is no TPU slice\.\n.*'h100:2x8'"),
        ("cpu:8", 2, ValueError, "'cpu:8' is no TPU slice"),
        (get_topology("v5e-16"), 2, ValueError, r"has 1\.\n.*get_topology\('v5e-16', num_slices=2"),
        (16, 1, TypeError, r"a topology is a name; got int\.\n.*'8xh100'"),
    ],
)
def test_wrong_slices_are_errors(name, count, error, said):
    with pytest.raises(error, match=said):
        get_topology(name, num_slices=count)


def test_a_mesh_has_all_devices():
    topology = get_topology("cpu:8")
    assert dict(topology.make_mesh({"data": 2, "fsdp": -1}).shape) == {"data": 2, "fsdp": 4}
    assert topology.make_mesh({"x": 8}).devices.tolist() == list(topology.devices)


@pytest.mark.parametrize("axes", [{"data": 3}, {}, {"a": -1, "b": -1}, {"a": 3, "b": -1}, {"a": 0}])
def test_a_mesh_that_does_not_divide_is_an_error(axes):
    with pytest.raises(ValueError, match=r"does not have the 8 devices of 'cpu:8'"):
        get_topology("cpu:8").make_mesh(axes)


def test_a_mesh_may_be_of_the_devices_that_are_here():
    assert dict(make_mesh({"data": 2, "fsdp": -1}).shape) == {"data": 2, "fsdp": 4}
    mesh = make_mesh({"data": -1}, jax.devices()[4:])
    assert mesh.devices.tolist() == jax.devices()[4:]
    with pytest.raises(ValueError, match=r"mesh of data=3 does not have the 8 devices\."):
        make_mesh({"data": 3})


@pytest.mark.parametrize("axes", [["data"], {"data": "8"}, {"data": 8.0}, {0: 8}, {"x": True}])
def test_axes_of_another_type_are_an_error(axes):
    with pytest.raises(TypeError, match=r"make_mesh\(axes\): must be sizes by axis name; got"):
        make_mesh(axes)


def test_too_few_virtual_devices_say_how_to_have_more():
    with pytest.raises(RuntimeError, match=r"JAX started 8(.|\n)*jax_num_cpu_devices', 9\)"):
        _ = get_topology("cpu:9").devices


@pytest.mark.parametrize(
    ("name", "module", "install"),
    [
        ("v5e-16", "libtpu", r"pip install 'jax\[tpu\]' \(in a checkout(.*) -e '\.\[tpu\]'\)"),
        ("8xh100", "jax_plugins", r"pip install --no-deps jax-cuda12-plugin=="),
    ],
)
def test_a_missing_compiler_says_what_to_install_and_what_works_without(
    name, module, install, monkeypatch
):
    def nothing(asked, *_):
        assert asked == module

    monkeypatch.setattr(devices_of.importlib.util, "find_spec", nothing)
    topology = get_topology(name)
    assert topology.num_devices in (8, 16)  # the name is understood all the same
    with pytest.raises(ModuleNotFoundError, match=rf"not installed(.|\n)*{install}(.|\n)*'cpu:"):
        _ = topology.devices


def test_every_chip_has_its_row_and_plausible_numbers():
    for key, chip in (TPUS | GPUS).items():
        assert 1e14 < chip.float32_flops < chip.dense_flops < 3e15, key
        assert 1e12 > chip.link_bandwidth > chip.network_bandwidth > 1e9, key
        assert 1e13 > chip.hbm_bandwidth > 10 * chip.link_bandwidth / 2, key
        assert 15 << 30 < chip.hbm_bytes < 200 << 30, key


def test_gpu_targets_are_what_xla_reads():
    text = GPU_TARGETS["h100"].text()
    assert "cuda_compute_capability { major: 9 minor: 0 }" in text
    assert text.count("{") == text.count("}")


@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
    "name",
    ["v4-8", "v4-16", "v5e-1", "v5e-8", "v5e-256", "v5p-8", "v6e-16", "tpu7x-8", "tpu7x-128"],
)
def test_libtpu_agrees_on_devices_and_hosts(name):
    topology = get_topology(name)
    kinds = {device.platform for device in topology.devices}
    assert kinds == {"tpu"}
    assert len(topology.devices) == topology.num_devices
    assert len({device.process_index for device in topology.devices}) == topology.num_hosts


@pytest.mark.tpu_compiler
def test_the_first_axis_crosses_slices_and_the_others_lie_along_the_torus():
    topology = get_topology("v5e-16", num_slices=2)
    mesh = topology.make_mesh({"data": 8, "fsdp": 4})
    assert len(set(mesh.devices.flat)) == 32
    for number, row in enumerate(mesh.devices):
        assert {device.slice_index for device in row} == {number // 4}
        varying = [len(set(places)) for places in zip(*(d.coords for d in row), strict=True)]
        assert sorted(varying)[-2:] == [1, 4]  # not the four chips of a host, which are a square


@pytest.mark.tpu_compiler
@pytest.mark.parametrize("name", ["v5p-128", "v6e-256", "tpu7x-128"])
def test_a_mesh_may_split_an_axis_of_the_torus_among_neighbours(name):
    """`jax.make_mesh` refuses this on all but v5e."""
    topology = get_topology(name)
    mesh = topology.make_mesh({"data": 1, "fsdp": -1, "tensor": 2})
    assert set(mesh.devices.flat) == set(topology.devices)
    for one, other in mesh.devices[0]:
        assert sum(abs(a - b) for a, b in zip(one.coords, other.coords, strict=True)) <= 1
    links = {"v5p-128": 1, "v6e-256": 1, "tpu7x-128": 6}[name]  # on TPU7x the halves of a chip
    assert bandwidth(topology, mesh, ["tensor"]) == links * topology.chip.link_bandwidth


def test_a_topology_is_a_value():
    assert get_topology("v5e-16") == get_topology("v5e-16") != get_topology("v5e-8")
    assert isinstance(get_topology("v5e-16"), Topology)
    assert jax.tree.leaves(get_topology("v5e-16").num_devices) == [16]
