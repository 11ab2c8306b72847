"""Checks a job from the command line: imports its file, and traces it under a second hash seed."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Generator
from typing import Any

import jax

from mpjax._base.errors import message
from mpjax.pods import _programs
from mpjax.pods._args import place
from mpjax.pods._check import build_job, check, traced
from mpjax.pods._findings import Finding
from mpjax.pods._report import Report
from mpjax.pods._topology import Topology, get_topology

WHERE = "mpjax pods"


def check_file(
    load: Callable[[], tuple[Any, Callable[..., Any], str]], command: list[str], topology: Topology
) -> Report:
    """Returns `check_job`'s report on a build function of a file, traced under two hash seeds.

    A process that was started with another PYTHONHASHSEED meets sets and hashes in another order;
    the hosts of a job each have their own seed. So a second process traces the job, while this one
    compiles it, and the two are compared.

    Args:
      load: imports the file and returns the module and the function.
      command: the arguments of `python -m mpjax` that print the job's outline, for that process.
      topology: the devices to check it for.

    Raises:
      ValueError: the file, or what it builds, raises; the message has its line.
    """
    started = _start(command)
    try:
        with _named(topology):
            step, args = build_job(load()[1], topology)
            mine = _outline(step, args, topology)
            with _quiet():
                report = check(step, args, topology)
        other, errors = started.communicate()
    finally:
        if started.poll() is None:
            started.kill()
            started.communicate()
    if started.returncode:
        raise ValueError(message(WHERE, "traced again, it fails.", *errors.splitlines()[-3:]))
    findings = _difference(mine, json.loads(other.splitlines()[-1]))
    return dataclasses.replace(report, hash_seeds=2, findings=(*report.findings, *findings))


def outline(
    load: Callable[[], tuple[Any, Callable[..., Any], str]], topology: Topology
) -> list[str]:
    """Returns the operations of a job with their lines, in order, for `check_file` to compare."""
    use_cpu(topology)
    with _named(topology):
        return _outline(*build_job(load()[1], topology), topology)


def use_cpu(topology: Topology) -> None:
    """Makes JAX start the CPU alone, and as many virtual devices as the topology has, if it can."""
    count = topology.num_devices if topology.chip.platform == "cpu" else 1
    with contextlib.suppress(RuntimeError):  # started already: `Topology.devices` judges the number
        jax.config.update("jax_num_cpu_devices", count)
        jax.config.update("jax_platforms", "cpu")


def topology_of(name: str, num_slices: int) -> Topology:
    """Returns the topology, without starting its devices."""
    return get_topology(name, num_slices=num_slices)


def _outline(step: Any, args: Any, topology: Topology) -> list[str]:
    placed, mesh = place(args, topology)
    return _programs.outline(traced(step, placed, mesh, topology))


def _start(command: list[str]) -> subprocess.Popen[str]:
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    return subprocess.Popen(
        [sys.executable, "-m", "mpjax", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONHASHSEED": seed},
    )


def _difference(mine: list[str], other: list[str]) -> list[Finding]:
    pairs = itertools.zip_longest(mine, other, fillvalue="nothing")
    different = next(((a, b) for a, b in pairs if a != b), None)
    if different is None:
        return []
    a, b = different
    return [
        Finding(
            check="hashing",
            severity="error",
            what=f"under another PYTHONHASHSEED the program is another: {a}, or {b}.",
            culprit=a,
            fix="Sort what comes out of a set, and use no hash() of a string: each host has a seed "
            "of its own.",
        )
    ]


@contextlib.contextmanager
def _named(topology: Topology) -> Generator[None]:
    """Gives errors of the user's code the layout of messages: the error, its line, the fix."""
    try:
        yield
    except (ValueError, ModuleNotFoundError):
        raise  # mpjax's own
    except Exception as error:  # of the user's code: any
        frames = traceback.extract_tb(error.__traceback__)
        if frames[-1].filename.startswith(_programs.PACKAGE):
            raise  # it says what to type
        lines = [f"{f.filename}:{f.lineno} ({f.name})" for f in frames]
        last = next((x for x in reversed(lines) if not _is_library(x)), lines[-1])
        got = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        fix = "A build function returns (step, args) for any topology: see mpjax.pods.check_job."
        raise ValueError(
            message(f"{WHERE} {topology.name}", got, f"At {_programs.shorten(last)}.", fix)
        ) from error


def _is_library(line: str) -> bool:
    return "site-packages" in line or line.startswith(_programs.PACKAGE)


@contextlib.contextmanager
def _quiet() -> Generator[None]:
    """Holds compilers' own output to stderr back, and shows it if they fail."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as kept:
        before = os.dup(2)
        os.dup2(kept.fileno(), 2)
        try:
            yield
        except BaseException:
            kept.seek(0)
            os.write(before, kept.read()[-4000:])
            raise
        finally:
            os.dup2(before, 2)
            os.close(before)
