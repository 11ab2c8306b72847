"""Nonlinear functions of one value (activations), differentiated at a copy of their input.

XLA:GPU treats `tanh` as expensive: where two kernels need it, or two branches of one kernel, one
stores it in float32 for the other. It does so between the gradients of both halves of a gate,
`tanh(a) * sigmoid(b)`, and between forward and backward pass, where the statistics of a norm tie
both to one input. So the derivative reads a copy of the input behind a barrier, which XLA does not
recognise: its `tanh` is another one, and each kernel computes its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from mpjax._autocast.known import fusible, norms, traits
from mpjax._autocast.speed import lowerings, moves, storage
from mpjax._autocast.speed.hints import hint
from mpjax._base import compat
from mpjax._base.dtypes import FLOAT32
from mpjax._jaxpr.binding import bind, compute, written_at
from mpjax._jaxpr.equation import Eqn
from mpjax._jaxpr.sizes import is_float32, size

_AFFINE = traits.SCALES | traits.SHIFTS | traits.PERMUTES | traits.SLICES | traits.REPEATS
_IN_PLACE = traits.FUSIBLE - (traits.PERMUTES | traits.SLICES | traits.RESIZES | traits.TURNS)


@dataclass
class Curve:
    """A function of one value, and the equations that compute this value from a group's inputs."""

    of: Any
    eqns: list[Eqn] = field(default_factory=list)
    result: Any = None
    before: Sequence[Any] = ()  # the sums, scales and moves that compute the value
    inputs: Collection[Any] = ()  # the large inputs of the group among their operands

    def run(self, given: Mapping[Any, Any], local: Mapping[Any, Any], around: int) -> Any:
        """Returns the result.

        Args:
          given: the inputs of the group, in the dtypes in which they were made.
          local: the values that the group has computed so far.
          around: the number of scopes that are open already.
        """
        apart = {v: lowerings.behind_barrier_on_gpus(given[v]) for v in self.inputs}
        again = _evaluated(self.before, {**local, **apart}, around)[self.of]

        def fun(x: Any) -> Any:
            return _evaluated(self.eqns, {self.of: x}, around)[self.result]  # closes over no tracer

        return _differentiated_at(fun)(widened(self.of, local[self.of]), widened(self.of, again))


