"""Finds values that two passes read, with a statistic between them, to store them low.

A norm reads its input for mean and variance, and again to normalise it; its derivative reads its
cotangent for two sums, and again. If statistics are of rows, one kernel with a row on the chip does
both. Statistics of a batch or an image (batch and group normalisation) end one kernel and start the
next: XLA stores the value that both read, in the float32 in which it was computed. The functions
here find such values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from mpjax._autocast.decide.states import Kind, State
from mpjax._autocast.known import norms, scopes, traits
from mpjax._autocast.speed import exact, linear
from mpjax._autocast.speed.centred import Centred
from mpjax._autocast.speed.hints import hint
from mpjax._base import compat
from mpjax._jaxpr import structure
from mpjax._jaxpr.caches import by_program
from mpjax._jaxpr.equation import Eqn, Jaxpr
from mpjax._jaxpr.op_rules import OP_RULES, OpClass, only_moves
from mpjax._jaxpr.sizes import size

BFLOAT16 = jnp.dtype(jnp.bfloat16)
CONVOLUTION = "conv_general_dilated"
SMALLER = 16
"""A value with 1/16 of the elements of another costs next to nothing to store."""
MOST_AGAIN = 128
"""More equations would take longer to compute again than to read; an activation has 20."""
_NOTHING: frozenset[Any] = frozenset()


@hint("held_low", lambda *_: _NOTHING)
def held_low(outputs: Sequence[tuple[Any, bool, bool]], read: set[Any]) -> frozenset[Any]:
    """Returns the low outputs of a group that are in `read`; a GPU stores them low for all."""
    return frozenset(v for v, is_low, _ in outputs if is_low and v in read)


@hint("activated", lambda *_: dict[Any, bool]())
def activated(eqns: Sequence[Eqn]) -> dict[Any, bool]:
    """Returns the normalised values that an activation reads, and whether its derivative is dear.

    The derivative of the normalisation reads the cotangent of such a value several times. After a
    relu each pass recomputes it, from a mask, unless the group reads another large value too. After
    a GELU it is stored: that is dear to compute. An activation may be written out: its operations
    are a function of one value.
    """
    of_norms = norms.results(eqns)
    affine = of_norms.union(
        v for v, made in Centred(eqns).by_variable.items() if len(made.steps) > 1
    )
    if not affine and not any(map(ends_a_kernel, eqns)):
        return {}
    largest = largest_size(eqns)
    origins: dict[Any, Any] = {}  # for a function of one value, that value
    made = {v for eqn in eqns for v in eqn.outvars}
    read = {v for eqn in eqns for v in eqn.invars if not compat.is_literal(v)} - made
    is_joined = sum(size(v.aval.shape) == largest for v in read) > 1
    normalised = set(of_norms)
    dear: dict[Any, bool] = {}
    for eqn in eqns:
        operands = compat.variables(eqn)
        large = {v for v in operands if size(v.aval.shape) == largest}
        of = {origins.get(v, v) for v in large}
        if bends(eqn) and (is_joined or not exact.is_exact(eqn, BFLOAT16)):
            is_dear = not linear.keeps_a_mask_at_most(eqn, {})
            dear |= {v: is_dear or dear.get(v, False) for v in of & normalised}
        elif rather_stored(eqn):
            dear |= dict.fromkeys(of & affine, True)
        if eqn.primitive.name in traits.PERMUTES:
            affine = affine.union(eqn.outvars if affine & of else ())
        elif len(of) == 1 and large == set(operands):
            origins.update(dict.fromkeys(eqn.outvars, *of))
        if ends_a_kernel(eqn) or any(v in normalised for v in operands):
            normalised.update(eqn.outvars)
    return dear


@hint("summed_apart", lambda *_: set[Any]())
def summed_apart(eqns: Sequence[Eqn]) -> set[Any]:
    """Returns the broadcast terms of a group's sums, except those of the first shape.

    In `image + bias + time` the cotangents of the bias (summed over images and places) and of the
    time embedding (over places) are sums of one cotangent, in two kernels. XLA sums for one of them
    in the kernel that computes the cotangent.
    """
    source = {
        eqn.outvars[0]: eqn.invars[0].aval.shape
        for eqn in eqns
        if eqn.primitive.name == "broadcast_in_dim"
    }
    largest = largest_size(eqns)
    shapes: dict[Any, Any] = {}
    for eqn in eqns:
        for v in eqn.invars if eqn.primitive.name in traits.ADDS else ():
            if compat.is_literal(v) or size(eqn.outvars[0].aval.shape) < largest:
                continue
            if v in source or size(v.aval.shape) < size(eqn.outvars[0].aval.shape):
                shapes[v] = source.get(v, v.aval.shape)
    first = next(iter(shapes.values()), None)
    return {v for v, shape in shapes.items() if shape != first}


def summed_cotangents(
    eqns: Sequence[Eqn], outputs: Sequence[tuple[Any, bool, bool]]
) -> frozenset[Any]:
    """Returns the cotangents that a group of a backward pass stores low for a product, and sums.

    Where a program takes its gradient itself, the cotangent of `x @ w + b` is read by two products
    and by the sum that is the gradient of `b`, in another kernel.
    """
    summed = {
        v
        for eqn in eqns
        if scopes.is_transposed(eqn) and ends_a_kernel(eqn)
        for v in compat.variables(eqn)
    }
    return frozenset(v for v, is_low, is_full in outputs if is_low and not is_full and v in summed)


def convolved(jaxpr: Jaxpr) -> set[Any]:
    """Returns the results of a program's convolutions."""
    return {eqn.outvars[0] for eqn in jaxpr.eqns if eqn.primitive.name == CONVOLUTION}


