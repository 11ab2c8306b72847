"""Runs a group so that the backward pass recomputes it from its inputs.

Saved for the backward pass are the group's low inputs and its small statistics: the mean and
variance of a row, the maximum and sum of a softmax. They take little memory, and to recompute each
would be another pass over the inputs. All other values are recomputed: in a loop, a float32 copy of
a small input would be stacked beside the input. So are maxima that are compared with what is
recomputed: see `known/extremes`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero

from mpjax._autocast.known import extremes, traits
from mpjax._autocast.speed import lowerings, passes, storage
from mpjax._autocast.speed.hints import hint
from mpjax._autocast.speed.marks import FusedGroup
from mpjax._base import compat
from mpjax._jaxpr.sizes import size

Function = Callable[..., list[Any]]
Apart = Callable[[Sequence[Any]], list[Any]]
"""Returns the inputs of a group as its derivative reads them."""


@hint("recomputed", lambda fun, *_, **__: fun)
def recomputed(fun: Function, group: FusedGroup, inputs: Sequence[Any], *, alone: bool) -> Function:
    """Returns `fun`, recomputed in its derivative.

    Where XLA would recognise the second computation, it would compute the value once and store it
    in float32 after all. There the derivative reads inputs behind a barrier.

    Args:
      fun: computes the group. Of a softmax in several kernels it takes `statistics`, which it
        notes or is given.
      group: the group.
      inputs: the arrays on which it will be called.
      alone: whether its derivative is in another program, as that of a loop's body is: XLA does not
        compare the two.
    """
    apart = None if alone else _set_apart(group)
    largest = max(size(x.shape) for x in inputs)
    limit = largest // storage.SMALLER  # statistics up to this size are saved
    outputs = [v for v, *_ in group.outputs]
    saved = traits.STATISTIC
    if extremes.are_compared(group.eqns, outputs):
        saved -= traits.EXTREME
    policy = _keeps_small(limit, saved)
    checkpoint = functools.partial(jax.checkpoint, prevent_cse=False, policy=policy)
    if apart is None:
        return checkpoint(fun)
    if group.marks.passed is not None:
        return _apart_by_statistics(fun, checkpoint, apart)
    return _differentiated_apart(fun, checkpoint(fun), apart)


def _set_apart(group: FusedGroup) -> Apart | None:
    """Returns a function that puts inputs of a group's derivative behind a barrier, or None."""
    if group.marks.rows is not None:
        return functools.partial(one_apart, which=group.inputs.index(group.marks.rows))
    if group.marks.passed is not None:
        times = 1 + passes.Passes(group.eqns, group.marks.passed).count
        which = group.inputs.index(group.marks.passed)
        return functools.partial(one_apart, which=which, times=times)
    return all_apart if storage.kept_apart(group.eqns) else None


def all_apart(inputs: Sequence[Any]) -> list[Any]:
    """Returns inputs behind barriers."""
    return [lowerings.behind_barrier(x) for x in inputs]


def one_apart(inputs: Sequence[Any], *, which: int, times: int = 1) -> list[Any]:
    """Returns inputs of which one, the logits of a softmax, is behind barriers on GPUs.

    XLA takes two values behind equally many barriers for one: there is one more than forward.

    A mask or a bias that all layers read is saved for the backward pass once; behind a barrier, it
    would be saved for each layer.
    """
    others = list(inputs)
    for _ in range(times):
        others[which] = lowerings.behind_barrier_on_gpus(others[which])
    return others


def _apart_by_statistics(fun: Any, checkpoint: Any, apart: Apart) -> Function:
    """Returns `fun` with its statistics given to its derivative, on inputs behind a barrier.

    On inputs behind a barrier it would compute them again, in passes of their own.
    """

    def noting(*inputs: Any) -> tuple[list[Any], list[Any]]:
        statistics = passes.Statistics()
        return fun(*inputs, statistics=statistics), statistics.noted

    def again(before: tuple[list[Any], list[Any]], *inputs: Any) -> tuple[list[Any], list[Any]]:
        _, taken = before
        return given(taken, *inputs)

    @checkpoint
    def given(taken: list[Any], *inputs: Any) -> tuple[list[Any], list[Any]]:
        statistics = passes.Statistics(given=iter(taken))
        outs = fun(*inputs, statistics=statistics)
        return outs, taken

    run = _differentiated_apart(noting, again, apart, of_results=True)
    return lambda *inputs: run(*inputs)[0]


def _differentiated_apart(fun: Any, again: Any, apart: Apart, *, of_results: bool = False) -> Any:
    """Returns `fun` with the derivative of `again`, on inputs behind a barrier.

    The barrier of `jax.checkpoint` includes cotangents too: XLA would store the product that gives
    them before the group's derivative reads it.

    `of_results`: whether `again` takes the results of `fun` too, as its first argument.
    """

    @jax.custom_jvp
    def run(*inputs: Any) -> Any:
        return fun(*inputs)

    @functools.partial(run.defjvp, symbolic_zeros=True)
    def _(inputs: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        moving = [i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]
        others = apart(inputs)
        before = [run(*inputs)] if of_results else []

        def of_moving(*values: Any) -> Any:
            mixed = list(others)
            for i, value in zip(moving, values, strict=True):
                mixed[i] = value
            return again(*before, *mixed)

        _, outs = jax.jvp(of_moving, [others[i] for i in moving], [tangents[i] for i in moving])
        return (before or [run(*inputs)])[0], outs

    return compat.inlined(run)


@functools.lru_cache(maxsize=1024)
def _keeps_small(limit: int, statistics: frozenset[str]) -> Callable[..., bool]:
    """Returns a checkpoint policy that saves small statistics; equal arguments share one.

    JAX compares policies by identity: programs with the same policy object can be equal.
    """

    def policy(primitive: Any, *avals: Any, **params: Any) -> bool:
        if primitive is lowerings.STORED:
            return True
        if primitive.name not in statistics:
            return False
        shape = [n for i, n in enumerate(avals[0].shape) if i not in params["axes"]]
        return size(shape) <= limit

    return policy