def _differentiated_at(fun: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    """Returns `fun` of two equal values: computed of the first, differentiated at the second."""

    @jax.custom_jvp
    def at(x: Any, again: Any) -> Any:
        del again
        return fun(x)

    @at.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        x, again = primals
        _, tangent = jax.jvp(fun, (lowerings.on_gpus(x, again),), (tangents[0],))
        return at(x, again), tangent

    return at


def _evaluated(eqns: Sequence[Eqn], values: Mapping[Any, Any], around: int) -> Mapping[Any, Any]:
    env = dict(values)

    def read(atom: Any) -> Any:
        return atom.val if compat.is_literal(atom) else widened(atom, env[atom])

    def run(eqn: Eqn, operands: list[Any]) -> list[Any]:
        with written_at(eqn, around):
            return bind(eqn, operands)

    compute(eqns, env, read, run)
    return env


def widened(var: Any, array: Any) -> Any:
    """Returns an array as a group computes with it: a low one in float32."""
    return array.astype(FLOAT32) if is_float32(var) and array.dtype != FLOAT32 else array


@hint("curves_apart", lambda *_: {})
def curves(
    eqns: Sequence[Eqn],
    inputs: Collection[Any],
    outputs: Collection[Any],
    others: Collection[Any] = (),
) -> dict[Any, Curve | None]:
    """Returns the costly curves of a group that gate another part of their input or follow a norm.

    Args:
      eqns: the equations of the group.
      inputs: the variables that it reads.
      outputs: its variables that are read elsewhere.
      others: its variables that another way computes; no curve contains them.

    Returns:
      Each curve by the first variable that it makes; None by each of its other variables.
    """
    by_variable: dict[Any, Curve | None] = {}
    for curve in _CurveSearch(eqns, inputs, outputs).found():
        first, *rest = made = [eqn.outvars[0] for eqn in curve.eqns]
        if not set(others).intersection(made):
            by_variable |= {first: curve, **dict.fromkeys(rest)}
    return by_variable


class _CurveSearch:
    """One pass over the equations of a group."""

    def __init__(
        self, eqns: Sequence[Eqn], inputs: Collection[Any], outputs: Collection[Any]
    ) -> None:
        self.eqns, self.inputs = eqns, inputs
        self.makers = {v: i for i, eqn in enumerate(eqns) for v in eqn.outvars}
        self.readers = moves.read_at(eqns)
        self.least = max((size(v.aval.shape) for v in inputs), default=0) // storage.SMALLER
        self.by_origin: dict[Any, Curve] = {}
        self.origins: dict[Any, Any] = {}
        for eqn in eqns:
            self.note(eqn)
        self.results: dict[Any, Curve] = {}  # curves of which others read one value, by that value
        for curve in self.by_origin.values():
            self.end(curve, outputs)

    def note(self, eqn: Eqn) -> None:
        """Adds an equation to the curve of its operands, if these are functions of one value."""
        of = {self.origins.get(v, v) for v in compat.variables(eqn)}
        if len(of) == 1 and _is_elementwise(eqn):
            (x,) = of
            self.by_origin.setdefault(x, Curve(x)).eqns.append(eqn)
            self.origins[eqn.outvars[0]] = x

    def end(self, curve: Curve, outputs: Collection[Any]) -> None:
        """Sets the result of a curve: its one value that other equations read, if there is one."""
        made = {eqn.outvars[0]: self.makers[eqn.outvars[0]] for eqn in curve.eqns}
        inside = set(made.values())
        read = {v for v in made if not inside.issuperset(self.readers.get(v, ()))}
        read |= made.keys() & outputs
        if len(read) == 1:
            (curve.result,) = read
            self.results[curve.result] = curve

    def found(self) -> Iterator[Curve]:
        """Yields the curves for which a copy of the input saves bytes."""
        of_norms = norms.results(self.eqns)
        gates = self.gates()
        for curve in self.results.values():
            is_tied = curve.of in of_norms and _is_costly(curve)
            if not is_tied and curve.result not in gates:
                continue
            if self.begins(curve) and (is_tied or _is_cut(curve)):
                yield curve

    def gates(self) -> set[Any]:
        """Returns the factors of products `tanh(a) * b`: both large, one the result of a curve."""
        gates: set[Any] = set()
        for eqn in self.eqns:
            factors = {v for v in compat.variables(eqn) if self.is_large(v)}
            curves = [self.results[v] for v in factors if v in self.results]
            if eqn.primitive.name == "mul" and len(factors) == 2 and any(map(_is_costly, curves)):
                gates |= factors
        return gates

    def is_large(self, v: Any) -> bool:
        return size(v.aval.shape) > self.least

    def begins(self, curve: Curve) -> bool:
        """Whether the value is computed from inputs by sums, scales and moves; records these."""
        before: set[int] = set()
        inputs: dict[Any, None] = {}
        waiting = [curve.of]
        while waiting:
            v = waiting.pop()
            if compat.is_literal(v) or not self.is_large(v):
                continue
            if v in self.inputs:
                inputs[v] = None
                continue
            place = self.makers[v]
            if self.eqns[place].primitive.name not in _AFFINE:
                return False
            if place not in before:
                before.add(place)
                waiting.extend(reversed(self.eqns[place].invars))
        curve.before = [self.eqns[place] for place in sorted(before)]
        curve.inputs = tuple(inputs)
        return bool(inputs)


def _is_elementwise(eqn: Eqn) -> bool:
    atoms = (*compat.variables(eqn), *eqn.outvars)
    if len(eqn.outvars) > 1 or len({v.aval.shape for v in atoms}) > 1:
        return False
    if not all(map(is_float32, atoms)) or storage.takes_a_statistic(eqn):
        return False
    return eqn.primitive.name in _IN_PLACE or fusible.is_fusible_function(eqn)


def _is_cut(curve: Curve) -> bool:
    """Whether the value is cut out of a larger one, whose gradient one kernel stores whole."""
    return any(eqn.primitive.name in traits.SLICES for eqn in curve.before)


def _is_costly(curve: Curve) -> bool:
    return any(
        eqn.primitive.name in traits.COSTLY
        or (fusible.is_fusible_function(eqn) and traits.COSTLY & fusible.operations(eqn))
        for eqn in curve.eqns
    )
