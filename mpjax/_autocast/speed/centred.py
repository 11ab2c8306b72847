"""The affine part of a norm, `(x - m) * s + b`, with a derivative that adds up each array once.

Where `m` and `s` are of more than a row (batch and group normalisation), the derivative holds
three sums: of `ct` for `b`, of `ct * s` for `m` and of `ct * (x - m)` for `s`. The second is `s`
times the first, and is taken so here: tangents of what is repeated meet before they are repeated.
With two sums in place of three XLA:GPU computes `ct` again in each kernel that reads it, where it
would store it, or reads what it is made of once less.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mpjax._autocast.decide import traits
from mpjax._autocast.decide.states import is_float32, size
from mpjax._autocast.speed import lowerings
from mpjax._autocast.speed.hints import hint
from mpjax._base import compat

_STEPS: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
}


@dataclass(frozen=True)
class Affine:
    """`x`, less something, and what else it is multiplied by, divided by or added to."""

    x: Any
    steps: tuple[tuple[str, Any], ...]  # an operation and its other operand, which is repeated
    axes: frozenset[int]  # along which all of these are

    def then(self, name: str, operand: Any, axes: frozenset[int]) -> Affine:
        """Returns this with another step."""
        return Affine(self.x, (*self.steps, (name, operand)), self.axes & axes)


class Centred:
    """The affine values of a group that begin with `x - m`, by the variable that holds them."""

    def __init__(self, eqns: Sequence[Any]) -> None:
        self.by_variable: dict[Any, Affine] = {}
        self._repeated: dict[Any, Any] = {}  # equations that do nothing but to repeat
        for eqn in eqns:
            self._note(eqn)

    def run(self, eqn: Any, values: Mapping[Any, Any], dear: Collection[Any]) -> list[Any]:
        """Returns the result of an equation that makes a scaled one; of any other nothing.

        Args:
          eqn: the equation.
          values: of the variables.
          dear: those whose cotangents are stored, and dear to compute.
        """
        affine = self.by_variable.get(eqn.outvars[0])
        if affine is None or len(affine.steps) == 1:
            return []
        operands = [self._small(v, values) for _, v in affine.steps]
        names = [name for name, _ in affine.steps]
        how = _shifted_apart if eqn.outvars[0] in dear else operator.add
        return [_function(names, how)(values[affine.x], *operands)]

    def _note(self, eqn: Any) -> None:
        (out, *_) = eqn.outvars
        if eqn.primitive.name == "broadcast_in_dim" and compat.variables(eqn):
            if size(eqn.invars[0].aval.shape) != size(out.aval.shape):
                self._repeated[out] = eqn
        elif eqn.primitive.name in _STEPS and is_float32(out):
            made = next(filter(None, self._orders(eqn, out)), None)
            if made is not None:
                self.by_variable[out] = made

    def _orders(self, eqn: Any, out: Any) -> Iterator[Affine | None]:
        x, y = eqn.invars
        yield self._step(eqn.primitive.name, x, y, out)
        if eqn.primitive.name in ("add", "mul"):
            yield self._step(eqn.primitive.name, y, x, out)

    def _step(self, name: str, x: Any, operand: Any, out: Any) -> Affine | None:
        """Returns what an operation makes of `x`; None where rows alone are repeated, or nothing.

        A kernel that holds a row adds up as much of it as is asked for.
        """
        if compat.is_literal(x) or compat.is_literal(operand) or x.aval.shape != out.aval.shape:
            return None
        before = self.by_variable.get(x)
        if before is None and name != "sub":
            return None
        start = before or Affine(x, (), frozenset(range(out.aval.ndim)))
        made = start.then(name, operand, self._axes(operand, out.aval.shape))
        last = range(out.aval.ndim - len(made.axes), out.aval.ndim)
        return None if made.axes == frozenset(last) else made

    def _axes(self, v: Any, shape: Sequence[int]) -> frozenset[int]:
        """Returns the axes along which an operand is repeated."""
        sizes = self._sizes(v)
        if len(sizes) != len(shape):
            return frozenset()
        return frozenset(i for i, n in enumerate(shape) if sizes[i] == 1 and n != 1)

    def _sizes(self, v: Any) -> list[int]:
        if v not in self._repeated:
            return list(v.aval.shape)
        eqn, sizes = self._repeated[v], [1] * v.aval.ndim
        of = eqn.invars[0].aval.shape
        for axis, n in zip(eqn.params["broadcast_dimensions"], of, strict=True):
            sizes[axis] = n
        return sizes

    def _small(self, v: Any, values: Mapping[Any, Any]) -> Any:
        """Returns what is repeated, with axes of size 1 along which it is."""
        if v not in self._repeated:
            return values[v]
        eqn = self._repeated[v]
        new = set(range(v.aval.ndim)).difference(eqn.params["broadcast_dimensions"])
        return lax.expand_dims(values[eqn.invars[0]], sorted(new))


@hint("centred", lambda _: Centred([]))
def centred(eqns: Sequence[Any]) -> Centred:
    """Returns the affine values of a group."""
    return Centred(eqns)


@hint("shifted_apart", operator.add)
def _shifted_apart(x: jax.Array, shift: jax.Array) -> jax.Array:
    """Returns `x + shift`, the cotangent of the shift added up in a kernel of its own.

    XLA:GPU adds up two sums of one array in one kernel, and then finds it too dear to compute the
    array there too; with one sum it does. Taken in two steps, along its first axis last, a sum is
    unlike the other.
    """
    repeated = [i for i, n in enumerate(shift.shape) if n == 1 != x.shape[i]]
    if len(repeated) < 2:
        return x + shift
    first, *_ = repeated
    shape = [x.shape[i] if i == first else n for i, n in enumerate(shift.shape)]
    return x + lowerings.summed_first(jnp.broadcast_to(shift, shape))


def _function(names: Sequence[str], shifted: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    @jax.custom_jvp
    def fun(x: Any, *operands: Any) -> Any:
        for name, y in zip(names, operands, strict=True):
            x = _STEPS[name](x, y)
        return x

    @fun.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        (x, *operands), (dx, *moves) = primals, tangents
        shift: Any = 0.0  # by how much all that is subtracted and added moves the result
        for name, y, dy in zip(names, operands, moves, strict=True):
            if name in traits.SHIFTS:
                x, shift = _STEPS[name](x, y), _STEPS[name](shift, dy)
            else:
                x, dx = jax.jvp(_STEPS[name], (x, y), (dx, dy))
                shift = _STEPS[name](shift, y)
        return x, shifted(dx, shift)

    return fun
