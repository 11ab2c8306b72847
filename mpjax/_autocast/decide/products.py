"""Decides about products: whether their operands are low, and whether their own result is.

A product reads low operands and adds up in float32. What it added up is rounded, unless a reader
needs it as it is, or nothing is gained by that: the last product of a program, one of a head of few
columns, or a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from mpjax._autocast.decide import read_flags, reasons, states
from mpjax._autocast.decide.decided import Action, Decided, Decision, Settings
from mpjax._autocast.decide.must import of_losses, proportions, weights
from mpjax._autocast.decide.reasons import Reason
from mpjax._autocast.decide.rounding import Rounding
from mpjax._autocast.decide.states import Kind, State
from mpjax._autocast.known import contraction, fact_flags, facts, named_attention, scopes
from mpjax._base.dtypes import FLOAT16, FLOAT32
from mpjax._jaxpr.equation import Eqn
from mpjax._jaxpr.op_rules import OP_RULES, OpClass

_EXACT_RESULT = (
    read_flags.GRADIENT | read_flags.RUINED | read_flags.RESULT | read_flags.SAME | read_flags.AGAIN
)
_FULL_RANGE = read_flags.SCALED | read_flags.DIVIDED | read_flags.PROPORTION
DecideProgram = Callable[..., Decided]
"""Decides about a program, as `planning.decide` does."""


class EightBits(Protocol):
    """Decides which products of a program are in 8 bits: a `quantized.QuantizedProducts`."""

    def config(
        self, eqn: Eqn, settings: Any, low: Any, *, exact: bool
    ) -> tuple[Any | None, str, Any]: ...

    def path(self, eqn: Eqn) -> str: ...

    def entering(self, eqn: Eqn, inner: DecideProgram) -> DecideProgram: ...


def decide(
    values: Rounding, eqn: Eqn, kind: OpClass | None, settings: Settings, eight_bits: EightBits
) -> Decision:
    """Decides about one product.

    Args:
      values: those of its program, of which the result's state is recorded.
      eqn: the product.
      kind: its class by the user's rules.
      settings: those that hold where it stands.
      eight_bits: decides whether it is in 8 bits.
    """
    read = values.reads.get(eqn.outvars[0], 0)
    low = values.low_dtype(eqn, settings)
    how, why, low = eight_bits.config(eqn, settings, low, exact=bool(read & read_flags.RUINED))
    operands = [values.state(v) for v in eqn.invars]
    reason = _why_not_low(values, eqn, kind, low, read)
    flag = of_losses.keeps_from_low(read)
    if flag and not reason:
        reason = reasons.of_product(flag)
    if flag or reason in reasons.OUT_OF_RANGE:
        values.changed = True  # it has a row, and equals others
    if reason:
        if settings.dot_precision is not None and reasons.has_default_precision(eqn):
            values.changed = True
        return values.as_traced(eqn, states.full(operands), reason)
    if contraction.only_sums(eqn) and any(s.kind == Kind.WIDE for s in operands):
        values.record(eqn, [states.full(operands)])
        return Decision(eqn, Action.FUSED, values.because(eqn, reasons.WIDE_SUM))
    if contraction.adds_nothing(eqn):
        unkept = [states.unkept(s) for s in operands]
        state = states.follow(values.as_followed(eqn, unkept), widest=settings.widest)
        values.record(eqn, [values.stored(eqn, eqn.outvars[0], state)])
        return Decision(eqn, Action.FUSED, values.because(eqn, None))
    values.changed = True
    exact = _is_result_exact(values, eqn, read, low) or _may_overflow(values, eqn, read, low)
    values.record(eqn, [_result(read, low, exact=exact)])
    by_class = Reason(why or OP_RULES[eqn.primitive.name].reason)
    return Decision(
        eqn,
        Action.PRODUCT,
        by_class,
        low=low,
        out_dtype=FLOAT32 if exact else low,
        how=how,
        path=eight_bits.path(eqn) if how is not None else "",
    )


def decide_attention(values: Rounding, eqn: Eqn, settings: Settings) -> Decision:
    """Decides about one `mpjax.dot_product_attention`, which holds two products."""
    low = values.low_dtype(eqn, settings)
    is_exact = any(values.reads.get(v, 0) & read_flags.RUINED for v in eqn.outvars)
    if reason := reasons.attention_as_written(eqn, settings, low, is_exact=is_exact):
        state = states.full([values.state(v) for v in eqn.invars])
        return values.as_traced(eqn, state, values.of_user(eqn, state) or reason)
    values.changed = True
    is_low = named_attention.results_low(eqn)
    values.record(eqn, [states.low(low) if yes else states.WIDE for yes in is_low])
    return Decision(eqn, Action.ATTENTION, Reason(""), low=low)  # `planning` names the kernel


def _why_not_low(
    values: Rounding, eqn: Eqn, kind: OpClass | None, low: Any, read: int
) -> Reason | None:
    if low is None:
        return values.of_user(eqn, states.WIDE) or reasons.NO_LOW_DTYPE
    if kind is not OpClass.LOWER:
        return values.of_user(eqn, states.WIDE) or reasons.KEPT_BY_RULES
    if reason := reasons.as_written(eqn):
        return reason
    if low == FLOAT16:
        too_large = filter(None, map(values.out_of_range, eqn.invars[:2]))
        if reason := next(too_large, None):
            return reason
        if weights.are_divided(eqn, read, values.facts):
            return reasons.WEIGHTS
        if proportions.may_be_lost(eqn, read, values.facts):
            return reasons.PROPORTION
    held = [values.state(v) for v in eqn.invars[:2]]
    too_fine = [s for s in held if s.kind == Kind.CONSTANT and not states.fits(s, low)]
    if not too_fine:
        return None
    unknown = any(s.values is None for s in too_fine)
    return reasons.UNKNOWN_CONSTANT if unknown else reasons.NO_LOW_CONSTANT


def _is_result_exact(values: Rounding, eqn: Eqn, read: int, low: Any) -> bool:
    """Whether the result of a product with low operands is float32, as it was added up.

    The last product of a network is by a parameter. One of two values that products made belongs to
    a loss: similarities, of which a softmax reads how far each is from the largest. So does what a
    head of few columns predicts, and rounding it would save little.
    """
    if read & _EXACT_RESULT or low == FLOAT32 or contraction.only_sums(eqn):
        return True
    if _counts(values, eqn):
        return True
    if read & _FULL_RANGE and low == FLOAT16:
        return True
    if not read & read_flags.FORWARD and (read & read_flags.NEAR or _is_of_a_loss(values, eqn)):
        return True
    if read & read_flags.LATER:
        return False
    return bool(read & (read_flags.OUTPUT | read_flags.ACCUMULATOR)) or scopes.is_transposed(eqn)


def _counts(values: Rounding, eqn: Eqn) -> bool:
    """Whether a product is of no float, as of one-hot rows: it counts, and is no layer's result."""
    _, every = fact_flags.union([facts.of_atom(v, values.facts) for v in eqn.invars[:2]])
    return bool(every & fact_flags.CONSTANT)


