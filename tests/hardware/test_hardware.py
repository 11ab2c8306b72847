"""The support table, the rows that devices and names get, and the check of a policy."""

import dataclasses
import json
import os
import subprocess
import sys
import warnings

import jax
import pytest

from mpjax import Policy, PolicyMap, SupportWarning, check_support, default_policy, get_policy
from mpjax._hardware import DTYPES, SUPPORT, examine, find_accelerator
from mpjax._hardware.find import cpu_key, host_cpu

ROWS = list(SUPPORT.values())


@dataclasses.dataclass
class FakeDevice:
    platform: str
    device_kind: str


@dataclasses.dataclass
class FakeGpu(FakeDevice):
    compute_capability: str


# -- the table ---------------------------------------------------------------------------------


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.key)
def test_every_cell_says_why(row):
    for dtype in DTYPES:
        cell = row.cell(dtype)
        assert cell.status in ("native", "slow", "unknown"), dtype
        assert 10 < len(cell.reason) < 80, dtype


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.key)
def test_the_policy_to_pick_is_fast_where_it_is_picked(row):
    report = examine(get_policy(row.policy), row)
    assert report.status == "native", str(report)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.key)
def test_a_16_bit_policy_is_picked_wherever_one_is_fast(row):
    fast = {"bfloat16", "float16"} & set(row.fast)
    assert (row.policy == "32-true") == (not fast)
    assert row.half in fast or row.half == "bfloat16"


@pytest.mark.parametrize(
    ("name", "half", "pick"),
    [
        ("v100", "float16", "16-mixed"),
        ("a100", "bfloat16", "bf16-mixed"),
        ("mi100", "bfloat16", "bf16-mixed"),
        ("v5e", "bfloat16", "bf16-mixed"),
        ("cpu-plain", "bfloat16", "32-true"),
    ],
)
def test_pick(name, half, pick):
    row = find_accelerator(name)
    assert (row.half, row.policy) == (half, pick)


@pytest.mark.parametrize(
    ("name", "fast"),
    [
        ("v100", "float32 float16 float64"),
        ("t4", "float32 float16 int8"),
        ("a100", "float32 bfloat16 float16 float64 int8"),
        ("a10", "float32 bfloat16 float16 int8"),
        ("l4", "float32 bfloat16 float16 float8_e4m3fn float8_e5m2 int8"),
        ("h100", "float32 bfloat16 float16 float64 float8_e4m3fn float8_e5m2 int8"),
        ("b300", "float32 bfloat16 float16 float8_e4m3fn float8_e5m2"),
        ("mi300x", "float32 bfloat16 float16 float64 int8"),
        ("v4", "float32 bfloat16"),
        ("v6e", "float32 bfloat16 float8_e5m2 int8"),
        ("v7x", "float32 bfloat16 float8_e4m3fn float8_e5m2"),
        ("cpu-avx512-bf16", "float32 bfloat16 float64"),
        ("cpu-amx", "float32 bfloat16 float64 int8"),
    ],
)
def test_fast_dtypes(name, fast):
    assert find_accelerator(name).fast == tuple(fast.split())


def test_int8_is_judged_by_the_chip():
    policy = get_policy("int8_from_mixed_bfloat16")
    assert examine(policy, find_accelerator("v5e")).status == "native"
    slow = examine(policy, find_accelerator("v4"))
    assert slow.status == "slow"
    assert "Type 'bf16-mixed' instead." in slow.lines("slow")


def test_a_dtype_without_a_column_is_unknown():
    assert find_accelerator("h100").cell("float4_e2m1fn").status == "unknown"


# -- names -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "key"),
    [
        *((key, key) for key in SUPPORT),
        ("sm90", "sm_90"),
        ("sm_90a", "sm_90"),
        ("8.7", "sm_86"),  # Jetson: the newest row that is not newer
        ("11.0", "sm_103"),
        ("12.1", "sm_120"),
        ("6.1", "sm_52"),
        ("H100", "sm_90"),
        ("NVIDIA H100 80GB HBM3", "sm_90"),
        ("NVIDIA GeForce RTX 4090", "sm_89"),
        ("Tesla T4", "sm_75"),
        ("MI300X", "gfx942"),
        ("gfx90a:sramecc+:xnack-", "gfx90a"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU7x", "v7x"),
        ("v5litepod-16", "v5e"),
        ("v5e:4x4", "v5e"),
        ("tpu7x-16", "v7x"),
        ("TPU", "tpu"),
        ("cuda", "gpu"),
    ],
)
def test_names(name, key):
    assert find_accelerator(name).key == key


# -- devices -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "key"),
    [
        (FakeGpu("gpu", "NVIDIA H200", "9.0"), "sm_90"),
        (FakeGpu("gpu", "a model of next year", "13.0"), "sm_120"),
        (FakeGpu("gpu", "AMD Instinct MI300X", "gfx942:sramecc+:xnack-"), "gfx942"),
        (FakeDevice("gpu", "NVIDIA A100-SXM4-80GB"), "sm_80"),
        (FakeDevice("tpu", "TPU v6 lite"), "v6e"),
        (FakeDevice("tpu", "TPU v9"), "tpu"),
        (FakeGpu("gpu", "AMD Radeon RX 7900", "gfx1100"), "unknown"),
        (FakeDevice("METAL", "Apple M3"), "unknown"),
    ],
)
def test_devices(device, key):
    assert find_accelerator(device).key == key


