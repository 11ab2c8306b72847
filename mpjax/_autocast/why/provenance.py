"""Gives each operation of a plan the reason for its dtype, traced back to its first cause.

Example: a plan says that a division is in float32. The reason is the sum before it, perhaps in
another function. So each float32 value remembers the operation that first asked for float32.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from mpjax._autocast import speed
from mpjax._autocast.arrange.plan import Plan
from mpjax._autocast.decide import control, read_flags, reasons
from mpjax._autocast.decide.decided import Action, Decision, unchanged_products
from mpjax._autocast.decide.reasons import By
from mpjax._autocast.decide.states import Kind
from mpjax._autocast.eight_bits import quantized
from mpjax._autocast.known import named_attention, scopes
from mpjax._autocast.why import readers
from mpjax._base import compat
from mpjax._base.dtypes import FLOAT32, short_name
from mpjax._base.own_primitives import is_own
from mpjax._jaxpr import sizes, structure
from mpjax._jaxpr.equation import Eqn
from mpjax._jaxpr.op_rules import EXACT, OP_RULES, PRODUCTS, SILENT, only_moves


@dataclass(frozen=True)
class WideSource:
    """The operation that first asked for float32, its module, and its reason."""

    operation: str
    module: str
    reason: str


@dataclass(frozen=True)
class OperationDtype:
    """One operation, its dtype, and the reason.

    `cause` is the source of a float32 operand that this operation follows; None if the reason is
    the operation's own.
    """

    module: str
    operation: str
    dtype: str
    reason: str
    cause: WideSource | None
    where: str


Causes = list[WideSource | None]

ACCUMULATED = "a product's float32 sums, which no product reads"
WRITTEN_SO = "as written: in a dtype of its author's choice"
ROUNDED = "rounded as written, though "
FUSED = "fused: float32 between low values, not stored"


def findings(plan: Plan) -> list[OperationDtype]:
    """Returns the dtype of each operation on float32 values and its reason, in program order."""
    walk = _ReasonWalk()
    jaxpr = plan.jaxpr.jaxpr
    walk.plan(plan, (), [None] * len(jaxpr.invars), [None] * len(jaxpr.outvars))
    return walk.findings


class _ReasonWalk:
    def __init__(self) -> None:
        self.findings: list[OperationDtype] = []

    def plan(
        self,
        plan: Plan,
        around: tuple[str, ...],
        incoming: Causes,
        outside: readers.Readers,
    ) -> Causes:
        """Adds the operations of a plan; returns the causes of its outputs, read by `outside`."""
        asking = readers.of(plan, outside)
        causes: dict[Any, WideSource | None] = dict(
            zip(plan.jaxpr.jaxpr.invars, incoming, strict=True)
        )
        stored = _stored(plan)
        for decision in plan.decisions:
            eqn = decision.eqn
            path = _path(around, eqn)
            operands = [None if compat.is_literal(v) else causes.get(v) for v in eqn.invars]
            if decision.call is not None:
                outs = self.call(plan, decision, path, operands, asking)
            else:
                outs = self.operation(plan, decision, "/".join(path), operands, stored, asking)
                if decision.unchanged is not None:
                    self.unchanged(decision.unchanged, path)
            causes.update(zip(eqn.outvars, outs, strict=True))
        return [None if compat.is_literal(v) else causes.get(v) for v in plan.jaxpr.jaxpr.outvars]

    def call(
        self,
        plan: Plan,
        decision: Decision,
        path: tuple[str, ...],
        operands: Causes,
        asking: dict[Any, readers.Reader],
    ) -> Causes:
        """Adds the operations inside a call, loop or branch; returns the causes of its results."""
        eqn, call = decision.eqn, decision.call
        self.carries(decision, "/".join(path))
        handed = [a or b for a, b in zip(operands, _carried_causes(decision, path), strict=True)]
        outs: Causes = [None] * len(eqn.outvars)
        outside = readers.inside(decision, asking)
        programs = zip(call.programs, _incoming(eqn, handed), outside, strict=True)
        for inner, incoming, read in programs:
            causes = self.plan(inner, path, incoming, read)
            if len(causes) == len(outs):  # not the condition of a `while`
                outs = [a or b for a, b in zip(outs, causes, strict=True)]
        # Of what is low inside and float32 outside.
        widened = WideSource(_name(eqn), "/".join(path), reasons.OUTPUT.text)
        wide = [state.kind == Kind.WIDE for state in call.out_states]
        return [cause or (widened if w else None) for cause, w in zip(outs, wide, strict=True)]

    def unchanged(self, call: control.DecidedCall, around: tuple[str, ...]) -> None:
        """Adds the products inside a call that runs as traced."""
        for decision in unchanged_products(call):
            eqn = decision.eqn
            module, where = "/".join(_path(around, eqn)), scopes.location(eqn)
            reason = reasons.AS_WRITTEN if scopes.is_as_written(eqn) else decision.reason
            dtype = short_name(eqn.invars[0].aval.dtype)
            row = OperationDtype(module, eqn.primitive.name, dtype, reason.text, None, where)
            self.findings.append(row)

    def carries(self, decision: Decision, module: str) -> None:
        """Adds the carries of a loop, by place, with their dtypes and reasons."""
        eqn, call = decision.eqn, decision.call
        where = scopes.location(eqn)
        carried = zip(eqn.outvars, call.out_states, call.carried, strict=False)
        for i, (var, state, reason) in enumerate(carried):
            if state.kind is Kind.FOREIGN:
                continue
            shape = ",".join(map(str, var.aval.shape))
            dtype = short_name(state.dtype if state.kind is Kind.LOW else FLOAT32)
            name = f"{eqn.primitive.name} carry {i} [{shape}]"
            self.findings.append(OperationDtype(module, name, dtype, reason.text, None, where))

    def operation(
        self,
        plan: Plan,
        decision: Decision,
        module: str,
        operands: Causes,
        stored: dict[Any, bool | None],
        asking: dict[Any, readers.Reader],
    ) -> Causes:
        eqn = decision.eqn
        inherited = next((c for c in operands if c is not None), None)
        if not any(map(sizes.is_float32, eqn.outvars)):
            self.foreign(plan, eqn, module, asking)
            return [None] * len(eqn.outvars)
        wide = [plan.states[v].kind == Kind.WIDE for v in eqn.outvars]
        if not _computes(eqn):
            return [inherited if w else None for w in wide]
        name, cause = _name(eqn), None
        if decision.reason.by is By.OPERANDS and any(wide):
            cause = inherited
        if cause and cause.operation in PRODUCTS:  # of what is asked last
            reason = _of_sums(plan, eqn, asking, otherwise=cause.reason)
        else:
            reason = cause.reason if cause else _sentence(plan, decision, stored, asking)
        dtype = short_name(_dtype(plan, decision, stored))
        where = scopes.location(eqn)
        self.findings.append(OperationDtype(module, name, dtype, reason, cause, where))
        is_product = decision.action in (Action.PRODUCT, Action.ATTENTION)
        first = _of_sums(plan, eqn, asking, otherwise=ACCUMULATED) if is_product else reason
        origin = cause or WideSource(name, module, first)
        return [origin if w else None for w in wide]

    def foreign(self, plan: Plan, eqn: Eqn, module: str, asking: dict[Any, readers.Reader]) -> None:
        """Adds an operation on a floating dtype other than float32, which its author chose."""
        dtypes = {v.aval.dtype for v in eqn.outvars if hasattr(v.aval, "dtype")}
        floats = [d for d in dtypes if jnp.issubdtype(d, jnp.floating)]
        if not floats:
            return
        where, dtype = scopes.location(eqn), short_name(floats[0])
        if wants := _rounds(plan, eqn):
            asked = reasons.of_reader(wants)
            why = ROUNDED + _named(asked, eqn, asking) if asked else ""
        elif _computes(eqn):
            why = reasons.AS_WRITTEN.text if scopes.is_as_written(eqn) else WRITTEN_SO
        else:
            return
        self.findings.append(OperationDtype(module, _name(eqn), dtype, why, None, where))


def _path(around: tuple[str, ...], eqn: Eqn) -> tuple[str, ...]:
    """Returns the names of the modules around an equation."""
    return around + tuple(name for name in scopes.of(eqn) if name != scopes.AS_WRITTEN)


def _is_narrow(atom: Any) -> bool:
    dtype: Any = getattr(atom.aval, "dtype", FLOAT32)
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize <= 2


def _rounds(plan: Plan, eqn: Eqn) -> int:
    """Returns the flags of a value that its author rounds though a reader needs it unrounded, or 0.

    Only for the first such value: values computed from it lose nothing more.
    """

    def wanted(atom: Any) -> int:
        if compat.is_literal(atom) or not _is_narrow(atom):
            return 0
        return plan.reads.get(atom, 0) & read_flags.UNROUNDED

    if is_own(eqn.primitive) or scopes.is_as_written(eqn) or any(map(wanted, eqn.invars)):
        return 0
    return wanted(eqn.outvars[0])


def _computes(eqn: Eqn) -> bool:
    """Whether an equation computes and so has a row: moves, such as a reshape, have none."""
    name = eqn.primitive.name
    rule = OP_RULES.get(name)
    if named_attention.is_attention(eqn):
        return True
    if is_own(eqn.primitive):
        return False
    return structure.is_call(eqn) or (name not in SILENT if rule is None else not only_moves(eqn))


def _name(eqn: Eqn) -> str:
    """Returns the name of an equation's primitive, or of the function that it calls."""
    called = structure.single_program(eqn) is not None and structure.function_name(eqn)
    return called or eqn.primitive.name


