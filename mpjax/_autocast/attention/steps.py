"""Attention that nobody named: found in a plan, and run as one operation.

It is a hint: which values are low was decided before, and XLA's form of it is the steps that stood
there, so that a platform without a kernel computes what it computed. What a backward pass keeps are
the operands; a mask that is made of positions alone is made again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._autocast.arrange.plan import PlanStep
from mpjax._autocast.attention import kernels, layout, masks
from mpjax._autocast.attention.empty_rows import LOST
from mpjax._autocast.attention.nodes import ValueGraph, operations
from mpjax._autocast.attention.pattern import SOFTMAX, Finder, Match
from mpjax._autocast.attention.program import MULTIPLIED, AttentionProgram, Empty, Operands, Spec
from mpjax._autocast.decide import scopes
from mpjax._autocast.decide.decided import Action
from mpjax._autocast.decide.states import Kind
from mpjax._autocast.speed import hint
from mpjax._base import compat
from mpjax._jaxpr.keys import hashable
from mpjax._jaxpr.keys import literal_key as _literal

FLOAT32 = np.dtype("float32")


@dataclass(frozen=True, eq=False)
class Attended:
    """An attention in place of some steps of a plan."""

    steps: tuple[PlanStep, ...]  # what XLA's form runs
    first: int  # the equation of the first product
    last: int  # that of the last
    inputs: tuple[Any, ...]  # query, key and value, then what else is read
    low: Any
    read: AttentionInputs
    key: Any  # equal for equal attentions


@hint("attended", lambda jaxpr, constants, decisions, held, steps: steps)
def attended(
    jaxpr: Any,
    constants: Sequence[Any],
    decisions: Sequence[Any],
    held: dict[Any, Any],
    steps: list[PlanStep],
) -> list[PlanStep]:
    """Returns the steps of a plan, those of each attention as one.

    Args:
      jaxpr: open.
      constants: of the jaxpr.
      decisions: one an equation; those of the products are told which kernel runs them.
      held: the state of each value.
      steps: in order.
    """
    if sum(d.action is Action.PRODUCT for d in decisions) < 2 or not operations(jaxpr) >= SOFTMAX:
        return steps
    finder = Finder(jaxpr, constants, decisions, held)
    known = {*jaxpr.invars, *jaxpr.constvars}.union(*(_made(jaxpr, step) for step in steps))
    matches = finder.matches(known)
    if not matches:
        return steps
    place = _Places(jaxpr, decisions, held, steps)
    attentions: dict[int, Attended] = {}
    gone: set[int] = set()
    for match in matches:
        mine = place.steps(match)
        if not mine or not gone.isdisjoint(mine):
            continue
        if one := _attended(finder, place, match, mine):
            gone.update(mine)
            attentions[max(mine)] = one
    kept: list[PlanStep] = []
    for i, step in enumerate(steps):
        if i in attentions:
            one = attentions[i]
            kept.append(PlanStep([one.last], inputs=one.inputs, attention=one))
        elif i not in gone:
            kept.append(step)
    return kept


def _made(jaxpr: Any, step: PlanStep) -> list[Any]:
    """Returns what a step leaves for others."""
    if step.group:
        return [v for v, *_ in step.group.outputs]
    return [v for i in step.members for v in jaxpr.eqns[i].outvars]


class _Places:
    """Which step makes and which steps read each value."""

    def __init__(self, jaxpr: Any, decisions: Any, held: Any, steps: list[PlanStep]) -> None:
        self.jaxpr, self.decisions, self.held, self.all = jaxpr, decisions, held, steps
        self._step_of = {i: n for n, step in enumerate(steps) for i in step.members}
        self._maker = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
        self._readers: dict[Any, set[int]] = {}
        for n, step in enumerate(steps):
            for v in self.reads(step):
                self._readers.setdefault(v, set()).add(n)
        self._constants = self._made_of_positions()
        self._outputs = Counter(v for v in jaxpr.outvars if not compat.is_literal(v))
        self.why: dict[Any, str] = {}
        """Which kernel runs the attentions of a key."""

    def reads(self, step: PlanStep) -> list[Any]:
        if step.group:
            return list(step.group.inputs)
        return [v for i in step.members for v in compat.variables(self.jaxpr.eqns[i])]

    def made(self, step: PlanStep) -> list[Any]:
        return _made(self.jaxpr, step)

    def steps(self, match: Match) -> list[int]:
        """Returns which steps are an attention, none if something else reads what they make."""
        eqns = {match.first, match.last}
        for name in match.through:
            i = name[0][0] if isinstance(name, tuple) else self._maker.get(name)
            if i is None:
                return []
            eqns.add(i)
        mine = sorted({self._step_of[i] for i in eqns})
        inside = set(mine)
        for n in mine:
            for i in self.all[n].members:
                eqn = self.jaxpr.eqns[i]
                if eqn.effects or scopes.AS_WRITTEN in scopes.of(eqn):
                    return []
            for v in self.made(self.all[n]):
                if v is self.jaxpr.eqns[match.last].outvars[0]:
                    continue
                if self._outputs[v] or not self._readers.get(v, set()) <= inside:
                    return []
        return mine

    def inputs(self, mine: Sequence[int], own: Sequence[Any]) -> tuple[set[int], list[Any]]:
        """Returns what steps read but for query, key and value, and the steps that make the rest.

        What is made of numbers and positions alone is made anew: kept, it would be a mask of the
        size queries × keys.
        """
        inside = {v for n in mine for v in self.made(self.all[n])}
        read = dict.fromkeys(v for n in mine for v in self.reads(self.all[n]))
        pulled: set[int] = set()
        others: list[Any] = []
        for v in read:
            if v in inside or v in own:
                continue
            made = self._constants.get(v)
            if made is not None and made.isdisjoint(mine):
                pulled |= made
            else:
                others.append(v)
        return pulled, others

    def _made_of_positions(self) -> dict[Any, frozenset[int]]:
        """Returns of each value that is made of numbers and positions alone the steps that do."""
        makers: dict[Any, frozenset[int]] = {}
        for n, step in enumerate(self.all):
            read = self.reads(step)
            effects = any(self.jaxpr.eqns[i].effects for i in step.members)
            if not effects and all(v in makers for v in read):
                made = frozenset({n}).union(*(makers[v] for v in read))
                makers.update(dict.fromkeys(self.made(step), made))
        return makers


def _attended(finder: Finder, place: _Places, match: Match, mine: list[int]) -> Attended | None:
    """Returns an attention as one step, None if it is laid out in a way that no kernel takes."""
    eqns = place.jaxpr.eqns
    first, last = eqns[match.first], eqns[match.last]
    how = layout.of(first, last, match)
    spec = how and _spec(match, how)
    sharded = [compat.explicit_sharding(v.aval) for v in (*first.invars, *last.invars)]
    if not how or not spec or any(x is not None for x in sharded):
        return None
    query, key = first.invars[:: -1 if how.is_key_first else 1]
    own = (query, key, last.invars[1 - match.weights])
    pulled, others = place.inputs(mine, own)
    inside = {v for n in (*mine, *pulled) for v in place.made(place.all[n])}
    sources = [name for name, *_ in (*match.logits.biases, *match.logits.mask.arrays)]
    for name in sources:
        leaves = finder.graph.leaves(name, finder.known)
        if leaves is None:
            return None
        others += [v for v in leaves if v not in inside]
    inputs = (*own, *(v for v in dict.fromkeys(others) if v not in own))
    made = [finder.graph.leaves(name, frozenset(inputs)) for name in sources]
    if not inside.isdisjoint(own) or any(x is None for x in made):
        return None
    steps = tuple(_without_checkpoint(place.all[n]) for n in sorted({*pulled, *mine}))
    read = AttentionInputs(finder.graph, how, match, inputs, spec)
    low = place.decisions[match.last].low
    key = _key(place, steps, read)
    one = Attended(steps, match.first, match.last, inputs, low, read, key)
    if key not in place.why:
        place.why[key] = _where(one, place)
    if not (where := place.why[key]):
        return None
    for i in (one.first, one.last):
        place.decisions[i].reason = where
    return one


def _without_checkpoint(step: PlanStep) -> PlanStep:
    """Returns a step that the backward pass does not compute again: the kernel's pass does that."""
    if step.group is None:
        return step
    marks = replace(step.group.marks, checkpoint=False)
    return replace(step, group=step.group._replace(marks=marks))


