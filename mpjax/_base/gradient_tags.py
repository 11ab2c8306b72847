"""Remembers, for gradient arrays, the loss scale by which they are multiplied, or that none is.

A gradient is a plain array. If the very array that `value_and_grad` returned gets to `tx.update`,
the optimizer can tell that it was taken with its own loss scale. Arithmetic on it, or the end of a
jitted function, makes another array, of which nothing is known.
"""

import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.core

from mpjax._base.typing import PyTree

# id of an array → a weak reference to it, and a function of its scale, None for a true gradient.
_KNOWN: dict[int, tuple["weakref.ref[Any]", Callable[[], Any] | None]] = {}


def tag(grads: PyTree, factor: Any) -> None:
    """Notes that gradients are multiplied by `factor`, an array; None for true ones.

    It keeps no gradient and no tracer alive.
    """
    if factor is not None and not isinstance(factor, jax.Array):
        return
    is_traced = isinstance(factor, jax.core.Tracer)
    scale = weakref.ref(factor) if is_traced else None if factor is None else lambda: factor
    for leaf in jax.tree.leaves(grads):
        if isinstance(leaf, jax.Array):
            _KNOWN[id(leaf)] = (weakref.ref(leaf, _forget(id(leaf))), scale)


def is_gradient(leaf: Any) -> bool:
    """Whether an array is known to be a gradient."""
    return _of(leaf) is not None


def is_true(leaf: Any) -> bool:
    """Whether a gradient is known not to be multiplied by a scale."""
    known = _of(leaf)
    return known is not None and known[1] is None


def factor_of(leaf: Any) -> Any:
    """Returns the scale by which a gradient is multiplied; None if that is not known."""
    known = _of(leaf)
    return None if known is None or known[1] is None else known[1]()


def _of(leaf: Any) -> Any:
    known = _KNOWN.get(id(leaf))
    return known if known is not None and known[0]() is leaf else None


def _forget(key: int) -> Any:
    def forget(ref: Any) -> None:
        # Another array may have the same id by now.
        if key in _KNOWN and _KNOWN[key][0] is ref:
            del _KNOWN[key]

    return forget
