"""Prints the names of all primitives that JAX and those who extend it can bind, as JSON.

Run by itself: it imports every module of the packages named, which other tests are better without.
"""

import gc
import importlib
import json
import pkgutil
import sys
import warnings

import jax.extend.core

# Command lines, examples, and what only other machines have.
_LEFT_OUT = (
    "test",
    "__main__",
    "benchmark",
    "mosaic_gpu.examples",
    "tensorboard",
    "collect_profile",
)


def import_all(package: str) -> None:
    """Imports a package and each of its public modules that can be imported here."""
    root = importlib.import_module(package)
    for info in pkgutil.walk_packages(root.__path__, f"{package}.", onerror=lambda _: None):
        private = any(part.startswith("_") for part in info.name.split("."))
        if private or any(part in info.name for part in _LEFT_OUT):
            continue
        try:
            importlib.import_module(info.name)
        except ImportError as error:
            print(f"{info.name}: {error}", file=sys.stderr)  # of a package that is not installed


def primitives() -> dict[str, str]:
    """Returns the primitives that live, by name, each with the module of its class."""
    found = (o for o in gc.get_objects() if isinstance(o, jax.extend.core.Primitive))
    return {p.name: type(p).__module__ for p in found}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for name in sys.argv[1:]:
        import_all(name)
    print(json.dumps(primitives()))
