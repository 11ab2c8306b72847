"""Binds primitives that hold a program beside rules of its author's: changed, types as they were.

A kernel's stand-in (`lax.composite`), a function with a rule for `vmap`, for partitioning or for
transposition, a high-level primitive. What goes in and comes out has the dtypes that the rules were
written for; products inside are low, and so are those of the rules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from mpjax._autocast.arrange.plan import Plan
from mpjax._autocast.run import custom_rules
from mpjax._base import compat
from mpjax._jaxpr import hijax_programs, structure

Interpreter = Any
"""`rebind.Interpreter`, which imports this file."""


def run(runner: Interpreter, eqn: Any, plan: Plan, arrays: Sequence[Any]) -> list[Any]:
    """Returns the results of an equation that holds a program and rules, in float32."""

    def change(fun: Callable[..., Any]) -> Callable[..., Any]:
        return _keeping_types(runner, fun, plan)

    if hijax_programs.holder(eqn) is not None:
        params = hijax_programs.changed(eqn, change)
        return list(eqn.primitive.bind(*arrays, **params))
    key = structure.program_key(eqn)
    params = {**eqn.params, key: _program(eqn.params[key], change)}
    if "rule" in params:
        params["rule"] = change(params["rule"])
    if "transpose_thunk" in params:
        params["transpose_thunk"] = _transposition(params["transpose_thunk"], change)
    return list(eqn.primitive.bind(*arrays, **params))


def _keeping_types(runner: Interpreter, fun: Callable[..., Any], plan: Plan) -> Callable[..., Any]:
    """Returns a function of trees, with its products lowered and its types as they were."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))

        def flat(*leaves: Any) -> Any:
            args, kwargs = jax.tree.unflatten(tree, leaves)
            return fun(*args, **kwargs)

        return custom_rules.keeping_types(runner, flat, plan.settings)(*leaves)

    functools.update_wrapper(wrapped, fun)
    return wrapped


def _program(program: Any, change: Callable[..., Any]) -> Any:
    """Returns a program changed, with the inputs and outputs that it had."""
    return jax.make_jaxpr(change(jaxpr_as_fun(compat.closed(program))))(*program.in_avals)


def _transposition(thunk: Callable[[], Any], change: Callable[..., Any]) -> Callable[[], Any]:
    """Returns what gives the transposed program of a `linear_call`, and its constants."""

    def changed() -> Any:
        program, consts = thunk()
        return _program(program, change), consts

    return functools.cache(changed)
