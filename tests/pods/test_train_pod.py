"""The pod trainer: right on every mesh, bits kept through SIGTERM, bad input refused by name."""

import importlib.util
import json
import os
import signal
import sys

import _trainer
import jax
import numpy as np
import pytest
import yaml
from _trainer import TEXTS, TINY, TRAINER, read_until
from pod_job import corpus as corpus_module
from pod_job.checkpoints import Checkpoints
from pod_job.config import AXES, load_config
from pod_job.corpus import Corpus, open_corpus, trigram_bits
from pod_job.processes import raise_differences

import mpjax
from mpjax import pods
from mpjax.testing import assert_bitwise_equal

train_pod = _trainer.as_module()

pytestmark = [
    pytest.mark.standard_promotion("optax raises a float to the power of an integer count"),
    pytest.mark.no_leak_check("the check keeps the jaxpr of what it traces"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),  # Orbax's
]


@pytest.fixture
def config(tmp_path):
    """A small job whose corpus is a package of the standard library."""
    values = TINY | {
        "data": TINY["data"] | {"cache": str(tmp_path / "corpus")},
        "checkpoint": {"folder": str(tmp_path / "checkpoints"), "every": 5, "keep": 2},
    }
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def trainer_on(config, axes, precision):
    sizes = [f"mesh.{name}={size}" for name, size in axes.items()]
    devices = int(np.prod(list(axes.values())))
    job = load_config(config, [*sizes, f"accelerator=cpu:{devices}", f"precision={precision}"])
    return train_pod.Trainer(job, pods.get_topology(f"cpu:{devices}").make_mesh(axes))


def gradients(trainer):
    """Returns loss and gradients of the first step."""
    mapped = trainer._mapped(
        trainer._local_grads, (train_pod.P(), train_pod.PARAM_SPECS), train_pod.P()
    )
    tokens = np.random.default_rng(0).integers(0, 256, (8, 17)).astype(np.int32)
    batch = jax.device_put(tokens, trainer.batch_sharding)
    params = trainer.init()["params"]
    return jax.device_get(jax.jit(mapped)(params, batch, mpjax.NoOpLossScale()))


@pytest.fixture(scope="module")
def of_one_device(tmp_path_factory):
    path = tmp_path_factory.mktemp("one") / "job.yaml"
    path.write_text(yaml.safe_dump(TINY))
    return gradients(trainer_on(path, {"data": 1, "fsdp": 1, "tensor": 1}, "32-true"))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param((1, 8, 1), id="fsdp"),
        pytest.param((2, 2, 2), id="all axes"),
        pytest.param((1, 1, 2), id="tensor", marks=pytest.mark.slow),
    ],
)
def test_every_mesh_computes_what_one_device_does(sizes, config, of_one_device):
    one, single = of_one_device
    axes = dict(zip(AXES, sizes, strict=True))
    loss, grads = gradients(trainer_on(config, axes, "32-true"))
    assert loss == pytest.approx(one, rel=1e-6)
    # Sums over 128 bytes in another order: some units in the last place of the largest.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max()),
        grads,
        single,
    )


# XLA's older emitters, which conftest.py asks for where there are any, write the gradient of an
# embedding as a loop over rows: the activations' cotangents, sent in float16, seem to be gradients.
_NEWER_EMITTERS = pytest.mark.skipif(
    "use_fusion_emitters=false" in os.environ["XLA_FLAGS"],
    reason="XLA's older emitters hide which row an embedding's gradient is added to",
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "precision", ["bf16-mixed", pytest.param("16-mixed", marks=_NEWER_EMITTERS)]
)
def test_the_check_of_its_step_passes_on_all_mesh_axes(precision, config):
    # Large enough that the check takes no collective for a scalar's.
    trainer = trainer_on(config, {"data": 2, "fsdp": 2, "tensor": 2}, precision)
    report = pods.check(trainer.step, trainer.specs(), "cpu:8", policy=precision)
    assert report.findings == (), str(report)
    assert set(report.sent("weights")) == {"bf16" if precision == "bf16-mixed" else "f16"}
    assert set(report.sent("gradients")) == {"f32"}


def test_a_replayed_batch_depends_on_its_step_and_row_alone():
    corpus = Corpus(train=np.arange(999), held_out=np.arange(99), digest="")
    pick = {"seed": 1, "count": 8, "length": 4}
    whole = corpus.windows(step=5, rows=slice(None), **pick)
    parts = [corpus.windows(step=5, rows=slice(i, i + 2), **pick) for i in range(0, 8, 2)]
    assert_bitwise_equal(whole, np.concatenate(parts))
    assert (np.diff(whole) == 1).all()
    assert not (corpus.windows(step=6, rows=slice(None), **pick) == whole).all()


def test_held_out_files_are_not_learnt_from(config):
    corpus = open_corpus(load_config(config).data, 16)
    files = sorted(f for f in TEXTS.glob("*.py") if f.stat().st_size)
    texts = [f.read_bytes() for f in files]
    held_out = corpus.held_out.tobytes()
    assert corpus.train.tobytes() == b"".join(t for t in texts if t not in held_out)
    assert sum(map(len, texts)) == len(corpus.train) + len(corpus.held_out)