def _where(one: Attended, place: _Places) -> str:
    """Returns which kernel runs an attention on which platform, empty if none does."""
    program = one.read.program(lambda *_: None)
    structs = []
    for i, v in enumerate(one.inputs):
        state = place.held[v]
        dtype = (
            one.low if i < MULTIPLIED else state.dtype if state.kind == Kind.LOW else v.aval.dtype
        )
        structs.append(jax.ShapeDtypeStruct(v.aval.shape, dtype))
    if all(kernels.why_not(kernel, program, structs) for kernel in kernels.KERNELS.values()):
        return ""
    return kernels.where(program, structs, [v.aval for v in one.inputs])


def _spec(match: Match, how: layout.Layout) -> Spec | None:
    """Returns what is known of an attention; None where its mask says what no kernel knows."""
    logits = match.logits
    row = how.queries[0] if how.queries else None
    ends = masks.window(logits.mask.bounds, row, match.keys)
    if ends is None or logits.scale <= 0:
        return None
    left, right = ends
    empty = Empty.MEAN
    if logits.masked == -math.inf:
        empty = Empty.NAN_THROUGH if logits.is_added else Empty.NAN
    elif logits.is_added:
        empty = Empty.THROUGH if (logits.masked or 0) < LOST else Empty.ALL
    if empty is Empty.ALL and logits.mask.arrays:
        left = right = None  # rows without keys read those of other places too: all is in the mask
    is_causal = right == 0
    return Spec(logits.scale, is_causal, left, None if is_causal else right, empty)


