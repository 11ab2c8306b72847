"""Linear iterations: carries that reach themselves by products and linear operations alone.

`v = max(r + p @ v)` of value iteration and `x = a @ x + b` of a linear system are such. The
`tanh(h @ w)` of a recurrent network and `x + f(norm(x))` of a transformer are not. Nothing in such
a loop forgets: an error of one turn is multiplied by all later ones, as a solver's is. A carry that
is multiplied by itself, as `v = v @ (2 * one - a @ v)` of an inverse, is such in few turns.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from mpjax._autocast.known import chains, traits
from mpjax._autocast.known.contraction import is_product
from mpjax._autocast.known.linear import is_linear
from mpjax._autocast.known.ways import leading, places
from mpjax._base import compat
from mpjax._jaxpr import structure
from mpjax._jaxpr.caches import by_program
from mpjax._jaxpr.equation import Eqn
from mpjax._jaxpr.op_rules import PRODUCTS, hands_on_each


class LinearSets(NamedTuple):
    """Sets of a program's inputs, as integers: bit `i` stands for input `i`."""

    all: int = 0  # it is made of these
    linear: int = 0  # by linear operations alone
    by_product: int = 0  # by these and a product, at least one
    otherwise: int = 0  # by a way through any other operation
    squared: int = 0  # by a product of which both operands are made of it, linearly or by products
    products: int = 0  # how many lie on the longest way, `MANY` at most; this is no set

    def of_carries(self, consts: int, ours: int) -> LinearSets:
        """Returns the sets of carries alone, which are inputs behind some constants."""
        *sets, products = self
        return LinearSets._make((*(bits >> consts & ours for bits in sets), products))


_NONE = LinearSets()
LEAST = 3
"""Turns of `v = v @ (2 * one - a @ v)`, or of a cube: they multiply `a` by itself 7 or 26 times."""


@by_program
def least_turns(body: Any, consts: int, carries: int) -> tuple[float, ...]:
    """Returns how many turns make each carry of a loop's body a long chain of products.

    Infinity for one that is iterated otherwise.

    Args:
      body: the program.
      consts: the number of its inputs before the carries.
      carries: the number of carries, which are its first outputs.
    """
    count = len(compat.closed(body).jaxpr.invars)
    ours = (1 << carries) - 1
    # What differs by turn, as the weights of layers do, counts as made of all carries.
    same = [LinearSets(1 << i, 1 << i) for i in range(consts + carries)]
    layers = [LinearSets(-1)] * (count - len(same))
    outs = _through(body, (*same, *layers))
    made = [way.of_carries(consts, ours) for way in outs[:carries]]
    if not any(way.by_product for way in made):
        return (math.inf,) * carries
    reached = leading([way.all for way in made])  # the carries that lead to each one
    leads_to = [sum(1 << i for i in range(carries) if reached[i] >> j & 1) for j in range(carries)]
    around = [r & to for r, to in zip(reached, leads_to, strict=True)]  # those in one circle
    ways = [_joined([made[k] for k in places(c)]) for c in around]
    pairs = list(zip(ways, around, strict=True))
    squared = functools.reduce(operator.or_, (way.squared & circle for way, circle in pairs))
    return tuple(_least_turns(way, circle, squared) for way, circle in pairs)


def _least_turns(way: LinearSets, carries: int, squared: int) -> float:
    """Returns the turns that make carries, which lead to each other in one way, long chains.

    Each turn may multiply by several factors, or by a carry that is multiplied by itself.
    """
    if not way.by_product & carries or way.otherwise & carries:
        return math.inf
    return LEAST if way.all & squared else math.ceil(chains.MANY / way.products)


def _made(eqn: Eqn, operands: Sequence[LinearSets]) -> Sequence[LinearSets]:
    name = eqn.primitive.name
    if structure.is_call(eqn):
        return structure.forward(eqn, operands, _through, _joined)
    if hands_on_each(eqn):
        return operands
    way = _joined(operands)
    if name in PRODUCTS or name in traits.SCALES:
        way = _multiplied(eqn, *operands[:2])
    elif name == "select_n":  # what its mask is made of need not be what is iterated
        way = way._replace(otherwise=way.otherwise | operands[0].all)
    elif not is_linear(eqn, lambda _: False):
        way = LinearSets(way.all, otherwise=way.all)
    if is_product(eqn):
        one_more = min(way.products + 1, chains.MANY)  # a loop inside has many turns
        way = way._replace(linear=0, by_product=way.linear | way.by_product, products=one_more)
    return [way] * len(eqn.outvars)


def _multiplied(eqn: Eqn, first: LinearSets, second: LinearSets) -> LinearSets:
    """Returns the sets of a product or quotient: both factors of `x * norm(x)` are made of `x`."""
    both = second.all if eqn.primitive.name == "div" else first.all & second.all
    squared = 0
    if is_product(eqn):
        squared = (first.linear | first.by_product) & (second.linear | second.by_product)
    both &= ~squared
    return LinearSets(
        first.all | second.all,
        (first.linear | second.linear) & ~both,
        (first.by_product | second.by_product) & ~both,
        first.otherwise | second.otherwise | both,
        first.squared | second.squared | squared,
        max(first.products, second.products),
    )


@by_program
def _through(program: Any, inputs: tuple[LinearSets, ...]) -> tuple[LinearSets, ...]:
    """Returns the sets of a program's outputs, given those of its inputs, as if it were inlined.

    Both factors of a product inside may be made of the same carry outside: `ct * slope(z)`.
    """
    return structure.outputs(compat.closed(program).jaxpr, inputs, _made, _NONE)


def _joined(several: Sequence[LinearSets]) -> LinearSets:
    *sets, products = zip(_NONE, *several, strict=True)
    return LinearSets._make((*(functools.reduce(operator.or_, s) for s in sets), max(products)))
