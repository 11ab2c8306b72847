"""Makes all primitives of our own, so that lists of them are derived and not kept by hand."""

from __future__ import annotations

import jax
from jax.extend.core import Primitive

GPUS = ("cuda", "rocm")
"""The platforms for which a primitive is lowered as for a GPU."""

WATCHED = "mpjax_watched"
"""The scope of what `make_train_step(watch=)` computes beside the step, once in many steps."""

_computing: dict[Primitive, bool] = {}


def own_primitive(name: str, *, computes: bool = False, several: bool = False) -> Primitive:
    """Returns a new primitive, and remembers it as one of ours.

    Args:
      name: as programs and profiles show it.
      computes: whether its results are other values than its operands; else they are the first
        operands, perhaps rounded.
      several: whether it returns a list of results.
    """
    primitive = Primitive(name)
    primitive.multiple_results = several
    _computing[primitive] = computes
    return primitive


def runs_operations_one_by_one() -> bool:
    """Whether JAX is asked to run each operation by itself, also of a primitive of ours.

    Inside `jax.jit` a primitive of ours would be bound again, for ever: under `jax.disable_jit`,
    and where `jax.debug_nans` looks for the operation that made the NaN.
    """
    config = jax.config
    return config.jax_disable_jit or config.jax_debug_nans or config.jax_debug_infs


def is_own(primitive: Primitive) -> bool:
    """Whether a primitive is one that autocast puts into programs."""
    return primitive in _computing


def returns_operands(primitive: Primitive) -> bool:
    """Whether a primitive of ours hands on its first operands, perhaps rounded."""
    return not _computing.get(primitive, True)
