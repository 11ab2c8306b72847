"""Several processes on this machine, as hosts of a pod are: they agree, die, and go on.

The trainer is examples/train_pod.py as users start it, one process a host, with float16 and a loss
scale that overflows in the first steps: what a run forgets on its way through a checkpoint shows.
"""

import json
import random
import signal
import socket
import time

import _trainer
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import yaml
from _trainer import ROOT, TINY, TRAINER, finish, read_until

from mpjax.testing import assert_bitwise_equal

STEPS = 16
JOB = TINY | {
    "model": TINY["model"] | {"layers": 1},
    "loss_scale": {"initial": 2.0**20, "growth_interval": 3},
    "steps": STEPS,
}


def start(commands, cache):
    """Starts one process a command, {port} being one that is free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    caching = {"JAX_COMPILATION_CACHE_DIR": str(cache)}
    caching["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    return [
        _trainer.start(*(part.replace("{port}", port) for part in command), **caching)
        for command in commands
    ]


# -- one decision ----------------------------------------------------------------------------------


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("count", "way"), [(2, "shard_map"), (2, "jit"), slow(4, "jit")])
def test_one_processes_overflow_makes_all_skip_and_scales_stay_equal(count, way, tmp_path):
    worker = str(ROOT / "tests" / "training" / "_overflow_worker.py")
    commands = [[worker, "127.0.0.1:{port}", str(count), str(i), way] for i in range(count)]
    processes = start(commands, tmp_path)
    said = finish(processes)
    assert [p.returncode for p in processes] == [0] * count, [errors[-2000:] for _, errors in said]
    rows = [[json.loads(line) for line in out.splitlines() if line[0] == "{"] for out, _ in said]
    assert all(row == rows[0] for row in rows)
    assert [row["grads_finite"] for row in rows[0]] == [1, 1, 0, 1]
    assert [row["loss_scale"] for row in rows[0]] == [1024, 1024, 1024, 512]
    bits = [row["bits"] for row in rows[0]]
    assert bits[2] == bits[1]
    assert len({*bits}) == 3
    assert rows[0][-1]["traces"] == rows[0][0]["traces"]


# -- killed and started again ----------------------------------------------------------------------


class Job:
    """A job of several processes in its own folder."""

    def __init__(self, folder, cache, count):
        self.folder, self.cache, self.count = folder, cache, count
        self.checkpoints = folder / "checkpoints"
        folder.mkdir()
        values = JOB | {
            "accelerator": f"cpu:{count}",
            "data": JOB["data"] | {"cache": str(folder / "corpus")},
            "checkpoint": {"folder": str(self.checkpoints), "every": 3, "keep": 2},
        }
        (folder / "job.yaml").write_text(yaml.safe_dump(values))

    def start(self, *more, ids=()):
        """Starts the processes; `more` are arguments that each has for itself."""
        own = dict(enumerate(more))
        script = [str(TRAINER), str(self.folder / "job.yaml")]
        script += ["--out", str(self.folder / "out"), "--coordinator", "127.0.0.1:{port}"]
        script += ["--num-processes", str(self.count), "--process-id"]
        numbers = ids or range(self.count)
        commands = [[*script, str(n), *own.get(i, ())] for i, n in enumerate(numbers)]
        return start(commands, self.cache)

    def run(self):
        processes = self.start()
        said = finish(processes)
        assert [p.returncode for p in processes] == [0] * self.count, [e[-2000:] for _, e in said]
        return said[0][0]

    def reached(self, step):
        """Starts the processes, and returns them once a step is reported."""
        processes = self.start()
        read_until(processes[0], f"step {step:>6}/")
        return processes

    def killed(self, step, victim):
        """Runs until a step is reported, and kills one process there; the rest cannot go on."""
        processes = self.reached(step)
        processes[victim].send_signal(signal.SIGKILL)
        processes[victim].wait()
        for process in processes:  # as a scheduler does when one has died
            process.kill()
            process.communicate()

    def terminated(self, step, asked):
        """Runs until a step is reported, asks one process to end, and returns what all saved."""
        processes = self.reached(step)
        processes[asked].send_signal(signal.SIGTERM)
        said = finish(processes)
        assert [p.returncode for p in processes] == [143] * self.count, [e[-2000:] for _, e in said]
        return int(said[0][0].partition("SIGTERM: saved step ")[2].split(";")[0])

    def state(self):
        """Returns the last state, every shard of it."""
        with ocp.StandardCheckpointer() as checkpointer:
            path = self.checkpoints / str(STEPS) / "default"
            sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
            shapes = checkpointer.metadata(path).item_metadata.tree
            spec = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)  # noqa: E731
            return jax.device_get(checkpointer.restore(path, jax.tree.map(spec, shapes)))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Compiled programs, which all runs of one job share."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def uninterrupted(cache, tmp_path_factory):
    """The last states of runs that never died, by number of processes."""
    return {}


def reference(known, count, cache, folder):
    if count not in known:
        job = Job(folder / "whole", cache, count)
        job.run()
        known[count] = job.state()
    return known[count]


ORBAX = [
    pytest.mark.standard_promotion("orbax mixes dtypes"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),
]
# Processes, seed, kills: the first in CI's stage `fuzz`, all ten kills in `make test SLOW=1`.
LIVES = [(2, 0, 1), (2, 0, 2), (2, 1, 2), (2, 2, 2), (4, 3, 2), (4, 4, 2)]


@pytest.mark.slow
@pytest.mark.parametrize(("count", "seed", "times"), LIVES, ids=str)
class TestKilled:
    pytestmark = ORBAX

    def test_it_ends_in_the_bits_of_a_run_that_never_died(
        self, count, seed, times, uninterrupted, cache, tmp_path, record_property
    ):
        whole = reference(uninterrupted, count, cache, tmp_path)
        chosen = random.Random(seed)
        job = Job(tmp_path / "job", cache, count)
        # From 7 on: once step 6 is being saved, that of step 3 is complete on all processes.
        at = sorted(chosen.sample(range(7, STEPS), times))
        kills = [(step, chosen.randrange(count)) for step in at]
        for step, victim in kills:
            job.killed(step, victim)
        said = job.run()
        first = int(said.partition("starting at step ")[2].split()[0])
        record_property("kills", f"{kills}, resumed from step {first}")  # for --junit-xml
        assert 0 < first < STEPS, said
        state = job.state()
        assert_bitwise_equal(state, whole)
        # A run that had forgotten its loss scale would have come out elsewhere.
        scale = np.asarray(state["opt_state"]["loss_scale"])
        assert scale != JOB["loss_scale"]["initial"]
        assert state["opt_state"]["skipped_steps"] > 0


@pytest.mark.slow
class TestBrokenOrAsked:
    pytestmark = ORBAX

    def test_processes_refuse_a_corrupted_checkpoint_together(self, uninterrupted, cache, tmp_path):
        whole = reference(uninterrupted, 2, cache, tmp_path)
        job = Job(tmp_path / "job", cache, 2)
        saved = job.terminated(8, 1)  # unlike a kill, that leaves nothing half-written
        (older,) = {int(p.parent.name) for p in job.checkpoints.glob("*/seal-*.json")} - {saved}
        newest = job.checkpoints / str(saved)
        path = max((p for p in newest.rglob("d/*") if p.is_file()), key=lambda p: p.stat().st_size)
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        said = job.run()
        assert f"refused checkpoint {newest}: {path.relative_to(newest)} is corrupted" in said
        assert f"starting at step {older} of" in said
        assert_bitwise_equal(job.state(), whole)


# -- what must not start ---------------------------------------------------------------------------


def test_processes_with_different_configs_stop_before_the_first_step(cache, tmp_path):
    job = Job(tmp_path / "job", cache, 2)
    processes = job.start((), ("--set", "optimizer.learning_rate=2.0e-2"))
    said = finish(processes)
    assert [p.returncode for p in processes] == [2, 2], said
    for out, errors in said:
        assert "config: 1 value differs" in errors
        assert "'optimizer.learning_rate': 0.01 on process 0; 0.02 on process 1." in errors
        assert "step " not in out


@pytest.mark.ci
def test_two_processes_with_the_same_id_are_told_so(cache, tmp_path):
    job = Job(tmp_path / "job", cache, 2)
    processes = job.start(*[("--dry-run",)] * 3, ids=(0, 1, 1))
    said = finish(processes)
    codes = [p.returncode for p in processes]
    assert sorted(codes) == [0, 0, 2], said  # the other two are the job, and do its work
    errors = said[codes.index(2)][1]
    assert "initialize(process_id=1): another process of this job has the same id." in errors


FAILING = """
import sys, time
import jax
sys.path.insert(0, {examples!r})
from pod_job.processes import gather_values, initialize, together
jax.config.update("jax_cpu_collectives_implementation", "gloo")
initialize(sys.argv[1], 2, int(sys.argv[2]))
with together(sys.argv[3]):
    if jax.process_index() == 1:
        raise ValueError("the disk is full")
    gather_values(1) if sys.argv[4] == "a collective" else time.sleep(300)
"""


@pytest.mark.parametrize("waiting", ["a collective", slow("what never ends")])
def test_an_error_on_one_process_ends_all_with_its_message(waiting, cache, tmp_path):
    script = tmp_path / "failing.py"
    script.write_text(FAILING.format(examples=str(ROOT / "examples")))
    began = time.monotonic()
    processes = start(
        [[str(script), "127.0.0.1:{port}", str(i), str(tmp_path), waiting] for i in (0, 1)], cache
    )
    said = finish(processes, 60)
    assert [p.returncode for p in processes] == [2, 2], said
    assert "process 1 ended: the disk is full" in said[0][1]
    assert "the disk is full" in said[1][1]
    assert time.monotonic() - began < 60