def _incoming(eqn: Eqn, operands: Causes) -> list[Causes]:
    """Returns the causes of the inputs of each program of a call, in the order of its plans."""
    return [[operands[i] for i in part.operands] for part in structure.parts(eqn)]


def _carried_causes(decision: Decision, path: tuple[str, ...]) -> Causes:
    """Returns the loop as the cause of each operand that is a float32 carry because of it."""
    eqn, call = decision.eqn, decision.call
    causes: Causes = [None] * len(eqn.invars)
    body = structure.parts(eqn)[-1]
    for place, reason in zip(body.operands[body.carried], call.carried, strict=False):
        if call.operand_states[place].kind == Kind.WIDE:
            causes[place] = WideSource(_name(eqn), "/".join(path), reason.text)
    return causes


def _stored(plan: Plan) -> dict[Any, bool | None]:
    """Returns, for each value made in a group, whether it is stored low; None if not stored."""
    stored_low: dict[Any, bool | None] = {}
    within = [step.attention.steps if step.attention else [step] for step in plan.steps]
    for step in itertools.chain.from_iterable(within):
        if step.group and not step.group.marks.native:
            made = [v for i in step.members for v in plan.decisions[i].eqn.outvars]
            stored_low.update(dict.fromkeys(made, None))
            stored_low.update((v, is_low) for v, is_low, _ in step.group.outputs)
    return stored_low


