"""The operations of a jaxpr as a graph: a node for each value, by name.

Small functions that JAX has jitted (`where`, `tril`) are inlined. The name of a value inside is the
place of the call and the variable, since two calls may share one program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._autocast.known import traits
from mpjax._autocast.known.constants import ARITHMETIC
from mpjax._base import compat
from mpjax._jaxpr import binding
from mpjax._jaxpr.caches import by_program
from mpjax._jaxpr.equation import Eqn, Jaxpr

Name = Any
"""A variable of the jaxpr, a variable inside a call with the call's place, or a literal."""

_LONGEST = 2**17  # elements of a constant whose values are compared
FOLLOWED = (
    traits.RESHAPES | {"transpose", "broadcast_in_dim"} | {"copy", "copy_p", "convert_element_type"}
)
"""Moves of one operand, through which numbers and labels of axes are followed."""


class Node(NamedTuple):
    """One operation."""

    eqn: Eqn
    operands: tuple[Name, ...]

    @property
    def kind(self) -> str:
        return self.eqn.primitive.name

    @property
    def aval(self) -> Any:
        return self.eqn.outvars[0].aval


class ValueGraph:
    """The node of each value of a jaxpr. Results of operations with several have none."""

    def __init__(self, jaxpr: Jaxpr, constants: Sequence[Any]) -> None:
        self._nodes: dict[Name, Node] = {}
        self._same: dict[Any, Name] = {}  # results of calls, by the name that they have inside
        self._numbers: dict[Name, float] = {}
        self.positions: set[Name] = set()
        """Constants that are the positions of an axis: 0, 1, 2 ..."""
        for v, x in zip(jaxpr.constvars, constants, strict=True):
            if isinstance(x, np.ndarray | np.generic) and np.size(x) == 1:
                self._numbers[v] = float(np.reshape(x, ()))
            elif _counts(x):
                self.positions.add(v)
        self._add(jaxpr.eqns, (), {})

    def _add(self, eqns: Sequence[Eqn], path: tuple[int, ...], names: dict[Any, Name]) -> None:
        for i, eqn in enumerate(eqns):
            given = [v if compat.is_literal(v) else names.get(v, v) for v in eqn.invars]
            if eqn.primitive.name == "jit":
                inner = compat.closed(eqn.params["jaxpr"])
                inside = dict(zip(inner.jaxpr.invars, given, strict=True))
                here = (*path, i)
                inside |= {v: (here, v) for v in inner.jaxpr.constvars}
                self._add(inner.jaxpr.eqns, here, inside)
                outs = [v if compat.is_literal(v) else inside[v] for v in inner.jaxpr.outvars]
                names.update(zip(eqn.outvars, outs, strict=True))
                continue
            if path:  # what is not in a call has its own name
                names.update((v, (path, v)) for v in eqn.outvars)
            if len(eqn.outvars) == 1:
                (out,) = eqn.outvars
                name, node = (path, out) if path else out, Node(eqn, tuple(given))
                self._nodes[name] = node
                if (number := self._number(node)) is not None:
                    self._numbers[name] = number
        if not path:
            self._same = names

    def name(self, atom: Any) -> Name:
        """Returns the name of an operand of an equation of the jaxpr."""
        return atom if compat.is_literal(atom) else self._same.get(atom, atom)

    def node(self, name: Name) -> Node | None:
        """Returns the node of a value; None for inputs, constants and literals."""
        return None if compat.is_literal(name) else self._nodes.get(name)

    def made(self, name: Name) -> tuple[Any, tuple[Name, ...]]:
        """Returns the equation that makes a value, and its operands."""
        node = self._nodes[name]
        return node.eqn, node.operands

    def aval(self, name: Name) -> Any:
        node = self.node(name)
        if node is not None:
            return node.aval
        return (name[1] if isinstance(name, tuple) else name).aval

    def number(self, name: Name) -> float | None:
        """Returns the number that all elements of a value are, None where that is not known."""
        if compat.is_literal(name):
            dtype = name.aval.dtype  # `float0` for a tangent of integers, which has no numbers
            kinds = (jnp.floating, jnp.integer, jnp.bool_)  # False and 0 are one number of a mask
            is_real = any(jnp.issubdtype(dtype, kind) for kind in kinds)
            return float(name.val) if is_real and np.ndim(name.val) == 0 else None
        return self._numbers.get(name)

    def _number(self, node: Node) -> float | None:
        """Returns the result of an operation on numbers, None if an operand is not one."""
        kind = node.eqn.primitive.name
        if kind in FOLLOWED or kind == "stop_gradient":
            return self.number(node.operands[0])
        if kind not in _NUMBERS:
            return None
        names = [x for x in node.operands if not compat.is_literal(x)]
        if not self._numbers.keys() >= set(names):
            return None
        numbers = [self.number(x) for x in node.operands]
        if None in numbers:
            return None
        with np.errstate(all="ignore"):
            return float(_NUMBERS[kind](*map(np.float32, numbers)))

    def compute(self, name: Name, known: dict[Name, Any]) -> Any:
        """Returns a value, computed in float32 from known ones; adds it to these."""
        if compat.is_literal(name):
            return name.val
        if name not in known:
            node = self._nodes[name]
            values = [self.compute(x, known) for x in node.operands]
            known[name] = binding.bind(node.eqn, values)[0]
        return known[name]

    def leaves(self, name: Name, known: Mapping[Name, Any] | frozenset[Name]) -> set[Name] | None:
        """Returns the known values from which a value is computed, None if others are needed."""
        reached: set[Name] = set()
        seen: set[Name] = set()
        left = [name]
        while left:
            one = left.pop()
            if compat.is_literal(one) or one in seen:
                continue
            seen.add(one)
            node = self.node(one)
            if one in known:
                reached.add(one)
            elif node is None or node.eqn.effects:
                return None
            else:
                left += node.operands
        return reached


@by_program
def operations(jaxpr: Jaxpr) -> frozenset[str]:
    """Returns the names of an open jaxpr's operations, and of those in small functions."""
    names = frozenset(eqn.primitive.name for eqn in jaxpr.eqns)
    calls = (eqn.params["jaxpr"] for eqn in jaxpr.eqns if eqn.primitive.name == "jit")
    return names.union(*(operations(compat.closed(call).jaxpr) for call in calls))


def _counts(x: Any) -> bool:
    """Whether a constant is 0, 1, 2 ...; False for one that is traced or long."""
    is_known = isinstance(x, np.ndarray | jax.Array) and compat.has_values(x)
    if not is_known or x.ndim != 1 or x.dtype != np.int32 or x.size > _LONGEST:
        return False
    return bool(np.array_equal(np.asarray(x), np.arange(x.size)))


_NUMBERS: dict[str, Any] = {
    **ARITHMETIC,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "pow": np.power,
}
