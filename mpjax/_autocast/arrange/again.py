"""Backward passes inside a program compute activations again.

Where the program takes a gradient itself, JAX's derivatives hand values to the backward pass: of a
GELU `0.5 * (1 + tanh(z))`, `3 * z ** 2` and others. Stored, even in 16 bits, they take several
times the memory of `z`. So a group of the backward pass runs the equations again that made them, on
what their own group read, as do the derivatives that autocast takes (`speed/recompute`). It reads
what is stored anyway, and small statistics.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from mpjax._autocast import speed
from mpjax._autocast.known import fusible, scopes, traits
from mpjax._base import compat
from mpjax._jaxpr import structure
from mpjax._jaxpr.equation import Eqn, Jaxpr
from mpjax._jaxpr.op_rules import only_moves
from mpjax._jaxpr.sizes import is_float32, size


class RunAgain(NamedTuple):
    """The equations that a group runs beside its own."""

    members: frozenset[int] = frozenset()  # the places of equations of a forward pass
    apart: frozenset[Any] = frozenset()  # what these read, if XLA would take them for the first


NOTHING = RunAgain()


def of(jaxpr: Jaxpr, components: Sequence[Sequence[int]]) -> list[RunAgain]:
    """Returns what each group computes again.

    Args:
      jaxpr: open.
      components: the places of each group's equations.
    """
    if not any(map(scopes.is_transposed, jaxpr.eqns)):
        return [NOTHING] * len(components)
    program = _ForwardPass(jaxpr, components)
    return [program.again(k) for k in range(len(components))]


class _ForwardPass:
    """The groups of a program, and which values are stored for others than its backward pass."""

    def __init__(self, jaxpr: Jaxpr, components: Sequence[Sequence[int]]) -> None:
        self.eqns, self.components = jaxpr.eqns, components
        self.reads = list(structure.operands(jaxpr))
        self.maker = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
        self.backward = [scopes.is_transposed(eqn) for eqn in jaxpr.eqns]
        self.group: dict[int, int] = {}
        for k, places in enumerate(components):
            if not all(only_moves(jaxpr.eqns[i]) for i in places):  # such run one by one
                self.group |= dict.fromkeys(places, k)
        self.takes_part = [any(self.backward[i] for i in places) for places in components]
        made = [[jaxpr.eqns[i] for i in places] for places in components]
        self.largest = list(map(speed.largest_size, made))
        # Whether XLA would take what is computed again for the first computation of a group.
        self.is_apart = list(map(speed.kept_apart, made))
        self.stored = {v for v in jaxpr.outvars if not compat.is_literal(v)}
        for i, read in enumerate(self.reads):
            k = self.group.get(i)
            if k is None or not self.backward[i]:
                self.stored.update(v for v in read if k is None or self.group_of(v) != k)

    def group_of(self, v: Any) -> int | None:
        """Returns the group that makes a value."""
        place = self.maker.get(v)
        return None if place is None else self.group.get(place)

    def again(self, k: int) -> RunAgain:
        """Returns what a group computes again."""
        members: set[int] = set()
        apart: set[Any] = set()
        for i in self.components[k]:
            if self.group.get(i) == k and self.backward[i]:
                for v in self.reads[i]:
                    if self.is_repeated(v, k):
                        self.collect(self.maker[v], members, apart)
        # Computed again by another kernel, no element need be equal to a maximum that was stored.
        compares = any(_compares(self.eqns[i]) for i in (*members, *self.components[k]))
        if compares or len(members) > speed.MOST_AGAIN:
            return NOTHING
        return RunAgain(frozenset(members), frozenset(apart))

    def is_repeated(self, v: Any, k: int) -> bool:
        """Whether a group reads a value of a forward pass that is stored for its sake alone."""
        of = self.group_of(v)
        if of is None or of == k or v in self.stored or not is_float32(v):
            return False
        if self.takes_part[of] or self.is_small(v, of):
            return False
        first, other = (self.eqns[self.components[i][0]] for i in (of, k))
        return first.ctx == other.ctx

    def is_small(self, v: Any, of: int) -> bool:
        """Whether a value is as small as a statistic of what its group computes."""
        return size(v.aval.shape) * speed.SMALLER <= self.largest[of]

    def collect(self, last: int, members: set[int], apart: set[Any]) -> None:
        """Adds an equation, and those of its group that made what it reads."""
        of, places = self.group[last], [last]
        while places:
            place = places.pop()
            if place in members:
                continue
            members.add(place)
            for v in self.reads[place]:
                made = self.maker.get(v)
                if made is None:
                    continue
                if self.group.get(made) != of:
                    apart.update([v] if is_float32(v) and self.is_apart[of] else ())
                elif not (_is_statistic(self.eqns[made]) and self.is_small(v, of)):
                    places.append(made)


def _is_statistic(eqn: Eqn) -> bool:
    return eqn.primitive.name in traits.STATISTIC


def _compares(eqn: Eqn) -> bool:
    if structure.single_program(eqn) is not None:
        return bool(fusible.operations(eqn) & traits.EQUALS)
    return eqn.primitive.name in traits.EQUALS


def only_multiplies(eqn: Eqn, v: Any) -> bool:
    """Whether an equation only multiplies by a value, or calls a function that does no more."""
    if eqn.primitive.name in traits.SCALES:
        return True
    program = structure.single_program(eqn)
    if program is None:
        return False
    inner = compat.closed(program).jaxpr
    inside = [x for x, atom in zip(inner.invars, eqn.invars, strict=True) if atom is v]
    if any(out is x for out in inner.outvars for x in inside):
        return False
    readers = ((each, x) for each in inner.eqns for x in inside if x in compat.variables(each))
    return all(only_multiplies(*pair) for pair in readers)
