"""Describes an object for a message, by its library and class where those are known here."""

from typing import Any

import jax

from mpjax._base.dtypes import describe
from mpjax._base.errors import message
from mpjax._base.tree import is_array

# By the names of classes: neither Flax nor Equinox is to be imported for a message.
_KINDS = (
    ("flax.nnx", "Optimizer", "an nnx.Optimizer"),
    ("flax.nnx", "Module", "an nnx.Module"),
    ("flax.linen", "Module", "a linen module that is not initialised"),
    ("flax.training.train_state", "TrainState", "a Flax TrainState"),
    ("mpjax.train", "TrainState", "a whole state"),
    ("mpjax.train", "TrainStep", "a train step"),
    ("mpjax.nnx", "NNXTrainStep", "a train step"),
)

MODULES = frozenset(kind for _, name, kind in _KINDS if name == "Module")


def described(x: Any) -> str:
    """Returns a description of an object for a message, by its library if that is known here."""
    kind = library_kind(x)
    if kind is not None:
        return kind
    if x is None or isinstance(x, (bool, int, float, str)):
        return repr(x)
    if callable(x) and hasattr(x, "__name__"):
        return f"the {'class' if isinstance(x, type) else 'function'} {x.__name__}"
    return describe(x) if is_array(x) else f"a {type(x).__name__}"


def library_kind(x: Any) -> str | None:
    """Returns what a model, state or optimizer of Flax is, or ours; None for anything else."""
    for cls in type(x).__mro__:
        for module, name, kind in _KINDS:
            if cls.__name__ == name and cls.__module__.startswith(module):
                return kind
    return None


def check_is_array(x: Any, name: str, where: str, fix: str) -> None:
    """Raises TypeError for a leaf that is neither an array, nor of shape alone, nor a number."""
    if is_array(x) or isinstance(x, (int, float, complex, jax.ShapeDtypeStruct)):
        return
    got = f"{name} is {described(x)}, which is no array."
    raise TypeError(message(where, got, "Allowed: floating arrays.", fix)) from None
