"""Runs a group so that the backward pass computes it again, from little.

What is kept are the group's inputs, low, and its small statistics: the mean and variance of a row,
the maximum and sum of a softmax. They cost nothing to keep, and without them each would be another
pass over the inputs. All else comes from these again: in a loop, a float32 copy of a small input
would be stacked beside the input.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero

from mpjax._autocast.decide import traits
from mpjax._autocast.decide.states import SMALLER, size
from mpjax._autocast.speed import lowerings, storage
from mpjax._autocast.speed.hints import hint
from mpjax._autocast.speed.marks import FusedGroup
from mpjax._base import compat

Function = Callable[..., list[Any]]
Apart = Callable[[Sequence[Any]], list[Any]]
"""Returns the inputs of a group as its derivative reads them."""


@hint("recomputed", lambda fun, *_, **__: fun)
def recomputed(fun: Function, group: FusedGroup, inputs: Sequence[Any], *, alone: bool) -> Function:
    """Returns `fun`, computed again where its derivative needs it.

    Where XLA would recognise what is computed twice, compute it once, and store it after all, in
    float32, the derivative is given inputs that XLA takes for others.

    Args:
      fun: what computes the group.
      group: which one.
      inputs: what it will be called on.
      alone: whether its derivative stands in another program, as that of a loop's body does: XLA
        recognises nothing there.
    """
    apart = None if alone else _kept_apart(group)
    limit = max(size(x.shape) for x in inputs) // SMALLER  # statistics up to this are kept
    again = jax.checkpoint(fun, prevent_cse=False, policy=_keeps_small(limit))
    return _apart(fun, again, apart) if apart else again


def _kept_apart(group: FusedGroup) -> Apart | None:
    """Returns what keeps a group's inputs apart from those of its derivative, if that pays."""
    if group.marks.rows is not None:
        return functools.partial(one_apart, which=group.inputs.index(group.marks.rows))
    return all_apart if storage.worth_keeping_apart(group.eqns) else None


def all_apart(inputs: Sequence[Any]) -> list[Any]:
    """Returns inputs as values that XLA takes for others."""
    return [lowerings.kept_apart(x) for x in inputs]


def one_apart(inputs: Sequence[Any], *, which: int) -> list[Any]:
    """Returns inputs of which a GPU takes one, from which all follows, for another.

    A mask or a bias that all layers read is kept for the backward pass once; apart, it would be
    kept for each layer.
    """
    return [lowerings.rows_apart(x) if i == which else x for i, x in enumerate(inputs)]


def _apart(fun: Function, again: Function, apart: Apart) -> Function:
    """Returns `fun` with the derivative of `again`, of inputs in which XLA does not recognise it.

    The barrier of `jax.checkpoint` holds cotangents too, so that the product which makes them is
    stored before the group's derivative reads it.
    """

    @jax.custom_jvp
    def run(*inputs: Any) -> list[Any]:
        return fun(*inputs)

    @functools.partial(run.defjvp, symbolic_zeros=True)
    def _(inputs: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        moving = [i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]
        others = apart(inputs)

        def of_moving(*values: Any) -> list[Any]:
            mixed = list(others)
            for i, value in zip(moving, values, strict=True):
                mixed[i] = value
            return again(*mixed)

        _, outs = jax.jvp(of_moving, [others[i] for i in moving], [tangents[i] for i in moving])
        return run(*inputs), outs

    return compat.inlined(run)


@functools.lru_cache(maxsize=1024)
def _keeps_small(limit: int) -> Callable[..., bool]:
    """A checkpoint policy; equal limits share one, so that equal programs are."""

    def policy(primitive: Any, *avals: Any, **params: Any) -> bool:
        if primitive is lowerings.STORED:
            return True
        if primitive.name not in traits.STATISTIC:
            return False
        kept = [n for i, n in enumerate(avals[0].shape) if i not in params["axes"]]
        return size(kept) <= limit

    return policy