def _dtype(plan: Plan, decision: Decision, stored: dict[Any, bool | None]) -> Any:
    """Returns the dtype that `explain` shows: of a product's operands, or of another's result."""
    if decision.action is Action.PRODUCT:
        return quantized.shown_dtype(decision.how) if decision.how else decision.low
    if named_attention.is_attention(decision.eqn):
        return decision.low or decision.eqn.invars[0].aval.dtype
    if decision.eqn.primitive.name in PRODUCTS:
        return decision.eqn.invars[0].aval.dtype  # a product that is left as it was written
    out = decision.eqn.outvars[0]
    state = plan.states[out]
    return state.dtype if state.kind == Kind.LOW and stored.get(out, True) else FLOAT32


def _sentence(
    plan: Plan,
    decision: Decision,
    stored: dict[Any, bool | None],
    asking: dict[Any, readers.Reader],
) -> str:
    """Returns the reason of a decision; of a low value, where it is stored."""
    eqn, reason = decision.eqn, decision.reason
    is_product = decision.action in (Action.PRODUCT, Action.ATTENTION)
    state = plan.states[eqn.outvars[0]]
    is_by_rule = reason.by is By.USER and stored.get(eqn.outvars[0], True) is not None
    if state.kind == Kind.LOW and not is_product and not is_by_rule:
        return _where_stored(eqn, state.dtype, stored)
    return _named(reason, eqn, asking)


def _of_sums(plan: Plan, eqn: Eqn, asking: dict[Any, readers.Reader], *, otherwise: str) -> str:
    """Returns why the float32 sums of a low product, or what is made of them, are not rounded."""
    asked = reasons.of_reader(plan.reads.get(eqn.outvars[0], 0))
    return _named(asked, eqn, asking) if asked else otherwise


def _named(reason: reasons.Reason, eqn: Eqn, asking: dict[Any, readers.Reader]) -> str:
    """Returns the sentence of a reason, with the name of the operation that reads the value."""
    if reason.by is not By.READER:
        return reason.text
    reader = asking.get(eqn.outvars[0])
    if reason == reasons.NEAR and reader is not None and reader.of_an_angle:
        reason = reasons.ANGLE
    return reason.text.format(reader or "another operation")


def _where_stored(eqn: Eqn, dtype: Any, stored: dict[Any, bool | None]) -> str:
    out = eqn.outvars[0]
    if out not in stored:
        is_exact = eqn.primitive.name in EXACT or speed.is_exact(eqn, dtype)
        return f"on low values: {'exact' if is_exact else 'one rounding'}"
    is_low = stored[out]
    if is_low is None:
        return FUSED
    return "computed in float32, rounded once where it is stored" if is_low else reasons.OUTPUT.text