def _is_of_a_loss(values: Rounding, eqn: Eqn) -> bool:
    """Whether a product that is no part of a derivative is of made values, or of few columns.

    Columns are those of the weights: rows may be few because a batch is small, also in a loop.
    """
    if scopes.is_transposed(eqn):
        return False
    flags = [facts.of_atom(v, values.facts).flags for v in eqn.invars[:2]]
    if all(f & fact_flags.PRODUCT for f in flags):
        return True
    made = fact_flags.PRODUCT | fact_flags.CARRY
    return any(contraction.is_narrow(eqn, i) for i, f in enumerate(flags) if not f & made)


def _may_overflow(values: Rounding, eqn: Eqn, read: int, low: Any) -> bool:
    """Whether float16 may not hold a power, or a product of integers, which is scaled behind it.

    Examples: `x.T @ x`, and `(x @ w8.astype(jnp.float32)) * scale`, of stored weights of 8 bits.
    """
    if low != FLOAT16:
        return False
    return values.is_power(eqn.outvars[0], read) or any(
        _may_be_large(values, v) for v in eqn.invars[:2]
    )


def _may_be_large(values: Rounding, operand: Any) -> bool:
    """Whether a product's operand is made of no float, and not known to be as small as a mask."""
    if not facts.of_atom(operand, values.facts).flags & fact_flags.CONSTANT:
        return False
    known = values.state(operand).values
    return known is None or any(abs(v) > fact_flags.MUCH for v in known)


def _result(read: int, low: Any, *, exact: bool) -> State:
    """Returns the state of the result of a product with low operands."""
    if exact and read & read_flags.GRADIENT:  # rounded, small steps along it would be lost
        return states.WIDE_PURE
    if exact:
        return states.KEPT if read & read_flags.RUINED else states.WIDE
    return states.unrounded(states.low(low)) if read & read_flags.MEET else states.low(low)
