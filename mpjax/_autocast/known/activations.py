"""Whether a called function is one of JAX's activations: by what it computes, not by its name.

A name proves nothing, for a user's `mish` may be an exponential. So a function that is called like
an activation is compared, operation by operation, with what `jax.nn` does for the same types.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Hashable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from mpjax._base import compat
from mpjax._base.errors import message, warn
from mpjax._base.foreign_names import PRIMITIVES
from mpjax._jaxpr import structure
from mpjax._jaxpr.caches import by_program
from mpjax._jaxpr.equation import Eqn
from mpjax._jaxpr.op_rules import ACTIVATIONS

_IN_DERIVATIVES = {"exp_neg_sq": lambda x: jax.jvp(jax.lax.erfc, (x,), (x,))}
"""Functions that JAX 0.12 writes into derivatives, and a function that calls each.

This one is `exp(-x * x)`. It takes the bits of `x` apart, and yet may read a rounded `x`.
"""


def warn_of_unused(rules: Iterable[str], program: Any) -> None:
    """Warns of rules for functions that a program does not call: JAX inlines some of its own."""
    names = [name for name in rules if name in ACTIVATIONS]
    if not names:
        return
    calls = [e for e in compat.equations(program) if structure.single_program(e) is not None]
    called = set(map(structure.function_name, calls))
    for name in names:
        if name in called:
            continue
        part = PRIMITIVES.get(name)
        text = message(
            "autocast(rules=)",
            f"the function calls no {name!r}.",
            "JAX inlines some of its activations, so that a rule cannot find them.",
            f'Type rules={{"{part}": ...}}.'
            if part
            else "Type `with mpjax.full_precision():` there.",
        )
        warn(text)


def is_activation(eqn: Eqn) -> bool:
    """Whether an equation calls one of `jax.nn`'s activations, or a part of a derivative of one."""
    name = structure.function_name(eqn)
    is_named = name in ACTIVATIONS or name in _IN_DERIVATIVES
    return is_named and _is_named(structure.single_program(eqn), name)


def is_in_a_derivative(eqn: Eqn) -> bool:
    """Whether an equation calls a function that JAX writes into the derivative of an activation."""
    is_one = eqn.primitive.name == "custom_jvp_call"
    return is_one and structure.function_name(eqn) in _IN_DERIVATIVES and is_activation(eqn)


@by_program
def _is_named(program: Any, name: str) -> bool:
    mine = _signature(program)
    args = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in compat.closed(program).in_avals]
    return any(_signature(known) == mine for known in _references(name, args))


@functools.cache
def _forms(name: str) -> list[tuple[Any, inspect.Signature]]:
    """Returns what JAX has under a name, under `jit`, which remembers what it traced."""
    known = getattr(jax.nn, name, None) or _IN_DERIVATIVES.get(name)
    forms = [] if known is None else [known]
    if name == "gelu":
        forms = [functools.partial(jax.nn.gelu, approximate=a) for a in (True, False)]
    return [(jax.jit(form), inspect.signature(form)) for form in forms]


def _references(name: str, args: list[Any]) -> Iterator[Any]:
    """Yields the programs that JAX has under a name, for arguments of these types."""
    for form, signature in _forms(name):
        try:
            signature.bind(*args)
            traced = form.trace(*args).jaxpr
        except (TypeError, ValueError):  # takes other arguments: a user's function, a derivative
            continue
        yield traced  # JAX inlines some of them, which a user may have put under `jit`
        for eqn in compat.equations(traced):
            if structure.single_program(eqn) is not None and structure.function_name(eqn) == name:
                yield structure.single_program(eqn)


@by_program
def _signature(program: Any) -> Hashable:
    """Returns a key that two programs share if they compute the same in the same way."""
    jaxpr = compat.closed(program).jaxpr
    place = {v: i for i, v in enumerate((*jaxpr.constvars, *jaxpr.invars))}

    def of(atom: Any) -> Hashable:
        if compat.is_literal(atom):
            return atom.aval.dtype, np.asarray(atom.val).tobytes()
        return place[atom]

    rows: list[Hashable] = [(v.aval.shape, v.aval.dtype) for v in jaxpr.invars]
    for eqn in jaxpr.eqns:
        inner = tuple(_signature(p) for p in compat.programs(eqn))
        plain = tuple((k, v) for k, v in sorted(eqn.params.items()) if _is_plain(v))
        rows.append((eqn.primitive, inner, plain, *map(of, eqn.invars)))
        place |= {v: i for i, v in enumerate(eqn.outvars, start=len(place))}
    return (*rows, *map(of, jaxpr.outvars))


def _is_plain(param: Any) -> bool:
    """Numbers, shapes and dtypes say what is computed; rules, names and shardings do not."""
    if isinstance(param, tuple):
        return all(map(_is_plain, param))
    return isinstance(param, (bool, int, float, np.dtype))
