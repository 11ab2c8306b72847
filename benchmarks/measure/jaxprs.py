"""Counts of a traced program: what the backward pass keeps, and how many casts there are."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.extend import core

from mpjax._base import compat

WEIGHTS, BATCH = 1, 2  # bits: what a value depends on


@dataclasses.dataclass(frozen=True)
class Residuals:
    """Bytes that the forward pass hands to the backward pass, the inputs themselves left out."""

    activations: int  # depends on the batch
    weights: int  # low copies of weights and the like: depends on parameters only


def residuals(loss: Any, params: Any, batch: Any) -> Residuals:
    """Returns the size of the leaves of `jax.vjp(loss, params)`'s backward function.

    What is an input is not counted, what appears twice counts once, and a constant (zeros that
    the derivative of relu broadcasts) counts nothing. This is what JAX hands over; under one
    `jit` XLA may still compute some of it again, or drop it.
    """
    leaves = len(jax.tree.leaves(params))

    def keep(params: Any, batch: Any) -> Any:
        return jax.tree.leaves(jax.vjp(lambda p: loss(p, batch), params)[1])

    closed = jax.make_jaxpr(keep)(params, batch)
    flags = [WEIGHTS if i < leaves else BATCH for i in range(len(closed.jaxpr.invars))]
    reach = _reach(closed.jaxpr, flags)
    inputs = set(closed.jaxpr.invars)
    kept = {v: flag for v, flag in zip(closed.jaxpr.outvars, reach, strict=True) if _is_var(v)}
    total = {WEIGHTS: 0, BATCH: 0}
    for var, flag in kept.items():
        if var not in inputs and flag:
            total[BATCH if flag & BATCH else WEIGHTS] += var.aval.size * var.aval.dtype.itemsize
    return Residuals(activations=total[BATCH], weights=total[WEIGHTS])


def converts(fun: Any, *args: Any) -> int:
    """Returns the number of casts between floating dtypes in the jaxpr, loop bodies once."""
    count = 0
    for eqn in _equations(jax.make_jaxpr(fun)(*args).jaxpr):
        if eqn.primitive.name == "convert_element_type":
            old, new = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
            floating = all(jax.numpy.issubdtype(d, jax.numpy.floating) for d in (old, new))
            count += floating and old != new
    return count


def _is_var(atom: Any) -> bool:
    return not isinstance(atom, core.Literal)


def inner_jaxprs(eqn: Any) -> Iterator[Any]:
    """Yields the jaxprs that an equation holds."""
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            inner = getattr(item, "jaxpr", item)
            if hasattr(inner, "eqns"):
                yield inner


def _equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in inner_jaxprs(eqn):
            yield from _equations(inner)


def _reach(jaxpr: Any, flags: Sequence[int]) -> list[int]:
    """Returns for each output which kinds of input it depends on."""
    known = dict(zip(jaxpr.invars, flags, strict=True))

    def read(atom: Any) -> int:
        return known.get(atom, 0) if _is_var(atom) else 0

    for eqn in jaxpr.eqns:
        known.update(zip(eqn.outvars, _through(eqn, [read(a) for a in eqn.invars]), strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _through(eqn: Any, flags: list[int]) -> list[int]:
    """Returns the flags of an equation's results; finer than "any operand" where one looks in."""
    inner = next(inner_jaxprs(eqn), None)
    aligned = inner is not None and (
        (len(inner.invars), len(inner.outvars)) == (len(eqn.invars), len(eqn.outvars))
    )
    if not aligned or eqn.primitive.name == "while":
        union = 0
        for flag in flags:
            union |= flag
        return [union] * len(eqn.outvars)
    if eqn.primitive.name != "scan":
        return _reach(inner, flags)
    consts, carries = compat.scan_counts(eqn.params)
    while True:  # a carry reaches what the next step computes; flags only grow
        out = _reach(inner, flags)
        carried = [a | b for a, b in zip(flags[consts : consts + carries], out, strict=False)]
        if carried == flags[consts : consts + carries]:
            return out
        flags = [*flags[:consts], *carried, *flags[consts + carries :]]
