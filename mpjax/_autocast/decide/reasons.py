"""Why a value is held in its dtype: the sentences, and which of four parties decides.

In this order: the user (a region, a `PolicyMap`, `rules=`), a reader that rounding would hurt, the
operation's own class, its operands. `equations` makes a reason together with each decision, so
that nothing has to be guessed afterwards. Three things are added: `planning` names the kernel of an
attention; `why/provenance` names the reader, for which "{}" stands, and the first cause of a
float32 operand.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax import lax

from mpjax._autocast.decide import read_flags
from mpjax._autocast.decide.states import Kind, State
from mpjax._autocast.known import fusible, named_attention, scopes
from mpjax._base import compat
from mpjax._base.dtypes import FLOAT32, keeps, short_name
from mpjax._jaxpr.equation import Eqn
from mpjax._jaxpr.op_rules import OpClass, op_class
from mpjax._jaxpr.sizes import is_float32
from mpjax._policies.policy import Policy


class By(enum.Enum):
    """Who decides for a dtype."""

    USER = "a region, a policy of the map, or rules="
    READER = "an operation that reads the value, or that none does"
    OPERATION = "the class of the operation"
    OPERANDS = "what goes into the operation"


class Reason(NamedTuple):
    """A sentence, and who decides."""

    text: str
    by: By = By.OPERATION


AS_WRITTEN = Reason("as written: full_precision(), or an inner autocast", By.USER)
BY_MAP = Reason("its policy in the PolicyMap computes in float32", By.USER)
NO_LOW_DTYPE = Reason("float32 was asked for here")
NOT_FLOAT32 = Reason("operands are not float32: as written")
ITS_PRECISION = Reason("its precision= asks for float32")
ITS_RESULT_DTYPE = Reason("its preferred_element_type= was given")
EMPTY = Reason("of size zero")
FUNCTION = Reason("holds a sum or an exponential: float32 as a whole")
OUTPUT = Reason("an output: rounding it would gain nothing", By.READER)
BEHIND = Reason("no product comes later: rounding it would gain nothing", By.READER)
TESTED = Reason("a loop's stop test depends on it", By.READER)
AS_TESTED = Reason("a loop's stop test depends on the same, computed there again", By.READER)
NEAR = Reason("its distance to a constant is read by {}", By.READER)
ANGLE = Reason("rounded, a large angle or remainder is another one: read by {}", By.READER)
DIFFERENCE = Reason("a value that may be almost the same is subtracted from it by {}", By.READER)
AGAIN = Reason("the same is computed again elsewhere, and the two may cancel", By.READER)
RUINED = Reason("read by {}, which rounding would ruin", By.READER)
ATTENTION_RUINED = Reason("rounding would ruin what reads it")
_CAST = "; to have it low, cast its operands: x.astype(jnp.bfloat16)"
_OF_PRODUCTS = {
    read_flags.TESTED: Reason(
        f"a loop's stop test depends on it: rounded, the loop might not end: float32{_CAST}",
        By.READER,
    ),
    read_flags.AS_TESTED: Reason(
        f"a loop's stop test depends on the same, computed there again: float32{_CAST}", By.READER
    ),
    read_flags.CANCELS: Reason(
        f"added to a sum over the same values, which cancels it: float32{_CAST}", By.READER
    ),
    read_flags.SOLUTION: Reason(
        f"beside a solve, a linear iteration or a spectrum, where errors grow: float32{_CAST}",
        By.READER,
    ),
    read_flags.SMALL: Reason(
        f"by a rotation, by constants of few columns, or into few cells: float32{_CAST}"
    ),
}
MEETS = Reason("its gradients, of which a loop, a sort or a rule gives one, add up in float32")
MAXIMUM = Reason("the maximum of float32 rows: exp(x - max(x)) is exactly 1 there")
MASKED = Reason("a mask or another array was added, and an exponential reads the sum")
POWER = Reason("a power, or a product of two values: float16 might not hold it")
SCALED = Reason("scaled later, as it is too large or small: float16 might not hold it")
CHANGED = Reason("an input changed by sums, or by small steps, as a recurrent state is")
RECURRENT = Reason("a recurrent state: it reaches itself by sums, not by a product")
STREAM = Reason("a residual stream: rounded as in layers without a loop")
NEW_IN_EACH_TURN = Reason("made anew by a product in each turn")
OF_A_CONSTANT = Reason("carried in float32: it starts as a constant")
WIDE_BODY = Reason("the loop's body leaves it in float32")
HANDED_ON = Reason("handed on as it is")
NO_RULE = Reason("no rule: as traced, float32")
UNKNOWN_FUNCTION = Reason("its function is unknown: in float32")
COMPARED = Reason("compared in float32: exact")
WIDE_SUM = Reason("a sum of float32 values")
KEPT_BY_RULES = Reason("kept in float32 by rules=", By.USER)
ATTENTION_KEPT_BY_RULES = Reason("its products are kept in float32 by rules=")
NO_LOW_CONSTANT = Reason("a constant that the compute dtype cannot hold")
WEIGHTS = Reason(
    f"range: divided by a sum of the same weights, which float16 might not hold{_CAST}"
)
PROPORTION = Reason(
    f"range: a logarithm, a root or a division reads it, and float16 might hold 0{_CAST}"
)
EXPONENTIAL = Reason(f"range: float16 might not hold an exponential{_CAST}")
POWERS = Reason(f"range: float16 might not hold a sum of powers{_CAST}")
UNHELD = Reason("read by a product of what float16 might not hold")
OUTSIDE = Reason(f"range: float16 has few bits of an operand so large or small{_CAST}")
OUT_OF_RANGE = frozenset({WEIGHTS, PROPORTION, EXPONENTIAL, POWERS, OUTSIDE})
"""For these a product is float32 together with its gradients, whose cotangents are out of range."""
UNKNOWN_CONSTANT = Reason("a constant whose values are not known")
UNCHANGED = Reason("nothing low goes into it", By.OPERANDS)
CONSTANTS = Reason("constants only", By.OPERANDS)
INPUTS = Reason("parameters and inputs only: nothing low went in", By.OPERANDS)
FOLLOWS = Reason("its operands are in float32", By.OPERANDS)


def of_place(settings: Any, eqn: Eqn) -> Reason | None:
    """Returns why the place of an operation has no low dtype, None where it has one."""
    if settings.as_written:
        return AS_WRITTEN
    if isinstance(settings.policy, Policy):
        return None
    path = settings.scope + scopes.of(eqn)
    low = scopes.compute_dtype(settings.policy, path).itemsize < FLOAT32.itemsize
    return None if low else BY_MAP


def of_rule(settings: Any, eqn: Eqn, state: State) -> Reason | None:
    """Returns the user's rule for an operation, or for one inside a function that it calls."""
    if not settings.rules:
        return None
    names = [eqn.primitive.name]
    if fusible.is_fusible_function(eqn):
        names = sorted(fusible.operations(eqn) & settings.held_full)
    for name in names:
        if name in settings.rules:
            word = settings.rules[name].value
            if word != "full" and state.kind == Kind.WIDE:  # its operands are float32, or a reader
                continue
            rounded = word == "full" and state.kind == Kind.LOW
            behind = ": computed in float32, rounded for the product that reads it"
            return Reason(f'rules={{"{name}": "{word}"}}{behind if rounded else ""}', By.USER)
    return None


