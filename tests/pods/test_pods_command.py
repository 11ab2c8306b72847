"""The check from the command line: its devices, another hash seed, errors with their lines."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
from _places import ROOT

from mpjax.__main__ import main

JOB = """
    import jax
    import jax.numpy as jnp
    import mpjax.pods

    NAMES = {"sin", "cos", "tanh", "exp", "log", "sqrt"}
    P = jax.sharding.PartitionSpec

    def build(topology, names=NAMES):
        mesh = topology.make_mesh({"data": -1})

        def step(state, x):
            return {name: w - getattr(jnp, name)(x).mean() for name, w in pairs(state, names)}

        state = {name: jnp.ones(64) for name in sorted(NAMES)}
        args = mpjax.pods.with_sharding((state, jnp.ones((16, 64))), (P(), P("data")), mesh)
        return jax.jit(step, donate_argnums=0), args

    def pairs(state, names):
        return [(name, state[name]) for name in names]

    def in_order(topology):
        return build(topology, sorted(NAMES))

    def broken(topology):
        return topology.make_mash()

    def wrong(topology):
        return 3

    def loss_fn(params, batch):
        return 3.0
"""

pytestmark = pytest.mark.no_leak_check("the check keeps the jaxpr of what it traces")


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A file with build functions, which a second process of the check imports too."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    path = tmp_path / "users_job.py"
    path.write_text(textwrap.dedent(JOB))
    return str(path)


def test_a_program_that_follows_the_hash_seed_is_found_on_devices_that_it_starts(job):
    """In a process of its own, with no device that was started for it."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    done = subprocess.run(
        [sys.executable, "-m", "mpjax", "pods", f"{job}:build", "cpu:8"],
        capture_output=True,
        text=True,
        env=kept | {"PYTHONHASHSEED": "7"},
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "  !! the program does not follow PYTHONHASHSEED" in done.stdout
    assert "users_job.py:13" in done.stdout
    assert done.stderr == ""  # no compiler's notes


def test_a_program_that_is_the_same_under_both_seeds_is_said_to_be(job, capsys):
    assert main(["pods", f"{job}:in_order", "cpu:8"]) == 0
    assert "  ok the program does not follow PYTHONHASHSEED" in capsys.readouterr().out
    assert main(["pods", f"{job}:in_order", "cpu:8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["findings"] == []


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("broken", ["AttributeError", "make_mash", "(broken).", "(step, args)"]),
        ("loss_fn", ["loss_fn(params, batch) cannot", "Give the function that builds the job"]),
        ("bild", ["mpjax pods: ", "has no function 'bild'"]),
        ("wrong", ["check_job(build): must return (step, args), args a tuple; got int"]),
    ],
)
def test_what_a_build_function_does_wrong_is_said_with_its_line(job, name, said, capsys):
    assert main(["pods", f"{job}:{name}", "cpu:8"]) == 2
    errors = capsys.readouterr().err
    assert [text for text in said if text not in errors] == []
