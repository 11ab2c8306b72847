"""Decides the state of each value of a jaxpr, and an action for each equation.

Decisions look both ways: forward, a value is low when a low value went into it; backward
(`reads`), it matters whether a product, an output or only float32 reads it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from mpjax._autocast.decide import control, products, reads, reasons, states
from mpjax._autocast.decide.decided import (
    Action,
    Decided,
    Decision,
    Outside,
    Settings,
    unchanged_products,
)
from mpjax._autocast.decide.may import norms
from mpjax._autocast.decide.products import DecideProgram, EightBits
from mpjax._autocast.decide.reasons import Reason
from mpjax._autocast.decide.rounding import Rounding
from mpjax._autocast.decide.states import Kind, State
from mpjax._autocast.known import (
    constants,
    fact_flags,
    facts,
    fusible,
    named_attention,
    scopes,
    traits,
    walk,
    ways,
)
from mpjax._autocast.known.activations import is_activation
from mpjax._base import compat
from mpjax._base.dtypes import FLOAT32
from mpjax._jaxpr import structure
from mpjax._jaxpr.equation import Eqn
from mpjax._jaxpr.op_rules import COMPARISONS, OP_RULES, PRODUCTS, OpClass, hands_on_each, op_class
from mpjax._jaxpr.sizes import is_float32
from mpjax._policies.policy import Policy

_ROWS_OR_COPIES = traits.RESIZES - traits.SLICES
"""Of an input they make rows of a table or copies, as of positions: no kept value."""


class Decider(Rounding):
    """Decides one equation of a jaxpr after the other; its arguments are those of `Rounding`."""

    eight_bits: EightBits
    decide_inner: DecideProgram

    def run(self, eight_bits: EightBits, inner: DecideProgram) -> Decided:
        """Returns the decisions.

        Args:
          eight_bits: decides which products are in 8 bits.
          inner: decides about the programs that equations hold.
        """
        self.eight_bits, self.decide_inner = eight_bits, inner
        self.compared: set[Any] = set()
        decisions = [self.decide(eqn) for eqn in self.jaxpr.eqns]
        out_states = tuple(
            self.output_state(v, w, self.steps.maker(v))
            for v, w in zip(self.jaxpr.outvars, self.out_reads, strict=True)
        )
        self.changed |= any(s.kind == Kind.LOW for s in (*self.states.values(), *out_states))
        return Decided(
            program=self.program,
            settings=self.settings,
            in_states=self.in_states,
            out_states=out_states,
            states=self.states,
            decisions=decisions,
            low_copies=tuple(self.low_copy(v) for v in self.jaxpr.invars),
            reads=self.reads,
            facts=self.facts,
            ahead=tuple(map(self.is_before_a_product, self.jaxpr.outvars)),
            changed=self.changed,
        )

    # -- one equation ----------------------------------------------------------------------

    def decide(self, eqn: Eqn) -> Decision:
        name = eqn.primitive.name
        settings = self.settings_at(eqn)
        if structure.is_call(eqn):
            return self.decide_call(eqn, settings)
        if not any(map(is_float32, (*eqn.outvars, *eqn.invars))):
            return self.foreign(eqn)
        if named_attention.is_attention(eqn):
            return products.decide_attention(self, eqn, settings)
        kind = op_class(name, settings.rules)
        if structure.applies_function(eqn):
            return self.as_traced(eqn, states.WIDE, reasons.UNKNOWN_FUNCTION)
        if kind is OpClass.LOWER or name in PRODUCTS:
            return products.decide(self, eqn, kind, settings, self.eight_bits)
        if name == "convert_element_type":
            return self.fused(eqn, self.converted(eqn), Reason("explicit cast"))
        if name in COMPARISONS:
            self.compared.update(eqn.outvars)
            return self.fused(eqn, states.FOREIGN, reasons.COMPARED)
        if name == "iota":
            count = eqn.params["shape"][eqn.params["dimension"]]
            return self.as_traced(
                eqn, states.constant(constants.positions(count)), Reason("positions")
            )
        if name == "dequantized":
            return self.as_traced(eqn, states.INPUT, Reason("a weight in 8 bits, times its scales"))
        if name == "bitcast_convert_type" or kind is None:
            operands = [self.state(v) for v in eqn.invars]
            return self.as_traced(eqn, states.unknown(operands), reasons.NO_RULE)
        return self.decide_by_class(eqn, kind, settings)

    def decide_by_class(self, eqn: Eqn, kind: OpClass, settings: Settings) -> Decision:
        name = eqn.primitive.name
        rule = OP_RULES[name]
        own = Reason(rule.reason) if kind is rule.op_class is OpClass.FULL else None
        operands = [states.WIDE if self.is_spectrum(v) else self.state(v) for v in eqn.invars]
        if name == "reduce_sum" and operands[0].kind == Kind.CONSTANT:
            dims = [eqn.invars[0].aval.shape[i] for i in eqn.params["axes"]]
            return self.fused(eqn, states.constant(constants.total(operands[0].values, dims)), own)
        low = self.low_dtype(eqn, settings)
        if low is None and not any(s.kind == Kind.LOW for s in operands):
            kind = OpClass.KEEP if kind is OpClass.KEEP else OpClass.FULL
        if kind is OpClass.FULL:
            state = states.full(operands)
            is_total = name in traits.RUNNING and state.kind == Kind.WIDE
            is_total |= name in traits.ACROSS and operands[0].kept
            return self.fused(eqn, states.kept(state) if is_total else state, own)
        if kind is OpClass.KEEP:
            return self.decide_keep(eqn, operands)
        if settings.as_written or low is None:
            return self.fused(eqn, states.full(operands), reasons.NO_LOW_DTYPE)
        followed = self.as_followed(eqn, operands)
        branches = self.with_branches(eqn, followed)
        state = states.follow(branches, widest=settings.widest)
        if state.kind == Kind.LOW:
            operands = branches
        if state.kind == Kind.NEUTRAL and any(_overflows(s, low) for s in operands):
            state = states.WIDE_PURE  # a mask: rounded, `(1 - seen) * -1e9` is -inf, or NaN
        if state.kind == Kind.CONSTANT:
            state = _of_constants(name, operands)
        if name not in traits.STAYS_KEPT:
            state = states.unkept(state)
        if name in traits.ADDS:
            alike = branches if operands is branches else followed
            state = self.of_sum(eqn, alike, state)
        if state.kind == Kind.LOW:
            state = _unrounded_parts(name, operands) or state
        return self.fused(eqn, state, own)

    def is_spectrum(self, atom: Any) -> bool:
        """Whether an operand is made of complex numbers that are no constants, as by an FFT."""
        if not jnp.issubdtype(atom.aval.dtype, jnp.complexfloating):
            return False
        return not facts.of_atom(atom, self.facts).flags & fact_flags.CONSTANT

    def with_branches(self, eqn: Eqn, operands: Sequence[State]) -> Sequence[State]:
        """The states of operands; a normalised branch that joins a stream counts as low."""
        branches = norms.branches(eqn, self.normalised)
        if not branches or self.steps.repeats_any(compat.variables(eqn)):  # the shift of a norm
            return operands
        read = self.reads.get(eqn.outvars[0], 0)
        return [
            self.as_normalised(eqn, state, read) if v in branches else state
            for v, state in zip(eqn.invars, operands, strict=True)
        ]

    def decide_keep(self, eqn: Eqn, operands: Sequence[State]) -> Decision:
        name = eqn.primitive.name
        known = zip(eqn.invars, operands, strict=True)
        floats = [s for v, s in known if is_float32(v) or self.is_spectrum(v)]  # a magnitude
        if hands_on_each(eqn, sorts=True):
            return self.keep(eqn, operands)
        state = floats[0] if floats else states.FOREIGN
        if state == states.INPUT and name in _ROWS_OR_COPIES:
            state = states.NEUTRAL
        if state.kind == Kind.CONSTANT:
            state = _of_constants(name, [state]) if name in ("neg", "abs") else state
        return self.keep(eqn, [state] * len(eqn.outvars))

    def converted(self, eqn: Eqn) -> State:
        source, target = eqn.invars[0].aval.dtype, eqn.params["new_dtype"]
        if target != FLOAT32:
            return states.FOREIGN
        if source == FLOAT32:
            return self.state(eqn.invars[0])
        if jnp.issubdtype(source, jnp.floating):
            is_low = source == self.low_dtype(eqn, self.settings_at(eqn))
            return states.widened(source) if is_low else states.NEUTRAL
        if compat.is_literal(eqn.invars[0]) and not jnp.issubdtype(source, jnp.complexfloating):
            return states.constant((float(eqn.invars[0].val),))
        return states.constant(constants.converted(source))

    def decide_call(self, eqn: Eqn, settings: Settings) -> Decision:
        is_loop = eqn.primitive.name in structure.LOOPS
        settings = _inside(settings, scopes.of(eqn), in_loop=is_loop or settings.in_loop)
        if fusible.is_fusible_function(eqn):
            return self.decide_function(eqn, settings)
        in_states = tuple(self.state(v) for v in eqn.invars)
        out_reads = tuple(self.reads.get(v, 0) for v in eqn.outvars)
        reads_of = reads.Inner(eqn, self.settings.other_reads, self.facts)
        call = control.decide_call(eqn, in_states, out_reads, settings, self.inner(eqn), reads_of)
        self.states.update(zip(eqn.outvars, call.out_states, strict=True))
        for v, *inside in zip(eqn.outvars, *(p.ahead for p in _bodies(eqn, call)), strict=True):
            if any(inside):
                self.ahead.add(v)
        if not call.changed:
            reason = self.of_unchanged_call(eqn, call)
            return Decision(eqn, Action.AS_TRACED, reason, unchanged=call)
        self.changed = True
        return Decision(eqn, Action.CALL, Reason("planned inside"), call=call)

    def of_unchanged_call(self, eqn: Eqn, call: control.DecidedCall) -> Reason:
        """The reason of a call that holds no low product, and that nothing low goes into."""
        if by_user := self.of_user(eqn, states.WIDE):
            return by_user
        is_function = structure.single_program(eqn) is not None
        is_function = is_function and not any(unchanged_products(call))
        if is_function and fusible.function_class(eqn) is OpClass.FULL:
            return reasons.FUNCTION
        return reasons.UNCHANGED

    def inner(self, eqn: Eqn) -> control.DecideInner:
        """Returns what decides about the programs of an equation, told what is known of inputs."""
        decide = self.eight_bits.entering(eqn, self.decide_inner)

        def decided(
            part: structure.Part,
            in_states: tuple[State, ...],
            out_reads: tuple[int, ...],
            settings: Settings,
        ) -> Decided:
            given = walk.entering(eqn, part, self.facts).given
            operands = [eqn.invars[place] for place in part.operands]
            ahead = tuple(map(self.is_before_a_product, operands))
            outside = Outside(given, ahead, self.steps.relations(operands))
            return decide(part.program, in_states, out_reads, settings, outside)

        return decided

    def decide_function(self, eqn: Eqn, settings: Settings) -> Decision:
        """A small function without products: run as one operation, decided as if inlined."""
        operands = tuple(self.state(v) for v in eqn.invars)
        low = self.low_dtype(eqn, self.settings_at(eqn))
        if low is None or fusible.operations(eqn) & settings.held_full:
            made = [states.full(_picked(operands, way.all)) for way in ways.of_equation(eqn)]
        elif is_activation(eqn):
            made = self.of_activation(eqn, operands, settings)
        else:
            out_reads = tuple(self.reads.get(v, 0) for v in eqn.outvars)
            (part,) = structure.parts(eqn)
            made = self.inner(eqn)(part, operands, out_reads, settings).out_states
        self.record(eqn, [self.stored(eqn, *pair) for pair in zip(eqn.outvars, made, strict=True)])
        is_full = fusible.function_class(eqn) is OpClass.FULL
        return Decision(eqn, Action.FUSED, self.because(eqn, reasons.FUNCTION if is_full else None))

    def of_activation(
        self, eqn: Eqn, operands: tuple[State, ...], settings: Settings
    ) -> list[State]:
        """An activation takes the dtype of its operands, as one operation."""
        made: list[State] = []
        for way in ways.of_equation(eqn):
            read = self.as_followed(eqn, _picked(operands, way.all))
            state = states.follow(read, widest=settings.widest)
            if any(s.is_recurrent for s in _picked(operands, way.direct)):
                state = states.kept(state)
            elif state.kind != Kind.CONSTANT:
                state = states.unkept(state)
            made.append(state)
        return made

    # -- the ways to record a decision -------------------------------------------------------

    def foreign(self, eqn: Eqn) -> Decision:
        """Integers and the like; what combines comparisons stays in the group that made them."""
        joined = eqn.primitive.name in traits.LOGIC and any(
            not compat.is_literal(v) and v in self.compared for v in eqn.invars
        )
        if not joined:
            return self.as_traced(eqn, states.FOREIGN, Reason("holds no float32"))
        self.compared.update(eqn.outvars)
        return self.fused(eqn, states.FOREIGN, Reason("combines comparisons"))

    def keep(self, eqn: Eqn, made: Sequence[State]) -> Decision:
        self.record(eqn, made)
        by_itself = len(eqn.outvars) == len(eqn.invars)
        for i, v in enumerate(eqn.outvars):  # what is moved stands where it stood
            moved = [eqn.invars[i]] if by_itself else compat.variables(eqn)
            if any(map(self.is_before_a_product, moved)):
                self.ahead.add(v)
        fused = fusible.is_fusible(eqn) and not eqn.effects
        action = Action.FUSED if fused else Action.KEEP
        return Decision(eqn, action, self.because(eqn, None))

    def fused(self, eqn: Eqn, state: State, own: Reason | None) -> Decision:
        name = eqn.primitive.name
        if eqn.effects or not (name in traits.FUSIBLE or fusible.is_fusible_function(eqn)):
            made = [self.unrounded(eqn, v, state) for v in eqn.outvars]
            self.record(eqn, made)
            native = name in traits.NATIVE and state.kind == Kind.LOW and made[0] == state
            action = Action.NATIVE if native else Action.AS_TRACED
            return Decision(eqn, action, self.because(eqn, own), out_dtype=state.dtype)
        self.record(eqn, [self.stored(eqn, v, state) for v in eqn.outvars])
        return Decision(eqn, Action.FUSED, self.because(eqn, own))


def _bodies(eqn: Eqn, call: control.DecidedCall) -> list[Decided]:
    """Returns the programs of an equation, decided about, but for a loop's condition."""
    parts = structure.parts(eqn)
    return [p for part, p in zip(parts, call.programs, strict=True) if not part.is_condition]


def _of_constants(name: str, operands: Sequence[State]) -> State:
    return states.constant(constants.arithmetic(name, [s.values for s in operands]))


def _picked(operands: Sequence[State], inputs: int) -> list[State]:
    return [operands[i] for i in ways.places(inputs)]


def _unrounded_parts(name: str, operands: Sequence[State]) -> State | None:
    """Returns float32 where a result holds elements of a float32 operand as they are."""
    if name in traits.JOINS and states.INPUT in operands:
        return states.KEPT  # coordinates beside features
    if name in traits.UPDATES and operands[0].kind != Kind.LOW:
        return states.WIDE  # the rest of a float32 buffer
    return None


@functools.lru_cache(maxsize=1024)
def _inside(settings: Settings, scope: tuple[str, ...], *, in_loop: bool) -> Settings:
    if isinstance(settings.policy, Policy):
        scope = ()
    if not scope and in_loop is settings.in_loop:
        return settings
    return replace(settings, scope=settings.scope + scope, in_loop=in_loop)


def _overflows(state: State, low: Any) -> bool:
    """Whether a value is a known constant that is past the range of a low dtype."""
    return any(abs(v) > float(jnp.finfo(low).max) for v in state.values or ())
