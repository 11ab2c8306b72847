"""Values whose cotangents come from readers that do not share a kernel, and have to meet unrounded.

A low value hands each reader a low cotangent to fill in. Two groups round theirs, and the sum is
rounded as each term was. But where one reader is a loop, a sort, a function with a rule of its own
or a region in float32, the author sees one float32 value: its cotangents may cancel, as in
`|h|² - 2 h·t`, and rounding each leaves what the sum has not. Such a value is widened once, for all
its readers. These are counted as if calls were inlined and moves, such as a reshape, were absent.

A cotangent that is given on negated, as by `f(z + 0.01) - f(z)`, may come back and cancel with
itself. Where a cut rounds one of the two, the difference is left, so neither is rounded. And the
cotangent of a statistic that devices share comes back through a kernel of its own, while those of
the values that it was taken of are there already, as in batch norm over devices.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpjax._autocast.decide.read_flags import APART, COTANGENTS, MEET, READ, SHARED, SUMMED
from mpjax._autocast.known import fusible, scopes, totals, traits
from mpjax._jaxpr import structure
from mpjax._jaxpr.equation import Eqn
from mpjax._jaxpr.op_rules import MOVES
from mpjax._jaxpr.sizes import is_float32

_OWN_KERNEL = (traits.SELECTS | traits.RUNNING) - traits.FUSIBLE - traits.UPDATES


def joined(read: int, more: int) -> int:
    """Returns how a value is read that has one reader more."""
    union = read | more
    return union | MEET if read & more & READ and union & (APART | SHARED) else union


def how_read(eqn: Eqn, place: scopes.Scope, out_read: int) -> tuple[int, int]:
    """Returns flags that say who gives float32 operands of an equation cotangents.

    First those that it sets itself, then those of its results that it hands on.

    Args:
      eqn: the equation.
      place: the scopes around it.
      out_read: how its results are read.
    """
    if not any(map(is_float32, eqn.outvars)):
        return 0, 0
    if eqn.primitive.name == "neg" and place.is_transposed:
        return MEET, COTANGENTS
    name = eqn.primitive.name
    own = READ | APART if place.as_written or _is_apart(eqn) else READ
    if not place.is_transposed:
        own |= _towards_devices(eqn, out_read)
    if name in MOVES:
        return own if own & APART else 0, COTANGENTS
    if structure.is_call(eqn) and not own & APART:
        return 0, COTANGENTS
    return own, 0


def in_each_turn(eqn: Eqn) -> Sequence[int]:
    """Returns the places of operands that each turn of a `scan` reads anew: each gives a cotangent.

    JAX adds these up in the dtype of the operand.
    """
    if eqn.primitive.name != "scan" or eqn.params["length"] == 1:
        return ()
    return structure.loop_operands(eqn, range(len(eqn.invars))).consts


def _towards_devices(eqn: Eqn, out_read: int) -> int:
    """Returns the flags of what a sum over devices, or a statistic for one, is made of."""
    name = eqn.primitive.name
    if name in traits.ACROSS:
        return SUMMED
    if name not in traits.FUSIBLE:
        return 0
    is_statistic = out_read & SUMMED and totals.is_statistic(eqn)
    return out_read & (SUMMED | SHARED) | (SHARED if is_statistic else 0)


def _is_apart(eqn: Eqn) -> bool:
    if eqn.primitive.name in structure.LOOPS or structure.has_rules(eqn):
        return not fusible.is_fusible_function(eqn)
    return eqn.primitive.name in _OWN_KERNEL
