"""Binds equations again: on other operands, at the place where their author wrote them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import source_info_util

from mpjax._base import compat
from mpjax._jaxpr.equation import Eqn, Jaxpr

_BOUND_OFTEN = frozenset({"broadcast_in_dim", "reshape", "squeeze", "transpose"})
"""Primitives that move one array, and that a network binds often."""


def inside(eqn: Eqn, count: int) -> contextlib.AbstractContextManager[None]:
    """Gives equations bound in the block an equation's outermost scopes and its source line."""
    return _at(eqn.source_info.traceback, eqn.source_info.name_stack[:count])


@contextlib.contextmanager
def written_at(eqn: Eqn, within: int = 0) -> Generator[None]:
    """Gives equations bound in the block the scopes and the source line of an equation.

    Args:
      eqn: the equation.
      within: the number of its outermost scopes that the block is in already.
    """
    with _at(eqn.source_info.traceback, eqn.source_info.name_stack[within:]), eqn.ctx.manager:
        yield


def written_here(eqn: Eqn) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Returns what `written_at` gives, and the present scopes, to what a reader binds later."""
    here = source_info_util.current_name_stack()

    @contextlib.contextmanager
    def later() -> Generator[None]:
        traceback = eqn.source_info.traceback
        with source_info_util.user_context(traceback, name_stack=here), eqn.ctx.manager:
            yield

    return later


def _at(traceback: Any, names: Any) -> contextlib.AbstractContextManager[None]:
    stack = source_info_util.current_name_stack() + names
    return source_info_util.user_context(traceback, name_stack=stack)


def bind(eqn: Eqn, values: Sequence[Any], params: Any = None) -> list[Any]:
    """Returns the results of an equation on other operands."""
    params = eqn.params if params is None else params
    bound = compat.bind(eqn.primitive, values, params)
    return list(bound) if eqn.primitive.multiple_results else [bound]


def moved(eqn: Eqn, values: Sequence[Any]) -> list[Any]:
    """Returns the results of an equation on other operands; JAX differentiates equal moves once."""
    if eqn.primitive.name not in _BOUND_OFTEN or len(values) != 1:
        return bind(eqn, values)
    return [_move(eqn.primitive, tuple(sorted(eqn.params.items())))(*values)]


@functools.lru_cache(maxsize=1024)
def _move(primitive: Any, params: Any) -> Callable[..., Any]:
    return compat.inlined(lambda x: compat.bind(primitive, [x], dict(params)))


def cast(x: Any, dtype: Any) -> Any:
    """Returns an array in another dtype; JAX differentiates equal casts once."""
    if not isinstance(x, jax.Array):
        return x.astype(dtype)
    return x if x.dtype == dtype else _casting(jax.numpy.dtype(dtype))(x)


@functools.cache
def _casting(dtype: Any) -> Callable[..., Any]:
    return compat.inlined(functools.partial(lax.convert_element_type, new_dtype=dtype))


def evaluate(
    program: Any,
    values: Sequence[Any],
    run: Callable[[Any, list[Any]], Sequence[Any]],
    *,
    constant: Callable[[Any, Any], Any] = lambda x, aval: x,
    only_live: bool = False,
) -> list[Any]:
    """Returns the outputs of a program: arrays, or other values that `run` can compute with.

    Args:
      program: a jaxpr.
      values: its inputs.
      run: returns the results of an equation, given its operands.
      constant: returns the value for a constant and its type.
      only_live: whether to run only the equations that an output needs.
    """
    program = compat.closed(program)
    jaxpr = program.jaxpr
    env = {v: constant(x, v.aval) for v, x in zip(jaxpr.constvars, program.consts, strict=True)}
    env |= dict(zip(jaxpr.invars, values, strict=True))

    def read(atom: Any) -> Any:
        return constant(atom.val, atom.aval) if compat.is_literal(atom) else env[atom]

    compute(live(jaxpr) if only_live else jaxpr.eqns, env, read, run)
    return [read(atom) for atom in jaxpr.outvars]


def live(jaxpr: Jaxpr) -> list[Eqn]:
    """Returns the equations of an open jaxpr that an output needs: a derivative may have others."""
    needed = set(map(id, jaxpr.outvars))
    equations: list[Eqn] = []
    for eqn in reversed(jaxpr.eqns):
        if any(id(v) in needed for v in eqn.outvars):
            needed.update(map(id, eqn.invars))
            equations.append(eqn)
    return equations[::-1]


def compute(
    equations: Sequence[Any],
    env: dict[Any, Any],
    read: Callable[[Any], Any],
    run: Callable[[Any, list[Any]], Sequence[Any]],
) -> None:
    """Adds the results of equations to the values of variables.

    Args:
      equations: in order.
      env: the value of each variable so far.
      read: returns the value of an operand.
      run: returns the results of an equation, given its operands.
    """
    for eqn in equations:
        outs = run(eqn, [read(atom) for atom in eqn.invars])
        env.update(zip(eqn.outvars, outs, strict=True))
