"""Products of a loss, which a person who casts by hand casts in no network: they stay float32.

Beside a factorisation, in a linear iteration or before the logarithm of a spectrum, the errors of
operands grow. By a rotation, or of few columns, nothing is gained by low ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpjax._autocast.decide.read_flags import (
    AS_TESTED,
    CANCELS,
    DIFFERENCE,
    FORWARD,
    NEAR,
    RELATIVE,
    RESULT,
    SMALL,
    SOLUTION,
    TESTED,
)
from mpjax._autocast.known import chains, contraction, fact_flags, facts, ranges, scopes
from mpjax._jaxpr.equation import Eqn


def how_read(eqn: Eqn, out_read: int, known: facts.Facts) -> int:
    """Returns the flags of what is beside a product: a factorisation, a spectrum, a small matrix.

    As `k - a @ solve(b, a.T)`, a variance, and `v @ diag(1 / w) @ v.T`: the more singular a matrix
    is, the larger are the terms that cancel. A stencil cancels, too, and so does a transform by
    constants, as `x @ waves`, whose logarithm is read. What turns and projects points is put
    together, as a rotation, or a constant, as a camera: no work for a matrix unit. Nor are the few
    cells of a confusion matrix.
    """
    operands = [facts.of_atom(v, known) for v in eqn.invars[:2]]
    some, _ = fact_flags.union(operands)
    if some & (fact_flags.SOLVED | fact_flags.STENCIL) or _ends_a_chain(eqn, known):
        return SOLUTION
    if out_read & DIFFERENCE and some & fact_flags.BEHIND:
        return SOLUTION
    if out_read & (NEAR | RELATIVE) and some & fact_flags.AMOUNTS:
        return SOLUTION
    if eqn.primitive.name != "dot_general":
        return 0
    if not out_read & FORWARD and _counts_examples(eqn, some):
        return SMALL
    is_an_angle = out_read & RESULT
    if contraction.adds_few(eqn) and (is_an_angle or _is_of_places(eqn, some)):
        return SMALL
    if contraction.is_by_a_vector(eqn) and (is_an_angle or _is_of_functions(operands, some)):
        return SMALL
    if known[eqn.outvars[0]].added and _weights_examples(eqn, out_read):
        return SMALL
    return SMALL if any(_is_small(eqn, i, operands) for i in range(2)) else 0


def _is_of_places(eqn: Eqn, some: int) -> bool:
    """Whether a product of few terms is of inputs' coordinates: an angle, a volume, a strain.

    Each of its elements has an axis in common with both operands, as no parameter has with its
    inputs.
    """
    return not some & fact_flags.PRODUCT and contraction.has_batch_axes(eqn)


def _counts_examples(eqn: Eqn, some: int) -> bool:
    """Whether a product counts many examples into few cells, as `chances.T @ one_hot` does.

    The cotangent of a cell is that of all its examples. If it were rounded, they would share its
    error, and what a loss of shares cancels, as mutual information does, would be left.
    """
    if not (some & fact_flags.PRODUCT and some & ranges.CHANCES) or scopes.is_transposed(eqn):
        return False
    return contraction.is_of_few_cells(eqn)


def _weights_examples(eqn: Eqn, out_read: int) -> bool:
    """Whether a product of examples that have an offset is a mean of them, or a few sums.

    As `weights @ y / weights.sum()`, which is taken off `y`, also by a norm in a network; or as the
    slopes `times @ y` in a loss: weights that add up to 0 cancel the offset in the sum.
    """
    if contraction.is_by_one_row(eqn):
        return bool(out_read & DIFFERENCE or not out_read & FORWARD)
    return not out_read & FORWARD and any(contraction.is_narrow(eqn, i) for i in range(2))


def _is_of_functions(operands: Sequence[facts.Fact], some: int) -> bool:
    """Whether an operand is made of inputs by functions, as the powers in a polynomial are.

    Their sum cancels: `vander(t, 9) @ coefficients` of `t = -60` has terms past 1e9 and is 0.01.
    """
    if some & (fact_flags.PRODUCT | fact_flags.CARRY):
        return False
    return bool(some & ranges.CURVED) or any(f.factors > 1 for f in operands)


def _ends_a_chain(eqn: Eqn, known: facts.Facts) -> bool:
    """Whether a product has one factor many times, as `matrix_power(m, 64)` has, or reads it."""
    made = (facts.of_atom(v, known).chain for v in (*eqn.invars[:2], eqn.outvars[0]))
    return any(map(chains.is_long, made)) and contraction.is_product(eqn)


def _is_small(eqn: Eqn, place: int, operands: Sequence[facts.Fact]) -> bool:
    """Whether an operand is a rotation, a camera, or coordinates of few dimensions.

    Coordinates are constants, or are weighted by chances or one-hot rows. On the left of a
    parameter few rows may be a small batch, such as one token, instead.
    """
    if contraction.adds_nothing(eqn):
        return False
    flags, other = operands[place].flags, operands[1 - place].flags
    short = list(map(contraction.is_short, contraction.free_axes(eqn, place)))
    if contraction.adds_few(eqn):
        return any(short) and bool(flags & fact_flags.ASSEMBLED)
    if not all(short):
        return False
    is_a_batch = place == 0 and not other & fact_flags.PRODUCT
    if other & ranges.CHANCES and not (is_a_batch and short):
        return True
    if is_a_batch:
        return False
    is_made_inside = flags & (fact_flags.CONSTANT | fact_flags.SCALAR) == fact_flags.CONSTANT
    return is_made_inside or bool(flags & fact_flags.AMOUNTS)


def keeps_from_low(read: int) -> int:
    """Returns the flag for whose sake a product is not made low, or 0."""
    return next((f for f in (TESTED, AS_TESTED, CANCELS, SOLUTION, SMALL) if read & f), 0)
