"""Puts one step in a plan for each attention that is written out in its equations.

This is a hint: the states of values were decided before. XLA's form of the attention is the steps
that it replaces, so that a platform without a kernel computes the same as without the hint. A
backward pass saves the operands, and makes a mask of positions alone again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from mpjax._autocast.arrange.plan import PlanStep
from mpjax._autocast.attention import kernels, layout, masks
from mpjax._autocast.attention.empty_rows import LOST
from mpjax._autocast.attention.nodes import ValueGraph, operations
from mpjax._autocast.attention.pattern import SOFTMAX, Finder, Match
from mpjax._autocast.attention.program import AttentionProgram, Empty, Operands, Spec
from mpjax._autocast.decide.decided import Action
from mpjax._autocast.decide.reasons import Reason
from mpjax._autocast.decide.states import Kind
from mpjax._autocast.known import scopes
from mpjax._autocast.known.named_attention import MULTIPLIED
from mpjax._autocast.speed import hint
from mpjax._base import compat
from mpjax._base.dtypes import FLOAT32
from mpjax._jaxpr import keys
from mpjax._jaxpr.equation import Eqn, Jaxpr


@dataclass(frozen=True, eq=False)
class Attended:
    """An attention in place of some steps of a plan."""

    steps: tuple[PlanStep, ...]  # the steps of XLA's form
    first: int  # the index of the equation of the first product
    last: int  # the index of the last product
    inputs: tuple[Any, ...]  # query, key and value, then the other variables that are read
    low: Any
    read: AttentionInputs
    key: Any  # equal for equal attentions


@hint("attended", lambda jaxpr, constants, decisions, states, steps: steps)
def attended(
    jaxpr: Jaxpr,
    constants: Sequence[Any],
    decisions: list[Any],
    states: dict[Any, Any],
    steps: list[PlanStep],
) -> list[PlanStep]:
    """Returns the steps of a plan, with one step in place of those of each attention.

    Args:
      jaxpr: open.
      constants: of the jaxpr.
      decisions: one for each equation; the reasons of products are set to the kernel's sentence.
      states: the state of each value.
      steps: in order.
    """
    # The cheap test first: most jaxprs have no softmax, or fewer than two products.
    if sum(d.action is Action.PRODUCT for d in decisions) < 2 or not operations(jaxpr) >= SOFTMAX:
        return steps
    finder = Finder(jaxpr, constants, decisions, states)
    known = {*jaxpr.invars, *jaxpr.constvars}.union(*(_made(jaxpr, step) for step in steps))
    matches = finder.matches(known)
    if not matches:
        return steps
    place = _Places(jaxpr, decisions, states, steps)
    attentions: dict[int, Attended] = {}
    gone: set[int] = set()
    for match in matches:
        mine = place.steps(match)
        if not mine or not gone.isdisjoint(mine):
            continue
        if one := _attended(finder, place, match, mine):
            gone.update(mine)
            attentions[max(mine)] = one
    new: list[PlanStep] = []
    for i, step in enumerate(steps):
        if i in attentions:
            one = attentions[i]
            new.append(PlanStep([one.last], inputs=one.inputs, attention=one))
        elif i not in gone:
            new.append(step)
    return new


def _made(jaxpr: Jaxpr, step: PlanStep) -> list[Any]:
    """Returns the variables of a step that others may read."""
    if step.group:
        return [v for v, *_ in step.group.outputs]
    return [v for i in step.members for v in jaxpr.eqns[i].outvars]


class _Places:
    """The step that makes each value, and the steps that read it."""

    def __init__(self, jaxpr: Jaxpr, decisions: Any, states: Any, steps: list[PlanStep]) -> None:
        self.jaxpr, self.decisions, self.states, self.all = jaxpr, decisions, states, steps
        self._step_of = {i: n for n, step in enumerate(steps) for i in step.members}
        self._maker = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
        self._readers: dict[Any, set[int]] = {}
        for n, step in enumerate(steps):
            for v in self.reads(step):
                self._readers.setdefault(v, set()).add(n)
        self._constants = self._made_of_positions()
        self._outputs = Counter(v for v in jaxpr.outvars if not compat.is_literal(v))
        self.why: dict[Any, str] = {}
        """The kernel's sentence for the attentions of each key, '' if no kernel takes them."""

    def reads(self, step: PlanStep) -> list[Any]:
        if step.group:
            return list(step.group.inputs)
        return [v for i in step.members for v in compat.variables(self.jaxpr.eqns[i])]

    def made(self, step: PlanStep) -> list[Any]:
        return _made(self.jaxpr, step)

    def steps(self, match: Match) -> list[int]:
        """Returns the steps of an attention, none if others read its intermediate values."""
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
                if eqn.effects or scopes.is_as_written(eqn):
                    return []
            for v in self.made(self.all[n]):
                if v is self.jaxpr.eqns[match.last].outvars[0]:
                    continue
                if self._outputs[v] or not self._readers.get(v, set()) <= inside:
                    return []
        return mine

    def inputs(self, mine: Sequence[int], own: Sequence[Any]) -> tuple[set[int], list[Any]]:
        """Returns further steps that make masks, and the inputs beside query, key and value.

        A value of numbers and positions alone is made anew in the attention: as an input it would
        be saved, a mask of the size queries × keys.
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
        """Returns, for each value computed from numbers and positions alone, the steps for it."""
        makers: dict[Any, frozenset[int]] = {}
        for n, step in enumerate(self.all):
            read = self.reads(step)
            effects = any(self.jaxpr.eqns[i].effects for i in step.members)
            if not effects and all(v in makers for v in read):
                made = frozenset({n}).union(*(makers[v] for v in read))
                makers.update(dict.fromkeys(self.made(step), made))
        return makers


def _attended(finder: Finder, place: _Places, match: Match, mine: list[int]) -> Attended | None:
    """Returns an attention as one step, None if no kernel takes its layout or its operands."""
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
        place.decisions[i] = replace(place.decisions[i], reason=Reason(where))
    return one


def _without_checkpoint(step: PlanStep) -> PlanStep:
    """Returns a step without its own recomputation: the attention's backward pass recomputes it."""
    if step.group is None:
        return step
    marks = replace(step.group.marks, checkpoint=False)
    return replace(step, group=step.group._replace(marks=marks))