@hint("added_to_convolutions", lambda *_: _NOTHING)
def added_to_convolutions(
    convolved: set[Any], eqns: Sequence[Eqn], inputs: Sequence[Any], states: dict[Any, State]
) -> frozenset[Any]:
    """Returns the sums of a group that only adds a bias or an image to results of convolutions.

    cuDNN adds these as it writes a convolution's result, if all have its dtype.
    """
    sums = [eqn for eqn in eqns if not only_moves(eqn)]
    if not all(map(adds, sums)):
        return _NOTHING
    if any(states[eqn.outvars[0]].kind != Kind.LOW for eqn in sums):
        return _NOTHING  # cuDNN would round a sum that was asked for in float32
    if not any(v in convolved and states[v].kind == Kind.LOW for v in inputs):
        return _NOTHING
    return frozenset(eqn.outvars[0] for eqn in sums)


def largest_size(eqns: Sequence[Eqn]) -> int:
    """Returns how many elements the largest result of some equations has."""
    return max(size(v.aval.shape) for eqn in eqns for v in eqn.outvars)


def bends(eqn: Eqn) -> bool:
    if structure.single_program(eqn) is not None:
        return not ends_a_kernel(eqn)
    return eqn.primitive.name in traits.BENDS


def rather_stored(eqn: Eqn) -> bool:
    """Whether XLA would store an operation's result rather than recompute it: an `exp`."""
    rule = OP_RULES.get(eqn.primitive.name)
    if rule is None or rule.op_class is not OpClass.FULL:
        return False
    return rule.primitive in traits.FUSIBLE and rule.primitive not in traits.STATISTIC


def ends_a_kernel(eqn: Eqn) -> bool:
    """Whether an equation takes a statistic over other axes than the last ones."""
    program = structure.single_program(eqn)
    if program is not None:
        return _holds_an_end(program)
    if eqn.primitive.name not in traits.STATISTIC:
        return False
    axes, ndim = sorted(eqn.params["axes"]), eqn.invars[0].aval.ndim
    return axes != list(range(ndim - len(axes), ndim))


def adds(eqn: Eqn) -> bool:
    """Whether an equation is a sum. A difference is not: it may be `x - mean(x)`."""
    return eqn.primitive.name in traits.ADDS and eqn.primitive.name != "sub"


@hint("kept_apart", lambda _: False)
def kept_apart(eqns: Sequence[Eqn]) -> bool:
    """Whether a group's derivative should recompute its values from inputs behind a barrier.

    It should for an activation. A group with statistics saves these, which tie forward and backward
    together anyway; for a softmax of a product's result see `rows`. A group that only scales, as by
    a gate of channel means, costs nothing to recompute: behind a barrier, its input would be
    stored, which XLA recomputes as well.
    """
    if any(map(takes_a_statistic, eqns)):
        return False
    largest = largest_size(eqns)
    large = [eqn for eqn in eqns if size(eqn.outvars[0].aval.shape) * SMALLER > largest]
    others = [eqn for eqn in large if eqn.primitive.name not in traits.SCALES]
    return not all(linear.keeps_a_mask_at_most(eqn, {}) for eqn in others)


def takes_a_statistic(eqn: Eqn) -> bool:
    """Whether an equation, or the function that it calls, takes a sum or a maximum over an axis."""
    program = structure.single_program(eqn)
    return (
        eqn.primitive.name in traits.STATISTIC if program is None else _holds_a_statistic(program)
    )


@by_program
def _holds_a_statistic(program: Any) -> bool:
    return any(map(takes_a_statistic, compat.closed(program).jaxpr.eqns))


@by_program
def _holds_an_end(program: Any) -> bool:
    return any(map(ends_a_kernel, compat.closed(program).jaxpr.eqns))