def as_written(eqn: Eqn) -> Reason | None:
    """Returns why a product is not made low whatever the policy, None where it may be."""
    operands = eqn.invars[:2]
    if any(getattr(v.aval, "dtype", None) != FLOAT32 for v in (*operands, *eqn.outvars)):
        return NOT_FLOAT32
    if not has_default_precision(eqn):
        return ITS_PRECISION
    if eqn.params.get("preferred_element_type") not in (None, FLOAT32):
        return ITS_RESULT_DTYPE
    if any(v.aval.size == 0 for v in (*operands, *eqn.outvars)):
        return EMPTY
    return None


def attention_as_written(eqn: Eqn, settings: Any, low: Any, *, is_exact: bool) -> Reason | None:
    """Returns why an attention is not made low, None where it may be."""
    if low is None:
        return NO_LOW_DTYPE
    if op_class("dot_general", settings.rules) is not OpClass.LOWER:
        return ATTENTION_KEPT_BY_RULES
    if any(v.aval.dtype != FLOAT32 for v in eqn.invars[: named_attention.MULTIPLIED]):
        return NOT_FLOAT32
    return ATTENTION_RUINED if is_exact else None


def has_default_precision(eqn: Eqn) -> bool:
    """Whether a product leaves its precision to JAX: any other one asks for float32."""
    precision = eqn.params.get("precision")
    both = precision if isinstance(precision, tuple) else (precision,)
    return all(p in (None, lax.Precision.DEFAULT) for p in both)


