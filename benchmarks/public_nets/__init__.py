"""Models that others wrote, unedited, with losses and inputs: by name, made when asked for.

A model's module is imported only then, since each needs packages of its own, which
`public_models.txt` pins. To add one: a function `(size) -> Network` in a module here, a row below.
"""

import dataclasses
import importlib
import importlib.util
from typing import Any

from networks import Network

SIZES = ("tiny", "small")  # run on this CPU · compiled: widths as published, few blocks


@dataclasses.dataclass(frozen=True)
class Public:
    """A model of a package, and what that package offers to run it in 16 bits."""

    package: str  # as pip knows it
    module: str  # of this folder
    function: str
    switch: str | None  # what its users type; None where there is nothing to type
    # Whether it can be compiled for a device that is not here: not where its package looks for one
    # of that platform while it is traced.
    is_counted: bool = True

    def make(self, size: str) -> Network:
        """Returns the model at a size; it imports the package."""
        module: Any = importlib.import_module(f".{self.module}", __name__)
        return getattr(module, self.function)(size)

    @property
    def is_installed(self) -> bool:
        """Whether the package is there; it is not imported."""
        name = IMPORTED.get(self.package, self.package)
        return importlib.util.find_spec(name) is not None


IMPORTED = {"dm-haiku": "haiku", "e3nn-jax": "e3nn_jax"}  # where pip has another name
DTYPE = "dtype="
MODELS: dict[str, Public] = {
    "bert": Public("transformers", "_hugging_face", "bert", DTYPE),
    "gpt2": Public("transformers", "_hugging_face", "gpt2", DTYPE),
    "llama": Public("transformers", "_hugging_face", "llama", DTYPE),
    "t5": Public("transformers", "_hugging_face", "t5", DTYPE),
    "whisper": Public("transformers", "_hugging_face", "whisper", DTYPE),
    "vit": Public("transformers", "_hugging_face", "vit", DTYPE),
    "clip": Public("transformers", "_hugging_face", "clip", DTYPE),
    "unet": Public("diffusers", "_diffusers", "unet", DTYPE),
    "vae": Public("diffusers", "_diffusers", "vae", DTYPE),
    "griffin": Public("recurrentgemma", "_recurrentgemma", "griffin", DTYPE),
    "penzai": Public("penzai", "_penzai", "mistral", "parameter_dtype="),
    "resnet": Public("dm-haiku", "_haiku", "resnet", "hk.mixed_precision"),
    "gat": Public("jraphx", "_jraphx", "gat", None),
    "equivariant": Public("e3nn-jax", "_e3nn", "equivariant", None),
    "equimo": Public("equimo", "_equimo", "dino", None),
    "ode": Public("diffrax", "_diffrax", "neural_ode", None, is_counted=False),
    "ppo": Public("brax", "_brax", "ppo", None),
    "bayes": Public("numpyro", "_numpyro", "bayesian_network", None),
    "spline_flow": Public("distrax", "_distrax", "spline_flow", None),
}
PACKAGES = tuple(dict.fromkeys(model.package for model in MODELS.values()))
