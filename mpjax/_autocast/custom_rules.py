"""Keeps `custom_jvp` and `custom_vjp` rules, each run on the dtypes that it was written for.

The function, its rule and its backward pass are wrapped to trace themselves, be planned, and be
run with the types they had; what JAX passes besides arrays (symbolic zeros, flags, logs) goes
through untouched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from mpjax import _compat
from mpjax._autocast import plan as planning
from mpjax._autocast import reads

Runner = Any
"""`rebind.Runner`, which imports this file."""


def run(runner: Runner, eqn: Any, plan: planning.Plan, arrays: Sequence[Any]) -> list[Any]:
    """Returns the results of a function with custom rules, in float32."""

    def wrap(fun: Callable[..., Any]) -> Callable[..., Any]:
        return keeping_types(runner, fun, plan.settings)

    return list(_compat.bind_custom(eqn, arrays, wrap))


def keeping_types(
    runner: Runner, fun: Callable[..., Any], settings: planning.Settings
) -> Callable[..., Any]:
    """Returns `fun` with its products lowered and its inputs and outputs typed as they were."""

    def wrapped(*args: Any) -> Any:
        where = [i for i, a in enumerate(args) if is_array(a)]
        outer: list[Any] = []

        def flat(*arrays: Any) -> list[Any]:
            full = list(args)
            for i, a in zip(where, arrays, strict=True):
                full[i] = a
            leaves, treedef = jax.tree.flatten(fun(*full))
            outer[:] = [treedef, [None if is_array(x) else x for x in leaves]]
            return [x for x in leaves if is_array(x)]

        arrays = [args[i] for i in where]
        jaxpr = jax.make_jaxpr(flat)(*arrays)
        in_states = tuple(planning.initial_state(v.aval) for v in jaxpr.jaxpr.invars)
        wants = (reads.OUTPUT,) * len(jaxpr.jaxpr.outvars)
        plan = planning.make_plan(jaxpr, in_states, wants, settings)
        full_states = [planning.initial_state(v.aval) for v in jaxpr.jaxpr.outvars]
        outs = iter(runner.run(plan, arrays, out_states=full_states))
        treedef, leaves = outer
        return jax.tree.unflatten(treedef, [next(outs) if x is None else x for x in leaves])

    return wrapped


def is_array(x: Any) -> bool:
    """Whether a leaf is traced: arrays are, except those that stand for no tangent."""
    if not isinstance(x, (jax.Array, np.ndarray, np.generic)):
        return False
    return x.dtype != jax.dtypes.float0
