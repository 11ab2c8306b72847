"""Card 3: models that others wrote in PyTorch, at the sizes of card 2."""

import functools
import json
import sys
from typing import Any

from measure.peer import Peer
from networks import NETWORKS, Network

from . import clock
from .jobs import Job, Row
from .plans import Plan
from .programs import items

# As `peers/torch_models.py` names them.
FLOAT32, TF32, BF16, F16, TF32_COMPILED, BF16_COMPILED = VARIANTS = (
    *("float32", "float32, TF32", "autocast bf16", "autocast f16"),
    *("float32, TF32, compiled", "autocast bf16, compiled"),
)
LOAD = 2  # both threads: each model holds its weights and moments
WHOSE = {
    "transformer": "transformers' GPT-2",
    "llama": "transformers' Llama",
    "bert": "transformers' BERT",
    "vit": "timm's ViT",
    "resnet50": "torchvision's ResNet",
}


class AbsentError(Exception):
    """There is no PyTorch, or none with what a model needs."""


class TorchStep:
    """One variant of a model that trains in another interpreter."""

    multiple = 1

    def __init__(self, peer: Peer, variant: str, facts: Row) -> None:
        self.peer, self.variant, self.facts = peer, variant, facts

    def open(self) -> None:
        """Does nothing: the weights are there, and all variants share them."""

    def run(self, steps: int) -> float:
        """Runs steps over there."""
        return ask(self.peer, "run", self.variant, str(steps))["seconds"]

    def close(self) -> None:
        """Does nothing: the interpreter goes when all variants are measured."""


def ask(peer: Peer, *words: str) -> Row:
    """Returns the answer to a request; an error over there is one here."""
    found = json.loads(peer.ask("\t".join(words)))
    if "error" in found:
        raise RuntimeError(found["error"])
    return found


def jobs(plan: Plan, code: str, python: str, platform: str) -> list[Job]:
    """Returns a job for each model."""
    device = "cpu" if platform == "cpu" else "cuda"
    return [_job(plan, name, size, code, python, device) for name, size in plan.peers.items()]


def _job(plan: Plan, name: str, size: str, code: str, python: str, device: str) -> Job:
    network = NETWORKS[name](size)
    started = functools.partial(start, python, name, network, device)

    def measure(prepared: dict[str, Any]) -> dict[str, Row]:
        found = prepared["torch"]
        if isinstance(found, AbsentError):
            return {variant: {"absent": str(found)} for variant in VARIANTS}
        if isinstance(found, Exception):
            raise found
        peer, ready = found
        with peer:
            rows = clock.in_turns(ready, plan.patience)
        return _with_rates(rows, network, WHOSE[name])

    seconds = 2 * plan.first_s
    return Job(3, name, size, VARIANTS, {"torch": started}, measure, code, seconds, LOAD)


def start(python: str, name: str, network: Network, device: str) -> tuple[Peer, dict[str, Any]]:
    """Returns a running interpreter with the model, each variant compiled and run once."""
    peer = Peer(python, "torch_models.py", name, json.dumps(network.numbers), device)
    first = json.loads(peer.answer())
    if "absent" in first:
        peer.end()
        raise AbsentError(
            f"{first['absent']}; --torch PYTHON names an interpreter with torch, torchvision, "
            f"timm and transformers, and now is {python}"
        )
    return peer, {variant: _prepared(peer, variant, first["version"]) for variant in VARIANTS}


def _prepared(peer: Peer, variant: str, version: str) -> TorchStep | Exception:
    try:
        facts = ask(peer, "prepare", variant)
        return TorchStep(peer, variant, {**facts, **ask(peer, "peak", variant), "torch": version})
    except RuntimeError as error:
        return error


def _with_rates(rows: dict[str, Row], network: Network, whose: str) -> dict[str, Row]:
    count, unit = items(network)
    for row in rows.values():
        row["model"] = whose
        if "ms" in row:
            row["per_second"], row["unit"] = count / row["ms"] * 1e3, unit
    return rows


def default_python() -> str:
    """Returns this interpreter: on a GPU box it has PyTorch too."""
    return sys.executable