def test_a_trigram_model_is_counted_right():
    text = np.frombuffer(b"ab" * 50 + b"ac", np.uint8)
    # 'ba' was followed by 'b' 49 times and by 'c' once: 2 kinds of 50 in all.
    lower = (1 + 2 * (1 + 3 / 256) / (102 + 3)) / (51 + 2)
    expected = -np.log2((1 + 2 * lower) / (50 + 2))
    assert trigram_bits(text, np.frombuffer(b"bac", np.uint8)[None]) == pytest.approx(expected)


def test_a_corpus_larger_than_memory_is_read_in_chunks(config, monkeypatch):
    job = load_config(config)
    one = open_corpus(job.data, 16)
    windows = one.held_out_windows(8, 16)
    bits = trigram_bits(one.train, windows)
    for file in (config.parent / "corpus").iterdir():
        file.unlink()
    monkeypatch.setattr(corpus_module, "_CHUNK", 1000)
    other = open_corpus(job.data, 16)
    assert other.digest == one.digest
    assert (other.train.tobytes(), other.held_out.tobytes()) == (
        one.train.tobytes(),
        one.held_out.tobytes(),
    )
    assert trigram_bits(other.train, windows) == bits


# -- as a program ----------------------------------------------------------------------------------


def start(config, *arguments):
    here = ["--simulate", "2", "--set", "accelerator=cpu:2", "--out", str(config.parent / "out")]
    return _trainer.start(TRAINER, config, *here, *arguments)


def test_a_bad_config_is_a_message_and_exit_code_2(config, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train_pod.py", str(config), "--set", "model.widht=8"])
    assert train_pod.main() == 2
    assert "Did you mean 'model.width'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--simulate", "0"], "--simulate: must be at least 1; got 0."),
        (["--json"], "--json and --record: they belong to --check."),
        (["--out", __file__], "test_train_pod.py: is a file."),
        # It would train alone, beside all others that forgot it too.
        (["--process-id", "1"], "coordinator, num_processes and process_id go together"),
        (["--num-processes", "2", "--distributed"], "some are missing"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, said, config, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train_pod.py", str(config), *options])
    assert train_pod.main() == 2
    assert said in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is not None, reason="libtpu is installed")
def test_a_check_without_the_compiler_says_what_to_install(config):
    process = start(config, "--set", "accelerator=v5e-8", "--check")
    said, errors = process.communicate(timeout=300)
    assert (process.returncode, said) == (2, "")
    assert "pip install 'jax[tpu]'" in errors
    assert "'cpu:8' checks all but memory" in errors


def test_a_mesh_that_does_not_fit_the_simulated_devices_is_refused(config):
    process = start(config, "--simulate", "3")
    said, errors = process.communicate(timeout=300)
    assert (process.returncode, said) == (2, "")
    assert "global_batch_size: 8 does not divide over data x fsdp = 3.\n  Type 6 or 9" in errors


def test_processes_with_other_compiler_flags_are_told_apart(monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_a=1")
    one = train_pod.surroundings()
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_a=2")
    said = r"'LIBTPU_INIT_ARGS': '--xla_a=1' on process 0; '--xla_a=2' on process 1"
    with pytest.raises(ValueError, match=said):
        raise_differences([one, train_pod.surroundings()], "config")


def last_state(config, folder):
    job = load_config(config)
    one = {"data": 1, "fsdp": 1, "tensor": 1}
    trainer = train_pod.Trainer(job, pods.get_topology("cpu:1").make_mesh(one))
    with Checkpoints(config.parent / folder) as checkpoints:
        step, state, refused = checkpoints.restore(trainer.specs()[0])
    assert (step, refused) == (job.steps, [])
    return jax.device_get(state)


@pytest.mark.slow
def test_sigterm_saves_and_the_same_command_goes_on_to_the_same_bits(config):
    whole = start(config, "--set", f"checkpoint.folder={config.parent / 'whole'}")
    assert whole.wait(timeout=300) == 0, whole.stderr.read()
    process = start(config)
    read_until(process, "step      2")
    process.send_signal(signal.SIGTERM)
    said, errors = process.communicate(timeout=300)
    assert process.returncode == 143, errors  # to a scheduler, not done
    assert "SIGTERM: saved step" in said
    resumed = start(config)
    said, errors = resumed.communicate(timeout=300)
    assert resumed.returncode == 0, errors
    first = int(said.partition("starting at step ")[2].split()[0])
    assert 2 <= first < TINY["steps"]
    state = last_state(config, "checkpoints")
    assert_bitwise_equal(state, last_state(config, "whole"))
    # Had the loss scale stayed as it began, a run that forgot it would pass too.
    assert state["opt_state"].loss_scale != TINY["loss_scale"]["initial"]
    rows = [json.loads(line) for line in (config.parent / "out/metrics.jsonl").open()]
    # A corpus that has changed since is another job's: the resumed run would not be the same.
    claim = config.parent / "checkpoints" / "job.json"
    claim.write_text(claim.read_text().replace('"corpus": "', '"corpus": "0'))
    # So is a run with more steps, whose learning rate would go on from elsewhere.
    other = start(config, "--set", "steps=20")
    _, errors = other.communicate(timeout=300)
    assert other.returncode == 2
    assert "its checkpoints are another job's.\n  'corpus' is '0" in errors
    assert "'steps of the schedule' is 12 there, 20 here." in errors
    assert {"step", "loss", "loss_scale", "skipped_steps", "bytes_per_second", "mfu"} <= set(
        rows[0]
    )
    assert set(rows[-1]["held_out"]) == {"bits_per_byte", "trigram_bits_per_byte"}
