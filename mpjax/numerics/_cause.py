"""Names the cause in words, from the rows: range, loss scale, a bad leaf, or not precision."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from mpjax._base.dtypes import short_name
from mpjax._jaxpr.op_rules import PRODUCTS
from mpjax._policies.policy import get_policy
from mpjax.numerics._advice import Compared, other_policies
from mpjax.numerics._follow import Followed
from mpjax.numerics._overflow import AMAX, BORN_INF, INF, NAN, ORIGIN
from mpjax.numerics._plan import BACKWARD, RunPlan
from mpjax.numerics._program import TwinRun
from mpjax.numerics._report import Cause, Row, count, whole
from mpjax.numerics._subject import Subject

FLOAT32 = get_policy("float32")
_POLES = frozenset({"log", "log1p", "atanh", "acosh", "erf_inv"})
"""Operations that give inf only at a pole: an operand of theirs was rounded to it, as 1/0."""

_MASK = "mask with jnp.finfo(x.dtype).min in place of -inf, or keep one position unmasked."


@dataclasses.dataclass(frozen=True)
class Again:
    """Further runs of the subject: with another loss scale, and in float32."""

    read: Callable[[float], TwinRun]
    finite_in_float32: Callable[[], bool]
    written: Callable[[Row], bool]  # whether an operation is low in the float32 program too
    rounded_before: Callable[[Row], str]  # where the function itself rounds an operand, or ""
    operand: Callable[[int], int | None]  # the row of the value of 16 bits that an operation reads
    compared: Callable[[Any], Compared]  # another policy beside float32


def decide(
    subject: Subject,
    plan: RunPlan,
    read: TwinRun,
    followed: Followed,
    rows: dict[int, Row],
    scale: float,
    again: Again,
) -> Cause:
    """Returns the cause; its claims about another loss scale or float32 were measured."""
    if all(read.finite):
        return _healthy(rows, followed, subject)
    born = [rows[r] for r in followed.born]
    leaves = [rows[r] for r in followed.leaves]
    bad = next((r for r in leaves if _is_bad(r, subject, made=bool(born or followed.turned))), None)
    if bad is not None:
        return _leaf(bad)
    if not born:
        # No operation made it of finite operands: -inf of a mask met, or an inf is written.
        turned = [rows[r] for r in followed.turned]
        data = next((r for r in leaves if r.amax > 0), None)  # a mask holds 0 and -inf alone
        return _masked(turned[0] if turned else None, leaves) if data is None else _leaf(data)
    first, number = born[0], followed.born[0]
    dtype = plan.sites[number].dtype
    if first.phase == BACKWARD and subject.scaled and scale > 1:
        fitting = _fitting_scale(plan, again, scale)  # cotangents grow with it: try lower ones
        if fitting is not None:
            operand = again.operand(number)  # a product rounds the cotangent that it reads
            read_in = dtype if operand is None else plan.sites[operand].dtype
            return _scale_too_high(first, read_in, scale, fitting)
    by_range = passes_range(plan, read, number) and first.operation not in _POLES
    if is_narrow(dtype) and by_range:
        fix = (
            _leave_out(first)
            if again.written(first)
            else other_policies([first], subject, again.compared)
        )
        return _beyond(first, dtype, _magnitude(plan, read, number), subject, fix)
    if again.finite_in_float32():
        largest, narrow = _largest_operand(plan, read, number), _narrowest(plan)
        if first.operation in PRODUCTS and narrow and largest > float(jnp.finfo(narrow).max):
            fix = other_policies([first], subject, again.compared)
            return _beyond(first, narrow, largest, subject, fix)
        operand = again.operand(number)
        return _rounding(first, None if operand is None else rows[operand], subject, again)
    return _out_of_range(first) if first.operation == "gather" else _in_float32_too(first, again)


def _in_float32_too(first: Row, again: Again) -> Cause:
    text = f"{_place(first)} makes {_what(first)} of finite operands, and so it does in float32"
    if rounded := again.rounded_before(first):
        text += f": the function itself rounds what that reads, {rounded}."
        fix = "Leave that cast out: in 16 bits a probability near 1 is 1, and a small number 0."
        return Cause("everywhere", text, fix)
    fix = "Guard the operand (a division by 0, log or sqrt of 0, 0 * inf): no precision helps."
    return Cause("everywhere", text + ": not a matter of precision.", fix)


def _out_of_range(row: Row) -> Cause:
    text = f"{_place(row)} gives {_what(row)} where an index is out of range: jnp.take and "
    text += "x.at[i].get(mode='fill') do. Not a matter of precision."
    fix = "Look at the indices (tokens, labels): from 0 to the size of the axis less 1."
    return Cause("everywhere", text, fix)


def passes_range(plan: RunPlan, read: TwinRun, number: int) -> bool:
    """Whether a value became inf, or NaN in a dtype that has no inf."""
    made = read.values[number][ORIGIN]
    return made == BORN_INF or plan.sites[number].dtype == jnp.float8_e4m3fn


def is_narrow(dtype: Any) -> bool:
    """Whether a dtype has 16 bits or fewer."""
    return jnp.dtype(dtype).itemsize <= 2


def _healthy(rows: dict[int, Row], followed: Followed, subject: Subject) -> Cause:
    """Returns the cause for a finite loss and gradients: none, or a parameter with inf or NaN."""
    apart = [rows[r] for r in followed.apart]
    arguments = [r for r in apart if r.phase == "argument"]
    spoilt = [r for r in arguments if r.module.partition("/")[0] == subject.parameters]
    if spoilt:
        row = spoilt[0]
        text = f"the parameter {_leaf_name(row)} holds {count(row)} among {math.prod(row.shape)} "
        text += "elements. Loss and gradients are finite: a tanh, a maximum or a where hides it, "
        text += "or nothing reads it."
        fix = "Look at its initializer or the checkpoint; no step mends it, its gradient being 0."
        return Cause("leaf", text, fix)
    inner = [r for r in rows.values() if r.phase not in ("argument", "constant") and r.amax > 0]
    what = "nothing non-finite" if not apart else "nothing that is not finite gets into them"
    if not inner:
        return Cause("none", f"none: {what}.", "There is nothing to do.")
    least = min(inner, key=lambda r: r.headroom)
    text = f"none: {what}; the least headroom is {least.headroom:.1f} bits, "
    fix = "After a skipped step pass its metrics, step.diagnose(state, batch, metrics): they hold "
    fix += "the loss scale that it used."
    return Cause("none", text + f"in {_place(least)}.", fix)


def _is_bad(row: Row, subject: Subject, *, made: bool) -> bool:
    """Whether a leaf is a cause: NaN, an inf among parameters, or one that alone is to blame.

    Elsewhere an inf may be a mask, which is meant.
    """
    parameter = row.module.partition("/")[0] == subject.parameters
    return bool(row.nan) or parameter or not made


def _leaf(row: Row) -> Cause:
    what = f"{row.nan} NaN" if row.nan else f"{row.inf} inf"
    text = f"the {row.phase} {_leaf_name(row)} came in with {what} "
    text += f"among {math.prod(row.shape)} elements."
    fix = "Look at what made it: the batch, or for a parameter the step before and the "
    fix += "checkpoint; a skipped step does not change parameters."
    if not row.nan:
        fix += f" If it is a mask, {_MASK}"
    return Cause("leaf", text, fix)


def _leaf_name(row: Row) -> str:
    return repr(row.module) if row.module else f"{row.dtype}{list(row.shape)}"


def _masked(turned: Row | None, leaves: Sequence[Row]) -> Cause:
    if turned is None:
        text = "an inf or NaN that is written in the function gets into the result."
        return Cause("masked", text, "Choose with jnp.where before it is computed with.")
    text = f"{_place(turned)} makes NaN of infinities that are masks or constants: "
    text += "inf - inf, or 0 * inf, as in a softmax over a row that is masked as a whole."
    if leaves:
        text += f" They came in with {_leaf_name(leaves[0])} ({leaves[0].inf} inf)."
    return Cause("masked", text, _MASK.capitalize())


def _fitting_scale(plan: RunPlan, again: Again, scale: float) -> float | None:
    """Returns the largest power of two that was found to fit, None where 1 does not."""
    one = again.read(1.0)
    if not all(one.finite):
        return None
    largest = [
        math.log2(float(jnp.finfo(site.dtype).max)) - math.log2(float(values[AMAX]))
        for site, values in zip(plan.sites, one.values, strict=True)
        if site.phase == BACKWARD and is_narrow(site.dtype) and values[AMAX] > 0
    ]
    # scale * amax <= max for each cotangent, so log2(scale) <= log2(max / amax).
    exponent = min([math.floor(x) for x in largest] + [math.ceil(math.log2(scale)) - 1])
    while exponent > 0:
        # That is an estimate, from one run: each power of two is tried, downwards.
        if all(again.read(2.0**exponent).finite):
            return 2.0**exponent
        exponent -= 1
    return 1.0


def _scale_too_high(row: Row, dtype: Any, scale: float, fitting: float) -> Cause:
    limit = float(jnp.finfo(dtype).max)
    text = f"the loss scale {whole(scale)} is too high: a cotangent in {_place(row)} passes "
    text += f"{limit:g}. With {whole(fitting)} all gradients are finite."
    fix = "A DynamicLossScale finds it by itself, at the price of some skipped steps; else type "
    fix += f"loss_scale=mpjax.DynamicLossScale({whole(fitting)})."
    return Cause("loss_scale", text, fix, fitting)


def _magnitude(plan: RunPlan, read: TwinRun, number: int) -> float:
    """Returns the magnitude of a value before it was rounded, 0 if that is not known."""
    rows = _rows_read(plan, number)
    known = [r for r in rows if r is not None and not is_narrow(plan.sites[r].dtype)]
    if len(known) != 1 or len(rows) != 1 or read.values[known[0]][INF] + read.values[known[0]][NAN]:
        return 0.0
    return float(read.values[known[0]][AMAX])


def _largest_operand(plan: RunPlan, read: TwinRun, number: int) -> float:
    """Returns the largest magnitude that an operation reads, which a product rounds itself."""
    rows = (r for r in _rows_read(plan, number) if r is not None)
    return max((float(read.values[r][AMAX]) for r in rows), default=0.0)


def _rows_read(plan: RunPlan, number: int) -> list[int | None]:
    """Returns the row of each value that an operation reads, None for one that has none."""
    node = next(n for n, r in plan.row_of.items() if r == number)
    return [plan.row_of.get(n) for n in plan.reads[node]]


def _narrowest(plan: RunPlan) -> Any:
    """Returns the dtype of 16 bits with the least range that a program has, None if it has none."""
    return min(
        (site.dtype for site in plan.sites if jnp.dtype(site.dtype).itemsize == 2),
        key=lambda dtype: float(jnp.finfo(dtype).max),
        default=None,
    )


def _beyond(row: Row, dtype: Any, magnitude: float, subject: Subject, fix: str) -> Cause:
    limit = float(jnp.finfo(dtype).max)
    size = f" ({magnitude:.3g})" if magnitude > limit else ""
    what = "a gradient" if row.phase == BACKWARD else "a value"
    text = f"{what}{size} passes {limit:g}, the largest {short_name(dtype)}, in {_place(row)}."
    if row.phase == BACKWARD:
        text += " A loss scale of 1 is too high as well." if subject.scaled else ""
    kind = "gradient_range" if row.phase == BACKWARD else "range"
    return Cause(kind, text, fix)


def _leave_out(row: Row) -> str:
    return (
        f"The function itself asks for {row.dtype} there, so that no policy changes it: leave that "
        "cast out, or scale the value first."
    )


def _rounding(row: Row, operand: Row | None, subject: Subject, again: Again) -> Cause:
    # Float32 is finite: an operand was rounded, as 1 - 1e-4 to 1.
    text = f"{_place(row)} makes {_what(row)} of finite operands; in float32 it does not: "
    text += "an operand was rounded, as a probability to 1 or a small number to 0."
    made_by = [operand] if operand and operand.phase == row.phase else []
    return Cause("precision", text, other_policies([*made_by, row], subject, again.compared))


def _place(row: Row) -> str:
    name = f"{row.operation} of {row.module!r}" if row.module else row.operation
    at = f", {row.at}" if row.at else ""
    where = f", {row.where}" if row.where else ""
    return f"{name} ({row.phase}{where}{at})"


def _what(row: Row) -> str:
    return "NaN" if row.nan else "inf"
