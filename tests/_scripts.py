"""Runs scripts as `python script.py` would, in processes that have imported what scripts import.

A server imports JAX and its neighbours once (one to three seconds for each script else), computes
nothing, and forks a process for each script: the script has its own `__main__`, folder, devices
and caches of JAX.
"""

import multiprocessing
import os
import runpy
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

from _helpers import UNOPTIMISED
from _places import ROOT

IMPORTED = """
jax numpy optax flax.linen flax.nnx flax.training.train_state equinox mpjax
matplotlib.figure rich.progress rich.table sklearn.datasets sklearn.model_selection
"""
_FORKING = multiprocessing.get_context("forkserver")
_FORKING.set_forkserver_preload(["_scripts", *IMPORTED.split()])


class Done(NamedTuple):
    """How a script ended: its exit status, and what it said."""

    returncode: int
    stdout: str
    stderr: str


def _as_main(script: Path, arguments: tuple[str, ...], folder: Path, said: list[Path]) -> None:
    for number, path in enumerate(said, 1):
        with path.open("wb") as file:
            os.dup2(file.fileno(), number)
    os.chdir(folder)
    here = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"}
    os.environ.update(UNOPTIMISED | here)
    sys.argv = [str(script), *arguments]
    tests = str(Path(__file__).parent)
    sys.path[:] = [str(script.parent), *(path for path in sys.path if path != tests)]
    warnings.resetwarnings()
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("error", module=r"__main__\Z")  # as -W error:::__main__ does
    runpy.run_path(str(script), run_name="__main__")


def run(script: Path, *arguments: str, folder: Path) -> Done:
    """Runs a script in a folder, but for optimised code; its own warnings are errors."""
    said = [folder / f"{folder.name}.{name}" for name in ("stdout", "stderr")]
    process = _FORKING.Process(target=_as_main, args=(script, arguments, folder, said))
    process.start()
    process.join()
    status, texts = process.exitcode, [path.read_text() for path in said]
    for path in said:
        path.unlink()
    process.close()
    return Done(status, *texts)
