"""PyTorch beside JAX: its steps run in another interpreter, in turns with ours."""

import json
import os
import pathlib
import subprocess
from typing import Any

PROGRAM = pathlib.Path(__file__).parents[1] / "peers" / "torch_steps.py"
NETWORKS = ("mlp", "transformer")


class Torch:
    """A running interpreter with PyTorch and one network; `with` ends it."""

    def __init__(self, python: str, network: str, size: dict[str, Any]) -> None:
        command = [python, "-W", "ignore", str(PROGRAM), network, json.dumps(size)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            # Its threads spin while they wait, by default: where other work shares the cores, a
            # step of a millisecond then takes a second.
            env={**os.environ, "OMP_WAIT_POLICY": "passive"},
        )
        self.version = self._answer()

    def __enter__(self) -> "Torch":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.stdin:
            self._process.stdin.close()
        self._process.wait(timeout=60)

    def step(self, variant: str) -> float:
        """Runs one step; returns its seconds, measured over there."""
        if self._process.stdin:
            self._process.stdin.write(variant + "\n")
        return float(self._answer())

    def _answer(self) -> str:
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            raise RuntimeError(f"torch: {PROGRAM.name} ended; its error is printed above.")
        return line.strip()
