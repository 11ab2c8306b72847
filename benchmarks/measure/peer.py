"""PyTorch beside JAX: its steps run in another interpreter, in turns with ours or by themselves."""

import contextlib
import json
import os
import pathlib
import subprocess
import tempfile
from typing import Any

PEERS = pathlib.Path(__file__).parents[1] / "peers"
NETWORKS = ("mlp", "transformer")


class Peer:
    """Another interpreter that runs a program of `peers/` and answers line by line.

    `with` ends it; so does the end of its standard input.
    """

    def __init__(self, python: str, program: str, *arguments: str) -> None:
        self.program = program
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open as long as the process
        self._process = subprocess.Popen(
            [python, "-W", "ignore", str(PEERS / program), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            bufsize=1,
            # Its threads spin while they wait, by default: where other work shares the cores, a
            # step of a millisecond then takes a second.
            env={**os.environ, "OMP_WAIT_POLICY": "passive"},
        )

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Ends the interpreter, and what it holds of the device."""
        if self._process.stdin:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()
        self._errors.close()

    def ask(self, line: str) -> str:
        """Sends a line, returns the answer."""
        if self._process.stdin:
            with contextlib.suppress(BrokenPipeError):  # it ended: why is read below
                self._process.stdin.write(line + "\n")
        return self.answer()

    def answer(self) -> str:
        """Returns the next line; one that ended is an error with its last words."""
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            self._process.wait()
            self._errors.seek(0)
            last = self._errors.read().strip()[-500:]
            raise RuntimeError(f"{self.program} ended: {last or self._process.returncode}")
        return line.strip()


class Torch(Peer):
    """A running interpreter with PyTorch and one network of `torch_steps.py`."""

    def __init__(self, python: str, network: str, size: dict[str, Any]) -> None:
        super().__init__(python, "torch_steps.py", network, json.dumps(size))
        self.version = self.answer()

    def __enter__(self) -> "Torch":
        return self

    def step(self, variant: str) -> float:
        """Runs one step; returns its seconds, measured over there."""
        return float(self.ask(variant))
