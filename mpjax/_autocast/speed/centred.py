"""The affine part of a norm, `(x - m) * s + b`, with a derivative that adds up each array once.

Where `m` and `s` are statistics of more than a row (batch and group normalisation), the derivative
has three sums: of `ct` for `b`, of `ct * s` for `m` and of `ct * (x - m)` for `s`. The second is
`s` times the first, and is computed so here: the tangents of `m` and `b` are added before they are
broadcast. With two sums instead of three, XLA:GPU recomputes `ct` in each kernel that reads it,
where it would store it, or reads its operands once less.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mpjax._autocast.known import traits
from mpjax._autocast.speed import lowerings
from mpjax._autocast.speed.hints import hint
from mpjax._base import compat
from mpjax._jaxpr.equation import Eqn
from mpjax._jaxpr.sizes import is_float32, size

_MOST = 8
"""Steps of a value; each is computed from the first one on, and a norm has four."""
_STEPS: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
}


@dataclass(frozen=True)
class Affine:
    """An array `x` minus a broadcast operand, and further such steps: `(x - m) * s + b`."""

    x: Any
    steps: tuple[tuple[str, Any], ...]  # an operation and its other operand, which is broadcast
    axes: frozenset[int]  # along which all of these operands are broadcast

    def then(self, name: str, operand: Any, axes: frozenset[int]) -> Affine:
        """Returns this value with another step after it."""
        return Affine(self.x, (*self.steps, (name, operand)), self.axes & axes)


class Centred:
    """The affine values of a group that begin with `x - m`, by variable."""

    def __init__(self, eqns: Sequence[Eqn]) -> None:
        self.by_variable: dict[Any, Affine] = {}
        self._repeated: dict[Any, Any] = {}  # broadcasts, by result
        for eqn in eqns:
            self._note(eqn)

    def run(self, eqn: Eqn, values: Mapping[Any, Any], dear: Collection[Any]) -> list[Any]:
        """Returns the result of an equation that ends an affine value of several steps; else [].

        Args:
          eqn: the equation.
          values: of the variables.
          dear: variables whose cotangents are stored, because they are expensive to compute.
        """
        affine = self.by_variable.get(eqn.outvars[0])
        if affine is None or len(affine.steps) == 1:
            return []
        operands = [self._small(v, values) for _, v in affine.steps]
        names = [name for name, _ in affine.steps]
        how = _shifted_apart if eqn.outvars[0] in dear else operator.add
        return [_function(names, how)(values[affine.x], *operands)]

    def _note(self, eqn: Eqn) -> None:
        (out, *_) = eqn.outvars
        if eqn.primitive.name == "broadcast_in_dim" and compat.variables(eqn):
            if size(eqn.invars[0].aval.shape) != size(out.aval.shape):
                self._repeated[out] = eqn
        elif eqn.primitive.name in _STEPS and is_float32(out):
            made = next(filter(None, self._orders(eqn, out)), None)
            if made is not None:
                self.by_variable[out] = made

    def _orders(self, eqn: Eqn, out: Any) -> Iterator[Affine | None]:
        x, y = eqn.invars
        yield self._step(eqn.primitive.name, x, y, out)
        if eqn.primitive.name in ("add", "mul"):
            yield self._step(eqn.primitive.name, y, x, out)

    def _step(self, name: str, x: Any, operand: Any, out: Any) -> Affine | None:
        """Returns the affine value of an operation on `x`, None if its steps are those of rows.

        For statistics of rows (layer normalisation) nothing is gained: a kernel with a whole row on
        the chip computes any number of its sums.
        """
        if compat.is_literal(x) or compat.is_literal(operand) or x.aval.shape != out.aval.shape:
            return None
        before = self.by_variable.get(x)
        if before is not None and len(before.steps) == _MOST:
            before = None
        if before is None and name != "sub":
            return None
        start = before or Affine(x, (), frozenset(range(out.aval.ndim)))
        made = start.then(name, operand, self._axes(operand, out.aval.shape))
        last = range(out.aval.ndim - len(made.axes), out.aval.ndim)
        return None if made.axes == frozenset(last) else made

    def _axes(self, v: Any, shape: Sequence[int]) -> frozenset[int]:
        """Returns the axes along which an operand is broadcast."""
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
        """Returns a broadcast operand before its broadcast, with axes of 1 in place of the new."""
        if v not in self._repeated:
            return values[v]
        eqn = self._repeated[v]
        new = set(range(v.aval.ndim)).difference(eqn.params["broadcast_dimensions"])
        return lax.expand_dims(values[eqn.invars[0]], sorted(new))


@hint("centred", lambda _: Centred([]))
def centred(eqns: Sequence[Eqn]) -> Centred:
    """Returns the affine values of a group."""
    return Centred(eqns)


@hint("shifted_apart", operator.add)
def _shifted_apart(x: jax.Array, shift: jax.Array) -> jax.Array:
    """Returns `x + shift`; a kernel of its own sums the cotangent of the shift.

    XLA:GPU takes two sums of one array in one kernel, and then judges it too expensive to compute
    the array there too; with one sum it does. A sum in two steps, along its first axis last, is
    not merged with the other.
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
        shift: Any = 0.0  # the tangent of the result by all subtracted and added operands
        for name, y, dy in zip(names, operands, moves, strict=True):
            if name in traits.SHIFTS:
                x, shift = _STEPS[name](x, y), _STEPS[name](shift, dy)
            else:
                x, dx = jax.jvp(_STEPS[name], (x, y), (dx, dy))
                shift = _STEPS[name](shift, y)
        return x, shifted(dx, shift)

    return fun
