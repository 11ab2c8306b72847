"""The pod trainer as tests use it: as a module, and as a program of its own."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _helpers import UNOPTIMISED
from _places import ROOT

TRAINER = ROOT / "examples" / "train_pod.py"
# A job of seconds, whose first steps overflow, on some sources that nobody edits while tests run.
TEXTS = Path(json.__file__).parent
TINY = {
    "hardware": "a test",
    "accelerator": "cpu:8",
    "model": {"width": 16, "layers": 2, "heads": 2, "hidden": 32},
    "precision": "16-mixed",
    "sequence_length": 16,
    "global_batch_size": 8,
    "optimizer": {"learning_rate": 1.0e-2, "warmup_steps": 2},
    "loss_scale": {"initial": 2.0**20, "growth_interval": 4},
    "steps": 12,
    "log_every": 1,
    "data": {"path": str(TEXTS), "held_out": 0.4},
}


def as_module() -> Any:
    spec: Any = importlib.util.spec_from_file_location("train_pod", TRAINER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def start(*arguments: str | Path, **variables: str) -> subprocess.Popen[str]:
    """Starts Python on a script; of this process's JAX it inherits nothing."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "TPU_"))}
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=kept | UNOPTIMISED | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)} | variables,
    )


def finish(processes: Sequence[subprocess.Popen[str]], seconds: float = 300) -> list[Any]:
    """Returns what each process said, on stdout and stderr, and kills those that do not end."""
    found = []
    for process in processes:
        try:
            found.append(process.communicate(timeout=seconds))
        except subprocess.TimeoutExpired:
            process.kill()
            found.append(process.communicate())
    return found


def read_until(process: subprocess.Popen[str], beginning: str) -> str:
    """Returns the first line that begins so; an error if the process ends before it says it."""
    assert process.stdout is not None
    assert process.stderr is not None
    while not (line := process.stdout.readline()).startswith(beginning):
        assert line, process.stderr.read()[-2000:]
    return line
