"""Traces a function with custom derivatives, or one of its rules, over the arrays it is given.

JAX passes other things besides arrays (symbolic zeros, flags, logs): these go through untouched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from mpjax._jaxpr.one_form import in_one_form


class RuleTrace:
    """The jaxpr of one call, and the arrays it is for; `rebuild` gives its results as JAX wants."""

    __slots__ = ("_outer", "arrays", "jaxpr")

    def __init__(
        self,
        fun: Callable[..., Any],
        args: Sequence[Any],
        form: Callable[[Any], Any] = lambda array: array,
    ) -> None:
        """Traces `fun(*args)`, each array in the form that `form` gives it."""
        where = [i for i, a in enumerate(args) if is_array(a)]
        self._outer: list[Any] = []

        def flat(*arrays: Any) -> list[Any]:
            full = list(args)
            for i, a in zip(where, arrays, strict=True):
                full[i] = a
            leaves, treedef = jax.tree.flatten(fun(*full))
            self._outer[:] = [treedef, [None if is_array(x) else x for x in leaves]]
            return [x for x in leaves if is_array(x)]

        self.arrays = [args[i] for i in where]
        traced = jax.make_jaxpr(flat)(*map(form, self.arrays))
        self.jaxpr = in_one_form(traced)

    def rebuild(self, outs: Sequence[Any]) -> Any:
        """Returns the result of the call from the results of the jaxpr."""
        results = iter(outs)
        treedef, leaves = self._outer
        return jax.tree.unflatten(treedef, [next(results) if x is None else x for x in leaves])


def is_array(x: Any) -> bool:
    """Whether a leaf is traced: an array is, unless its dtype is `float0` (no tangent)."""
    if not isinstance(x, (jax.Array, np.ndarray, np.generic)):
        return False
    return x.dtype != jax.dtypes.float0
