"""Runs a plan: binds every equation again, each value in its decided dtype.

A value is made in one dtype and cast to another, once, when an equation first reads it so. Nothing
is decided here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpjax._autocast import product, speed
from mpjax._autocast.arrange.plan import Plan
from mpjax._autocast.decide.decided import Action, Decision
from mpjax._autocast.decide.states import Kind, State
from mpjax._autocast.eight_bits import delayed
from mpjax._autocast.product import precision
from mpjax._autocast.run import (
    attended,
    calls,
    remat,
    sums,
)
from mpjax._autocast.run.group_functions import GroupFunctions
from mpjax._autocast.run.values import Value
from mpjax._autocast.speed import FusedGroup
from mpjax._base import compat
from mpjax._base.dtypes import FLOAT32
from mpjax._jaxpr.binding import bind, written_at, written_here
from mpjax._jaxpr.equation import Eqn
from mpjax._jaxpr.op_rules import OP_RULES, PRODUCTS, OpClass
from mpjax._jaxpr.sizes import is_float32


class Interpreter:
    """Runs plans; with `products`, inside a `jax.checkpoint` of the user's that has a policy.

    One run of a whole program shares its `functions`.
    """

    def __init__(self) -> None:
        self.products: remat.NamedProducts | None = None
        self.functions = GroupFunctions()
        self.history = delayed.NONE

    def inside_checkpoint(self) -> Interpreter:
        """Returns a runner for the inside of a `jax.checkpoint` that has a policy."""
        inner = copy.copy(self)
        inner.products = remat.NamedProducts()
        return inner

    def recording(self, history: delayed.Amaxes) -> Interpreter:
        """Returns a runner for a plan and its inner plans, whose products read `history`."""
        if history is self.history:
            return self
        inner = copy.copy(self)
        inner.history = history
        return inner

    def run(
        self,
        plan: Plan,
        arrays: Sequence[Any],
        low_copies: Sequence[Any] | None = None,
        out_states: Sequence[State] | None = None,
    ) -> list[Any]:
        """Returns the outputs of a plan.

        Args:
          plan: the plan to run.
          arrays: its inputs, each in the dtype of its state.
          low_copies: for each input a low copy, or None where the plan wants none.
          out_states: the states of the outputs, by default those of the plan.
        """
        jaxpr = plan.jaxpr.jaxpr
        recorder = self.recording(self.history.assigned(plan))
        low_copies = low_copies or [None] * len(arrays)
        env: dict[Any, Value] = {
            v: Value(c, plan.states[v])
            for v, c in zip(jaxpr.constvars, plan.jaxpr.consts, strict=True)
        }
        inputs = zip(jaxpr.invars, arrays, plan.in_states, low_copies, strict=True)
        env |= {v: Value(a, s, low_copy) for v, a, s, low_copy in inputs}
        for step in plan.steps:
            if step.group is not None:
                self.run_group(plan, step.group, env)
            elif step.attention is not None:
                attended.run(recorder, plan, step.attention, env)
            else:
                recorder.run_one(plan, plan.decisions[step.members[0]], env)
        wanted = plan.out_states if out_states is None else out_states
        return [self.value(v, env).form(s) for v, s in zip(jaxpr.outvars, wanted, strict=True)]

    def value(self, atom: Any, env: dict[Any, Value]) -> Value:
        if not compat.is_literal(atom):
            return env[atom]
        return Value(atom.val, State(Kind.FOREIGN))

    def run_one(self, plan: Plan, decision: Decision, env: dict[Any, Value]) -> None:
        eqn = decision.eqn
        values = [self.value(v, env) for v in eqn.invars]
        with written_at(eqn):
            if decision.action is Action.PRODUCT:
                outs = [self.product(plan, decision, values)]
            elif decision.action is Action.CALL:
                outs = calls.run(self, decision, values)
            elif decision.action is Action.ATTENTION:
                outs = attended.run_named(decision, values)
            elif decision.action is Action.NATIVE:
                operands = [_operand(v, a, decision.out_dtype) for v, a in _paired(eqn, values)]
                outs = bind_low(eqn, operands)
            elif decision.action is Action.AS_TRACED:
                outs = self.as_traced(plan, eqn, values)
            else:
                self.keep(plan, eqn, values, env)
                return
            for var, out in zip(eqn.outvars, outs, strict=True):
                env[var] = _stored(out, plan.states[var])
                if eqn.primitive.name == "dequantized":  # an 8-bit product reads these as they are
                    env[var].stored = (values[0].full, values[1].full)

    def as_traced(self, plan: Plan, eqn: Eqn, values: Sequence[Value]) -> list[Any]:
        params = precision.restored(eqn, plan.settings.float32_precision)
        asked = plan.settings.dot_precision
        if asked is not None and eqn.primitive.name in PRODUCTS:
            params = product.with_precision(eqn.params, asked)
        outs = bind(eqn, [v.full for v in values], params)
        if self.products is None or eqn.primitive.name not in PRODUCTS:
            return outs
        return [self.products.named(eqn, out) for out in outs]

    def keep(self, plan: Plan, eqn: Eqn, values: Sequence[Value], env: dict[Any, Value]) -> None:
        """Moves values in the dtype in which they were made; their low copies move with them."""
        outs = bind_low(
            eqn,
            [v.made if is_float32(a) else v.full for a, v in zip(eqn.invars, values, strict=True)],
        )
        same_size = len(eqn.outvars) == 1 and _same_size(eqn)
        for var, out in zip(eqn.outvars, outs, strict=True):
            state = plan.states[var]
            lazy = None
            if same_size and state.kind in (Kind.NEUTRAL, Kind.WIDE):
                lazy = _moved(eqn, values)
            env[var] = Value(out, state, lazy=lazy)

    def product(self, plan: Plan, decision: Decision, values: Sequence[Value]) -> Any:
        eqn, low = decision.eqn, decision.low
        params = eqn.params
        asked = plan.settings.dot_precision
        if asked is None and plan.settings.float32_precision is not None:
            asked = precision.LOW  # or JAX would write the user's global default into it
        if asked is not None:
            params = product.with_precision(params, asked)
        how, amaxes = self.history.of(decision, decision.how or product.low(low))
        x, y = (
            (v.carrier(low), v.made if how.reads_as_made(i) else v.low(low))
            for i, v in enumerate(values[:2])
        )
        out = product.product(
            eqn.primitive.name,
            params,
            x,
            y,
            [v.full for v in values[2:]],
            how=how,
            out_dtype=decision.out_dtype,
            amaxes=amaxes,
            stored=tuple(v.stored for v in values[:2]),
            wide=self.products is not None,
        )
        return out if self.products is None else self.products.named(eqn, out)

    def run_group(self, plan: Plan, group: FusedGroup, env: dict[Any, Value]) -> None:
        if group.marks.native:
            self.run_native(plan, group, env)
            return
        arrays = [
            speed.behind_barrier(env[v].made) if v in group.marks.behind else env[v].made
            for v in group.inputs
        ]
        forms = iter(self.functions.run(plan, group, arrays))
        for var, is_low, is_full in group.outputs:
            low = next(forms) if is_low else None
            full = next(forms) if is_full else None
            env[var] = _both_forms(plan.states[var], low, full)

    def run_native(self, plan: Plan, group: FusedGroup, env: dict[Any, Value]) -> None:
        local = dict(env)
        for eqn in group.eqns:
            values = [self.value(v, local) for v in eqn.invars]
            with written_at(eqn):
                rule = OP_RULES.get(eqn.primitive.name)
                if rule and rule.op_class is OpClass.KEEP:
                    self.keep(plan, eqn, values, local)
                    continue
                state = plan.states[eqn.outvars[0]]
                operands = [_operand(v, a, state.dtype) for v, a in _paired(eqn, values)]
                outs = bind(eqn, operands) if rule else speed.native(eqn, operands, state.dtype)
                if eqn.outvars[0] in group.marks.stored:
                    outs = [speed.stored(out) for out in outs]
                if eqn.outvars[0] in group.marks.several:
                    dtype = state.dtype
                    outs = [speed.stored_cotangent(x, dtype, apart=True) for x in outs]
                for v, out in zip(eqn.outvars, outs, strict=True):
                    local[v] = Value(out, plan.states[v])
        env.update((v, local[v]) for v, _, _ in group.outputs)


def bind_low(eqn: Eqn, values: Sequence[Any]) -> list[Any]:
    """Returns the results of an equation on operands that may be low: moves, single operations."""
    if outs := speed.pick(eqn, values):
        return outs
    if sums.is_summed(eqn) and any(map(sums.is_low, values)):
        return sums.bind(eqn, values)
    return speed.bind_pooled(eqn, values)


def _paired(eqn: Eqn, values: Sequence[Value]) -> Any:
    return zip(values, eqn.invars, strict=True)


def _operand(value: Value, atom: Any, dtype: Any) -> Any:
    if not is_float32(atom):
        return value.full
    if compat.is_literal(atom):
        return np.asarray(value.full, dtype)
    return value.cast(dtype)


def _stored(array: Any, state: State) -> Value:
    if state.kind == Kind.LOW and array.dtype != state.dtype:
        array = array.astype(state.dtype)
    if state.would_be is not None and array.dtype == state.would_be:
        array = array.astype(FLOAT32)  # once, for all readers
    return Value(array, state)


def _both_forms(state: State, low: Any, full: Any) -> Value:
    if low is None:
        return Value(full, State(Kind.WIDE))
    if full is None:
        return Value(low, state)
    return Value(full, State(Kind.WIDE), low_copy=low)


def _same_size(eqn: Eqn) -> bool:
    """Whether a low copy may move as its value does: to as many elements, on the same mesh."""
    (source, *_), (out,) = eqn.invars, eqn.outvars
    same = source.aval.size == out.aval.size and is_float32(source)
    return same and eqn.primitive.name not in ("mesh_cast", "reshard")


def _moved(eqn: Eqn, values: Sequence[Value]) -> Callable[[Any], Any]:
    """Returns a function that moves the operand's low copy, which saves a cast of the result."""
    here = written_here(eqn)

    def lazy(dtype: Any) -> Any:
        rest = [v.full for v in values[1:]]
        with here():
            return bind(eqn, [values[0].low(dtype), *rest])[0]

    return lazy
