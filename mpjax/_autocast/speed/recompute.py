"""Runs a group so that the backward pass recomputes it from its inputs.

Saved for the backward pass are the group's low inputs and its small statistics: the mean and
variance of a row, the maximum and sum of a softmax. They take little memory, and to recompute each
would be another pass over the inputs. All other values are recomputed: in a loop, a float32 copy of
a small input would be stacked beside the input.
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
    """Returns `fun`, recomputed in its derivative.

    Where XLA would recognise the second computation, it would compute the value once and store it
    in float32 after all. There the derivative reads inputs behind a barrier.

    Args:
      fun: computes the group.
      group: the group.
      inputs: the arrays on which it will be called.
      alone: whether its derivative is in another program, as that of a loop's body is: XLA does not
        compare the two.
    """
    apart = None if alone else _kept_apart(group)
    limit = max(size(x.shape) for x in inputs) // SMALLER  # statistics up to this size are saved
    again = jax.checkpoint(fun, prevent_cse=False, policy=_keeps_small(limit))
    return _apart(fun, again, apart) if apart else again


def _kept_apart(group: FusedGroup) -> Apart | None:
    """Returns a function that puts inputs of a group's derivative behind a barrier, or None."""
    if group.marks.rows is not None:
        return functools.partial(one_apart, which=group.inputs.index(group.marks.rows))
    return all_apart if storage.worth_keeping_apart(group.eqns) else None


def all_apart(inputs: Sequence[Any]) -> list[Any]:
    """Returns inputs behind barriers."""
    return [lowerings.kept_apart(x) for x in inputs]


def one_apart(inputs: Sequence[Any], *, which: int) -> list[Any]:
    """Returns inputs of which one, the logits of a softmax, is behind a barrier on GPUs.

    A mask or a bias that all layers read is saved for the backward pass once; behind a barrier, it
    would be saved for each layer.
    """
    return [lowerings.rows_apart(x) if i == which else x for i, x in enumerate(inputs)]


def _apart(fun: Function, again: Function, apart: Apart) -> Function:
    """Returns `fun` with the derivative of `again`, on inputs behind a barrier.

    The barrier of `jax.checkpoint` includes cotangents too: XLA would store the product that gives
    them before the group's derivative reads it.
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
    """Returns a checkpoint policy that saves small statistics; equal limits share one.

    JAX compares policies by identity: programs with the same policy object can be equal.
    """

    def policy(primitive: Any, *avals: Any, **params: Any) -> bool:
        if primitive is lowerings.STORED:
            return True
        if primitive.name not in traits.STATISTIC:
            return False
        shape = [n for i, n in enumerate(avals[0].shape) if i not in params["axes"]]
        return size(shape) <= limit

    return policy