def of_product(flag: int) -> Reason:
    """Returns why a product is not made low for the sake of a reader that set a flag."""
    return _OF_PRODUCTS[flag]


def of_reader(read: int) -> Reason | None:
    """Returns why a reader needs a value that is not rounded, None where none does."""
    if not read & read_flags.UNROUNDED:
        return None
    if read & read_flags.TESTED:
        return TESTED
    if read & read_flags.AS_TESTED:
        return AS_TESTED
    if read & read_flags.NEAR:
        return NEAR
    if read & read_flags.AGAIN:
        return AGAIN
    return DIFFERENCE if read & read_flags.DIFFERENCE else RUINED


def of_reader_beside_a_product(read: int) -> Reason | None:
    """Returns the same of a value that a product reads, too, and that would be low for it."""
    return of_reader(read) if read & read_flags.PRODUCT else None


def of_no_gain(read: int) -> Reason:
    """Returns why a value behind the last product is not rounded."""
    return OUTPUT if read & read_flags.OUTPUT else BEHIND


def of_carry(before: State, state: State, *, is_recurrent: bool) -> Reason:
    """Returns the reason of the dtype of a loop's carry.

    Args:
      before: the state of what enters the loop.
      state: the state of the carry.
      is_recurrent: whether it reaches itself by no product: low, it is a residual stream.
    """
    if state.is_recurrent:
        return RECURRENT
    if state.kind == Kind.LOW:
        return STREAM if is_recurrent else NEW_IN_EACH_TURN
    if state.kind == Kind.NEUTRAL:
        return HANDED_ON
    return OF_A_CONSTANT if before.kind == Kind.CONSTANT else WIDE_BODY


def of_operands(
    eqn: Eqn, state: State, operands: Sequence[State], read: int, *, widest: bool
) -> Reason:
    """Returns the reason of an operation that takes the dtype of its operands."""
    if state.kind == Kind.CONSTANT:
        return CONSTANTS
    if state.kind == Kind.NEUTRAL:
        return INPUTS
    if state.kind == Kind.LOW or any(s.kind == Kind.WIDE for s in operands):
        return FOLLOWS
    if state.is_recurrent and not widest:
        return CHANGED
    lows = sorted({short_name(s.dtype) for s in operands if s.kind == Kind.LOW})
    if len(lows) > 1:
        return Reason(f"operands in {' and '.join(lows)}")
    if lows and (constant := _too_fine(eqn, operands)) is not None:
        return Reason(f"its constant {constant:.4g} is no {lows[0]} number")
    if widest and any(s.kind == Kind.NEUTRAL for s in operands):
        return Reason('rules="widest": a float32 operand wins', By.USER)
    if any(s.kind == Kind.CONSTANT and s.values is None for s in operands):
        return UNKNOWN_CONSTANT
    return of_no_gain(read) if lows else FOLLOWS


def _too_fine(eqn: Eqn, operands: Sequence[State]) -> float | None:
    """Returns a constant among the operands that the dtype of a low one cannot hold."""
    dtype = next(s.dtype for s in operands if s.kind == Kind.LOW)
    literals = [v for v in eqn.invars if compat.is_literal(v) and is_float32(v)]
    values = [float(v.val) for v in literals if v.aval.ndim == 0]
    values += [x for s in operands if s.kind == Kind.CONSTANT for x in s.values or ()]
    return next((x for x in values if not keeps(dtype, x)), None)
