"""The sum inside a product: of nothing, one array's elements, or products of two arrays' elements.

Only the last is what matrix units are for. A product that contracts one element, as a column with
a row, adds nothing up: it is elementwise, and its operands need not be rounded.
"""

from __future__ import annotations

import math
from typing import Any

from mpjax._jaxpr.equation import Eqn
from mpjax._jaxpr.op_rules import PRODUCTS

FEW = 4
"""So few terms are no work for a matrix unit."""
NARROW = 8
"""A product of so many times fewer columns than terms writes little of what it reads."""
EXAMPLES = 16
"""A product of so many times more terms than its result has rows, or columns, writes few cells."""
MANY = 1 << 30
"""The number of terms where a dimension is symbolic, or where groups decide."""


def terms(eqn: Eqn) -> int:
    """Returns how many products of elements a product adds up for each of its results."""
    first, second = (v.aval.shape for v in eqn.invars[:2])
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        sizes = [first[i] for i in contracted]
    elif eqn.primitive.name == "conv_general_dilated":
        kernel = eqn.params["dimension_numbers"].rhs_spec
        sizes = [second[i] for i in kernel[1:]]  # of one group: channels in, and places
    else:
        sizes = [MANY]
    return math.prod(sizes) if all(isinstance(n, int) for n in sizes) else MANY


def adds_few(eqn: Eqn) -> bool:
    """Whether a product adds up so few terms that it is no faster in a low dtype."""
    return eqn.primitive.name == "dot_general" and 1 < terms(eqn) <= FEW


def is_by_a_vector(eqn: Eqn) -> bool:
    """Whether one operand of a `dot_general` has no axes but those that are summed, or shared."""
    return not free_axes(eqn, 0) or not free_axes(eqn, 1)


def is_by_one_row(eqn: Eqn) -> bool:
    """Whether one operand of a `dot_general` is a vector, or has one row: it weights a sum."""
    if eqn.primitive.name != "dot_general":
        return False
    return any(all(n == 1 for n in free_axes(eqn, operand)) for operand in range(2))


def free_axes(eqn: Eqn, operand: int) -> list[Any]:
    """Returns the sizes of the axes of a `dot_general`'s operand that stay in its result alone."""
    shape = eqn.invars[operand].aval.shape
    return [shape[i] for i in _free_places(eqn, operand)]


def _free_places(eqn: Eqn, operand: int) -> list[int]:
    summed, batch = (axes[operand] for axes in eqn.params["dimension_numbers"])
    return [i for i in range(eqn.invars[operand].aval.ndim) if i not in (*summed, *batch)]


def axes_after(eqn: Eqn, operand: int, along: int) -> int | None:
    """Returns the axes of a result along which an operand's repetition goes on, as bits.

    Along the axes of the other operand it repeats as well, scaled by that. None where the product
    adds up other axes than those in `along`, along which the operand repeats.
    """
    ndim = eqn.outvars[0].aval.ndim
    if eqn.primitive.name == "dot_general":
        contracted, batch = (axes[operand] for axes in eqn.params["dimension_numbers"])
        free = _free_places(eqn, operand)
        first = len(batch) if operand == 0 else ndim - len(free)
        places = {**dict(enumerate(batch)), **dict(enumerate(free, first))}
    elif eqn.primitive.name == "conv_general_dilated" and operand == 0:
        numbers = eqn.params["dimension_numbers"]
        contracted, places = numbers.lhs_spec[1:], {numbers.out_spec[0]: numbers.lhs_spec[0]}
        if eqn.params["feature_group_count"] == eqn.invars[0].aval.shape[contracted[0]]:
            places[numbers.out_spec[1]], *contracted = contracted
    else:
        return None
    shape = eqn.invars[operand].aval.shape
    if any(shape[i] != 1 and not along >> i & 1 for i in contracted):
        return None
    varies = sum(1 << out for out, i in places.items() if not along >> i & 1)
    return ((1 << ndim) - 1) & ~varies


def sums_last(eqn: Eqn, operand: int) -> bool:
    """Whether a product adds up an operand's last axis, or a convolution's channels."""
    if eqn.primitive.name != "dot_general":
        return operand == 0
    contracted, _ = eqn.params["dimension_numbers"]
    return eqn.invars[operand].aval.ndim - 1 in contracted[operand]


def has_batch_axes(eqn: Eqn) -> bool:
    """Whether the operands of a `dot_general` have axes in common that are not summed over."""
    _, (batch, _) = eqn.params["dimension_numbers"]
    return bool(batch)


def is_short(size: Any) -> bool:
    """Whether an axis is as short as those of a rotation."""
    return isinstance(size, int) and size <= FEW


def is_narrow(eqn: Eqn, operand: int) -> bool:
    """Whether a product by an operand, as by the weights of a head, writes little of what it reads.

    Example: `h @ w` of 64 features and one output. Rounding its result would save little.
    """
    shape = eqn.invars[operand].aval.shape
    if eqn.primitive.name == "dot_general":
        columns, read = free_axes(eqn, operand), terms(eqn)
    elif eqn.primitive.name == "conv_general_dilated" and operand == 1:
        numbers = eqn.params["dimension_numbers"]
        columns = [shape[numbers.rhs_spec[0]], *eqn.params["lhs_dilation"]]
        read = eqn.invars[0].aval.shape[numbers.lhs_spec[1]]
    else:
        return False
    are_known = all(isinstance(n, int) for n in (*columns, read))
    return are_known and math.prod(columns) * NARROW <= read


def is_of_few_cells(eqn: Eqn) -> bool:
    """Whether a `dot_general` adds up many terms, as a whole batch, for few rows and columns.

    One of one row is a weighted sum, such as the attention of one token.
    """
    sides = [free_axes(eqn, operand) for operand in range(2)]
    if not all(isinstance(n, int) for side in sides for n in side):
        return False
    least, most = sorted(map(math.prod, sides))
    return least > 1 and most * EXAMPLES <= terms(eqn) < MANY


def is_product(eqn: Eqn) -> bool:
    """Whether an operation adds up products of elements: what a matrix unit is for."""
    return eqn.primitive.name in PRODUCTS and terms(eqn) > 1


def adds_nothing(eqn: Eqn) -> bool:
    """Whether a product contracts nothing, or one element: it is elementwise."""
    return eqn.primitive.name in PRODUCTS and terms(eqn) == 1


def only_sums(eqn: Eqn) -> bool:
    """Whether a product is a sum of elements, such as a squared norm: it reuses no operand."""
    if eqn.primitive.name != "dot_general" or adds_nothing(eqn):
        return False
    return not free_axes(eqn, 0) and not free_axes(eqn, 1)
