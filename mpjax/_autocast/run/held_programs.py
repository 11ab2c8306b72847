"""Binds primitives that have a program and rules of its author: both changed, dtypes as they were.

Examples: `lax.composite`, `custom_vmap`, `custom_partitioning`, `linear_call`, a high-level
primitive. Operands and results have the dtypes that the rules were written for; products in the
program and in the rules read low operands.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from mpjax._autocast.arrange.plan import Plan
from mpjax._autocast.copies import gradients
from mpjax._autocast.decide.decided import Settings
from mpjax._autocast.run import custom_rules
from mpjax._base import compat
from mpjax._jaxpr import hijax_programs, structure
from mpjax._jaxpr.equation import Eqn

Interpreter = Any
"""`run.interpreter.Interpreter`, which imports this file."""


def run(runner: Interpreter, eqn: Eqn, plan: Plan, arrays: Sequence[Any]) -> list[Any]:
    """Returns the results of an equation that has a program and rules, in float32."""
    asked, settings = gradients.of_rules(plan), replace(plan.settings, in_rule=True)

    def change(fun: Callable[..., Any]) -> Callable[..., Any]:
        return _keeping_types(runner, fun, asked, settings)

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


def _keeping_types(
    runner: Interpreter, fun: Callable[..., Any], asked: gradients.OfRules, settings: Settings
) -> Callable[..., Any]:
    """Returns a function of trees with products on low operands, and its own dtypes in and out."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))

        def flat(*leaves: Any) -> Any:
            args, kwargs = jax.tree.unflatten(tree, leaves)
            return fun(*args, **kwargs)

        return custom_rules.keeping_types(runner, flat, asked, settings)(*leaves)

    functools.update_wrapper(wrapped, fun)
    return wrapped


def _program(program: Any, change: Callable[..., Any]) -> Any:
    """Returns a changed program with the same types of inputs and outputs."""
    return jax.make_jaxpr(change(jaxpr_as_fun(compat.closed(program))))(*program.in_avals)


def _transposition(thunk: Callable[[], Any], change: Callable[..., Any]) -> Callable[[], Any]:
    """Returns the function that makes a `linear_call`'s transposed program, changed."""

    def changed() -> Any:
        program, consts = thunk()
        return _program(program, change), consts

    return functools.cache(changed)
