"""Of which inputs each output of a program is made, and how: directly, by a product, or else.

Example: `f(a, b, c) = a + tanh(b @ c)` is made of all three, of `a` directly, and of `b` and `c` by
a product. Found as if calls, branches and loops inside the program were written out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from mpjax._autocast.known import traits
from mpjax._autocast.known.contraction import is_product
from mpjax._base import compat
from mpjax._jaxpr import structure
from mpjax._jaxpr.caches import by_program
from mpjax._jaxpr.equation import Eqn
from mpjax._jaxpr.op_rules import hands_on_each


class InputSets(NamedTuple):
    """Sets of a program's inputs, as integers: bit `i` stands for input `i`."""

    all: int = 0  # it is made of these
    direct: int = 0  # by a way without a product and without a bounded function, such as `tanh`
    by_product: int = 0  # by a way through a product


_NONE = InputSets()


def places(inputs: int) -> list[int]:
    """Returns the places of the inputs in a set."""
    return [i for i in range(inputs.bit_length()) if inputs >> i & 1]


def leading(before: Sequence[int]) -> list[int]:
    """Returns, for each of several places, the set of those that lead to it, in any steps.

    `before` has the sets of those that lead to it in one step.
    """
    reached = list(before)
    for via in range(len(reached)):
        reached = [r | reached[via] if r >> via & 1 else r for r in reached]
    return reached


class MadeOf(NamedTuple):
    """A result of an equation, and the variables of which it is made."""

    result: Any
    of: Sequence[Any]
    by_product: Sequence[Any]


def results(eqn: Eqn) -> list[MadeOf]:
    """Returns each result of an equation with the variables of which it is made."""
    if structure.is_call(eqn) or hands_on_each(eqn):
        pairs = zip(eqn.outvars, of_equation(eqn), strict=True)
        return [MadeOf(v, _picked(eqn, w.all), _picked(eqn, w.by_product)) for v, w in pairs]
    operands = compat.variables(eqn)
    multiplied = operands if is_product(eqn) else ()
    return [MadeOf(v, operands, multiplied) for v in eqn.outvars]


def _picked(eqn: Eqn, operands: int) -> list[Any]:
    atoms = [eqn.invars[i] for i in places(operands)]
    return [v for v in atoms if not compat.is_literal(v)]


@by_program
def of_program(program: Any) -> tuple[InputSets, ...]:
    """Returns of which inputs each output of a jaxpr is made."""
    jaxpr = compat.closed(program).jaxpr
    return structure.outputs(jaxpr, _each(len(jaxpr.invars)), _made, _NONE)


def of_equation(eqn: Eqn) -> Sequence[InputSets]:
    """Returns of which operands each result of an equation is made."""
    return _made(eqn, _each(len(eqn.invars)))


def _each(count: int) -> list[InputSets]:
    return [InputSets(1 << i, 1 << i) for i in range(count)]


def _made(eqn: Eqn, operands: Sequence[InputSets]) -> Sequence[InputSets]:
    if structure.is_call(eqn):
        return structure.forward(eqn, operands, _through, _joined)
    if hands_on_each(eqn):
        return operands
    every, direct, by_product = _joined(operands)
    if is_product(eqn):
        direct, by_product = 0, every
    elif eqn.primitive.name in traits.BENDS:
        direct = 0
    return [InputSets(every, direct, by_product)] * len(eqn.outvars)


def _through(program: Any, inputs: Sequence[InputSets]) -> list[InputSets]:
    return [_entered(made, inputs) for made in of_program(program)]


def _entered(made: InputSets, inputs: Sequence[InputSets]) -> InputSets:
    """Returns the same of what the inputs are made of."""
    every, _, by_product = _joined([inputs[i] for i in places(made.all)])
    direct = _joined([inputs[i] for i in places(made.direct)]).direct
    ended = _joined([inputs[i] for i in places(made.by_product)]).all
    return InputSets(every, direct, by_product | ended)


def _joined(several: Sequence[InputSets]) -> InputSets:
    every = direct = by_product = 0
    for way in several:
        every |= way.all
        direct |= way.direct
        by_product |= way.by_product
    return InputSets(every, direct, by_product)
