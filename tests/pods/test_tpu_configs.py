"""Every config of tpu_configs/ is a sound job, says what it amounts to, and compiles."""

import datetime
import json
import subprocess

import _trainer
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from _trainer import ROOT, TRAINER
from pod_job.config import load_config, record_check

from mpjax import check_support, pods

CONFIGS = sorted((ROOT / "tpu_configs").glob("*.yaml"))
NAMES = [path.stem for path in CONFIGS]
TARGETS = {"cpu-smoke", "v4-8", "v5e-16", "v5e-256", "v5p-128", "v6e-64", "v6e-256", "tpu7x-128"}
TARGETS |= {f"{gpu}-{low}" for gpu in ("a100-1", "h100-8", "h100-64") for low in ("bf16", "f16")}

train_pod = _trainer.as_module()

pytestmark = [
    pytest.mark.standard_promotion("optax raises a float to the power of an integer count"),
    pytest.mark.no_leak_check("the check keeps the jaxpr of what it traces"),
]


def test_every_target_has_its_config():
    assert set(NAMES) == TARGETS


@pytest.mark.parametrize("path", CONFIGS, ids=NAMES)
def test_what_a_config_expects_is_what_its_sizes_give(path):
    job = load_config(path)
    sizes = [leaf.size for leaf in jax.tree.leaves(train_pod.param_shapes(job))]
    axes = job.mesh_axes(job.topology.num_devices)
    state_gb = sum(sizes) * 12 / (axes["fsdp"] * axes["tensor"]) / 1e9
    assert job.expected is not None
    assert job.expected.parameters_millions == pytest.approx(sum(sizes) / 1e6, rel=0.002)
    assert job.expected.state_gb == pytest.approx(state_gb, abs=0.005)


@pytest.mark.parametrize("path", CONFIGS, ids=NAMES)
def test_the_precision_is_one_that_the_accelerator_is_fast_in(path):
    job = load_config(path)
    if job.topology.chip.platform != "cpu":
        assert check_support(job.precision, job.topology.chip.key).status == "native"


@pytest.mark.parametrize("path", CONFIGS, ids=NAMES)
def test_every_config_records_a_check_that_found_nothing_and_fits(path):
    checked = load_config(path).checked
    assert checked is not None
    assert checked.result == "nothing wrong"
    if checked.peak_gb is not None and checked.limit_gb is not None:
        assert checked.peak_gb < checked.limit_gb
        assert datetime.date.fromisoformat(checked.date) >= datetime.date(2026, 11, 21)
        assert checked.compiler.startswith("jax ")


@pytest.mark.parametrize("gpu", ["a100-1", "h100-8", "h100-64"])
def test_float16_and_bfloat16_are_the_same_job(gpu):
    low, brain = (load_config(ROOT / f"tpu_configs/{gpu}-{d}.yaml") for d in ("f16", "bf16"))
    assert (low.precision, brain.precision) == ("16-mixed", "bf16-mixed")
    assert (low.model, low.mesh, low.optimizer) == (brain.model, brain.mesh, brain.optimizer)
    assert low.global_batch_size == brain.global_batch_size


@pytest.mark.parametrize("path", sorted((ROOT / "tpu_configs/launch").glob("*.sh")), ids=str)
def test_a_launch_script_is_sound_shell_and_names_the_trainer(path):
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "examples/train_pod.py" in path.read_text()
    assert "--distributed" in path.read_text()


def test_the_jobset_starts_one_pod_a_host():
    jobset = yaml.safe_load((ROOT / "tpu_configs/launch/jobset.yaml").read_text())
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    container = job["template"]["spec"]["containers"][0]
    topology = load_config(ROOT / container["command"][2]).topology
    assert job["completions"] == job["parallelism"] == topology.num_hosts
    chips = container["resources"]["limits"]["google.com/tpu"]
    assert chips * topology.num_hosts == topology.num_devices
    shape = job["template"]["spec"]["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
    assert shape == "x".join(map(str, topology.shape))


# -- compiled small --------------------------------------------------------------------------------


def compiled_small(path):
    """Returns the check of a config with two narrow layers, on its own topology and mesh."""
    width = 16 * load_config(path).topology.num_devices  # so that every shard has some columns
    sizes = {"layers": 2, "width": max(width, 512), "heads": 8, "hidden": max(width, 512)}
    small = [f"model.{name}={size}" for name, size in sizes.items()]
    job = load_config(path, [*small, "sequence_length=64"])
    topology = job.topology
    mesh = topology.make_mesh(job.mesh_axes(topology.num_devices))
    trainer = train_pod.Trainer(job, mesh)
    return pods.check(trainer.step, trainer.specs(), topology, policy=job.precision)


def targets():
    """Returns the configs as parameters; each but the first of its platform is slow."""
    compilers = {"tpu": [pytest.mark.tpu_compiler], "cuda": [pytest.mark.gpu_compiler], "cpu": []}
    found = []
    for path in CONFIGS:
        needs = compilers[load_config(path).topology.chip.platform]
        slow = [] if path.stem in ("cpu-smoke", "v5e-16") else [pytest.mark.slow]
        found.append(pytest.param(path, marks=[*needs, *slow], id=path.stem))
    return found


@pytest.mark.parametrize("path", targets())
def test_a_config_compiles_small_for_its_own_topology(path):
    report = compiled_small(path)
    assert report.ok, str(report)
    low = {"16-mixed": "f16", "bf16-mixed": "bf16"}[load_config(path).precision]
    if report.num_devices > 1:
        assert set(report.sent("weights")) == {low}
        assert set(report.sent("gradients")) == {"f32"}


@pytest.mark.tpu_compiler
def test_a_whole_job_is_still_what_its_config_records():
    path = ROOT / "tpu_configs/v4-8.yaml"  # the TPU config that compiles soonest: a minute
    process = _trainer.start(TRAINER, path, "--check", "--json")
    said, errors = process.communicate()
    assert process.returncode == 0, errors + said
    report, recorded = json.loads(said), load_config(path).checked
    assert report["findings"] == []
    # The compiler's next version may lay out a step a little better or worse.
    assert report["memory"]["peak"] / 1e9 == pytest.approx(recorded.peak_gb, rel=0.1)
    assert report["times"]["bound"] == recorded.bound


def test_a_record_is_read_back_and_replaces_the_one_before(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text((ROOT / "tpu_configs/cpu-smoke.yaml").read_text())
    step = jax.jit(lambda state, x: (state - 0.1 * x, x.sum()), donate_argnums=0)
    report = pods.check(step, (jnp.ones(4), jnp.ones(4)), "cpu:1")
    job = load_config(path, ["model.layers=1"])
    for _ in range(2):
        record_check(path, job, report)
    assert path.read_text().count("checked:") == 1
    checked = load_config(path).checked
    assert checked is not None
    assert (checked.result, checked.layers, checked.bound) == ("nothing wrong", 1, None)
    assert checked.peak_gb == np.round(report.memory.peak / 1e9, 2)