@dataclass(frozen=True, eq=False)
class AttentionInputs:
    """How an attention's inputs are read: by a kernel, and for the sums of its rows."""

    graph: ValueGraph
    how: layout.Layout
    match: Match
    inputs: tuple[Any, ...]
    spec: Spec

    def program(self, form: Callable[..., Any]) -> AttentionProgram:
        shape = self.match.out.aval.shape
        return AttentionProgram(
            spec=self.spec,
            form=form,
            operands=self.operands,
            result=lambda x: self.how.result(x, shape),
            lead=(self.how.count(self.how.batch),),
        )

    def operands(self, *arrays: Any) -> Operands:
        """Returns what a kernel reads of the inputs."""
        own = zip(("query", "key", "value"), arrays, strict=False)
        query, key, value = (self.how.operand(name, x) for name, x in own)
        known = {v: _wide(x) for v, x in zip(self.inputs, arrays, strict=True)}
        logits, bias, mask = self.match.logits, None, None
        for name, labels, times in logits.biases:
            added = times * self.how.like_logits(self.graph.compute(name, known), labels)
            bias = added if bias is None else bias + added
        for name, labels, positive in logits.mask.arrays:
            read = self.how.like_logits(self.graph.compute(name, known), labels)
            read = read if positive else ~read
            mask = read if mask is None else mask & read
        if mask is not None and self.spec.empty is Empty.ALL:
            mask = mask & masks.of_places(logits.mask.bounds, self.how)
        return Operands(query, key, value, bias, mask)

    def rows(self, known: dict[Any, Any]) -> Any:
        """Returns the logarithm of each row's sum, f32[batch, heads, queries]."""
        match = self.match
        logits = self.graph.compute(match.softmax, known)
        logits = self.how.like_logits(logits, match.softmax_labels)
        return jax.lax.stop_gradient(jax.nn.logsumexp(logits, axis=-1))


def _wide(x: Any) -> Any:
    return x.astype(FLOAT32) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _key(place: _Places, steps: Sequence[PlanStep], read: AttentionInputs) -> Any:
    """Returns what equal attentions have in common."""
    number = {v: i for i, v in enumerate(read.inputs)}
    content: list[Any] = [(v.aval.shape, v.aval.dtype, place.held[v]) for v in read.inputs]
    for i in (i for step in steps for i in step.members):
        decision = place.decisions[i]
        eqn = decision.eqn
        operands = [_literal(v) if compat.is_literal(v) else number[v] for v in eqn.invars]
        params = [(name, hashable(value)) for name, value in sorted(eqn.params.items())]
        held = [place.held[v] for v in eqn.outvars]
        how = (decision.action, decision.low, decision.out_dtype)
        content.append((eqn.primitive, *operands, *params, *held, *how, eqn.ctx))
        number |= {v: len(number) + n for n, v in enumerate(eqn.outvars)}
    return (*content, *_known(read, number))


def _known(read: AttentionInputs, number: dict[Any, int]) -> list[Any]:
    """Returns what a kernel knows of an attention beside its steps, and computes beside them.

    One mask may compare an array that counts the places, another any array: steps are equal then.

    Args:
      read: how the inputs are read.
      number: of each value that inputs and steps make.
    """
    made: list[Any] = []

    def same(name: Any) -> Any:
        if compat.is_literal(name):
            return _literal(name)
        if name not in number:
            eqn, operands = read.graph.made(name)
            params = [(key, hashable(value)) for key, value in sorted(eqn.params.items())]
            made.append((eqn.primitive, *map(same, operands), *params))
            number[name] = len(number)
        return number[name]

    logits = read.match.logits
    biases = [(same(name), *how) for name, *how in logits.biases]
    arrays = [(same(name), *how) for name, *how in logits.mask.arrays]
    told = (read.spec, read.how, read.match.softmax_labels, logits.mask.bounds)
    return [*made, *biases, *arrays, *told]