def _where(one: Attended, place: _Places) -> str:
    """Returns the sentence of `explain` about the kernel of an attention, '' if none takes it."""
    program = one.read.program(lambda *_: None)
    structs = []
    for i, v in enumerate(one.inputs):
        state = place.states[v]
        dtype = (
            one.low if i < MULTIPLIED else state.dtype if state.kind == Kind.LOW else v.aval.dtype
        )
        structs.append(jax.ShapeDtypeStruct(v.aval.shape, dtype))
    if all(kernels.why_not(kernel, program, structs) for kernel in kernels.KERNELS.values()):
        return ""
    return kernels.where(program, structs, [v.aval for v in one.inputs])


def _spec(match: Match, how: layout.Layout) -> Spec | None:
    """Returns the options of an attention; None if no kernel can express its mask."""
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
        left = right = None  # rows without keys read beyond the window: the mask includes it
    return Spec(logits.scale, left, right, empty)


@dataclass(frozen=True, eq=False)
class AttentionInputs:
    """The inputs of an attention, arranged as operands of a kernel, and the sums of its rows."""

    graph: ValueGraph
    how: layout.Layout
    match: Match
    inputs: tuple[Any, ...]
    spec: Spec

    def program(self, form: Callable[..., Any], product: Eqn | None = None) -> AttentionProgram:
        """Returns the attention with XLA's form; see `AttentionProgram.product`."""
        shape = self.match.out.aval.shape
        return AttentionProgram(
            spec=self.spec,
            form=form,
            operands=self.operands,
            result=lambda x: self.how.result(x, shape),
            lead=(self.how.count(self.how.batch),),
            product=product,
        )

    def operands(self, *arrays: Any) -> Operands:
        """Returns the operands of a kernel, computed from the inputs."""
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
    """Returns the key of an attention: equal for equal attentions."""
    number = {v: i for i, v in enumerate(read.inputs)}
    content: list[Any] = [(v.aval.shape, v.aval.dtype, place.states[v]) for v in read.inputs]
    for i in (i for step in steps for i in step.members):
        decision = place.decisions[i]
        eqn = decision.eqn
        states = [place.states[v] for v in eqn.outvars]
        how = (decision.action, decision.low, decision.out_dtype)
        content.append((*keys.equation(eqn, number), *states, *how, eqn.ctx))
        number |= {v: len(number) + n for n, v in enumerate(eqn.outvars)}
    return (*content, *_known(read, number))


def _known(read: AttentionInputs, number: dict[Any, int]) -> list[Any]:
    """Returns the part of the key that is not in the steps: the kernel's biases, mask and layout.

    Steps are equal for a mask that compares a constant 0, 1, 2 ... and one that compares any other
    array, but their masks differ.

    Args:
      read: the inputs of the attention.
      number: a number for each input and each value that the steps make.
    """
    made: list[Any] = []

    def same(name: Any) -> Any:
        if compat.is_literal(name):
            return keys.literal(name)
        if name not in number:
            eqn, operands = read.graph.made(name)
            made.append((eqn.primitive, *map(same, operands), *keys.params(eqn)))
            number[name] = len(number)
        return number[name]

    logits = read.match.logits
    biases = [(same(name), *how) for name, *how in logits.biases]
    arrays = [(same(name), *how) for name, *how in logits.mask.arrays]
    told = (read.spec, read.how, read.match.softmax_labels, logits.mask.bounds)
    return [*made, *biases, *arrays, *told]