def test_a_device_that_the_table_does_not_know_is_neither_praised_nor_warned_of():
    report = check_support("16-true", FakeDevice("METAL", "Apple M3"))
    assert report.status == "unknown"
    assert report.ok
    assert "METAL Apple M3" in str(report)


@pytest.mark.parametrize("device", [None, "cpu", "CPU"])
def test_this_machine(device, devices):
    assert find_accelerator(device) is find_accelerator(devices[0]) is host_cpu()


@pytest.mark.parametrize(
    ("cpuinfo", "key"),
    [
        ("flags : fpu avx512_bf16 amx_bf16 amx_tile", "cpu-amx"),
        ("flags : fpu avx512_bf16", "cpu-avx512-bf16"),
        ("flags : fpu avx512f avx2", "cpu-plain"),
        ("Features : fp asimd bf16", "cpu-plain"),  # ARM: not measured, so nothing is promised
        ("", "cpu-plain"),
    ],
)
def test_processors(cpuinfo, key):
    assert cpu_key(cpuinfo) == key


def test_asking_by_name_starts_no_backend():
    code = """
import jax
from mpjax._hardware.support import check_support
assert check_support("bf16-mixed", "v5e").ok
assert check_support("half", "v5e").ok
try:
    jax.devices()
except RuntimeError:
    print("no backend")
"""
    environment = os.environ | {"JAX_PLATFORMS": "nosuchbackend"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "no backend\n"), done.stderr


# -- check_support -----------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["tpu", "v2", "v5litepod-16", "v7x"])
@pytest.mark.parametrize("policy", ["16-mixed", "mixed_float16", "O3", Policy("f32", "f16", "f32")])
def test_float16_on_a_tpu_warns(policy, device):
    with pytest.warns(SupportWarning, match=r"(?s)gains little.*needs loss scaling.*'bf16-mixed'"):
        report = check_support(policy, device)
    assert (report.status, report.ok) == ("slow", False)


def test_the_warning_in_full():
    with pytest.warns(SupportWarning) as caught:
        check_support("16-mixed", "v5e")
    assert str(caught[0].message) == (
        "check_support: '16-mixed' gains little or nothing on TPU v5e.\n"
        "  compute float16 is slow: the matrix unit takes bfloat16; no faster than that, "
        "and needs loss scaling\n"
        "  Type 'bf16-mixed' instead."
    )
    assert caught[0].filename == __file__  # the user's line, not one of ours


@pytest.mark.parametrize(
    ("policy", "device"),
    [
        ("bf16-mixed", "v5e"),
        ("half", "v5e"),  # jmp's 'half' is bfloat16 there, float16 where this test runs
        ("16-mixed", "t4"),
        ("bf16-true", "a100"),
        ("p=f16,c=f32,o=f16", "v5e"),  # only stored in float16
        ("p=bf16,c=f16,o=f32", "t4"),
    ],
)
def test_what_is_fast_passes_in_silence(policy, device):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert check_support(policy, device).status == "native"


@pytest.mark.parametrize("policy", ["16-mixed", "bf16-mixed"])
def test_on_a_cpu_what_is_slow_is_told_but_not_warned_of(policy):
    report = check_support(policy, "cpu-plain")
    assert (report.status, report.ok) == ("slow", False)
    assert "Type '32-true' instead." in str(report)


def test_float64_with_64_bit_types_on():
    with jax.enable_x64(True):
        assert check_support("64-true", "a100").status == "native"
        assert check_support("64-true", "cpu").status == "native"
        for device in ("t4", "v5e", "rtx4090"):
            with pytest.warns(SupportWarning, match=r"(?s)float64 is slow.*Type '32-true'"):
                check_support("64-true", device)
        # An optimizer that adds in float64 is slow there too.
        with pytest.warns(SupportWarning, match="param float64 is slow: emulated"):
            check_support("p=f64,c=bf16,o=f32", "v5e")


def test_a_rule_of_a_policy_map_is_named():
    policies = PolicyMap("bf16-mixed", {"encoder/*": "float32", "decoder/head": "16-mixed"})
    with pytest.warns(SupportWarning, match=r"'decoder/head': compute float16 is slow") as caught:
        report = check_support(policies, "v5e")
    assert "encoder" not in str(caught[0].message)
    wheres = {finding.where for finding in report.findings}
    assert wheres == {"default", "encoder/*", "decoder/head"}


def test_none_is_the_scoped_default():
    assert check_support(device="v5e").policy == "p=f32,c=f32,o=f32"
    with default_policy("16-mixed"), pytest.warns(SupportWarning, match="float16"):
        check_support(device="v5e")


def test_a_report_survives_json():
    report = check_support("bf16-mixed", "cpu-plain")
    again = json.loads(json.dumps(report.to_dict()))
    assert again["ok"] is False
    assert again["findings"][1] == {
        "where": "policy",
        "roles": ["compute"],
        "dtype": "bfloat16",
        "status": "slow",
        "reason": "no unit takes it; float32 products, which saves memory only",
        "instead": ["32-true"],
    }
