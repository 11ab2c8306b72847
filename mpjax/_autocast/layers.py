"""Which operands of products come from parameters, and which product is a network's first or last.

Found by data flow, so that any function has it: forward, what each value is made of; backward,
whether another layer reads it. A *layer* is a product of a weight with something that is none, or
a table that rows are taken from.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from mpjax import _compat
from mpjax._autocast import scopes, structure, traits
from mpjax._autocast.caches import by_program
from mpjax._op_rules import PRODUCTS


class Made(enum.IntEnum):
    """What a value is made of."""

    CONSTANTS = 0  # nothing that is given to the function
    PARAMETERS = 1  # parameters, and constants
    INPUTS = 2  # something else besides


class Origin(NamedTuple):
    """Where a value comes from."""

    made: Made
    path: str = ""  # of the first parameter, where it is made of parameters
    after_layer: bool = False  # whether a layer's result went into it


CONSTANT = Origin(Made.CONSTANTS)
INPUT = Origin(Made.INPUTS)

_MAX_PASSES = 8


def joined(origins: Sequence[Origin]) -> Origin:
    """Returns the origin of what several values went into."""
    made = max((o.made for o in origins), default=Made.CONSTANTS)
    if made is Made.PARAMETERS:
        return next(o for o in origins if o.made is made)
    return Origin(made, "", any(o.after_layer for o in origins))


@dataclass(frozen=True)
class Given:
    """What is known of a program's inputs and outputs; hashable, part of a plan's key."""

    inputs: tuple[Origin, ...]
    feeds: tuple[bool, ...]  # for each output, whether a later layer reads it
    tables: frozenset[str]  # parameters that rows are taken from
    unplaced: frozenset[str]  # parameters of the first or last layer, for products of a derivative
    keeps_history: bool = True  # whether what products see can be recorded where the program stands


@dataclass
class Flow:
    """What each value of a program is made of, and which of them another layer reads."""

    origins: dict[Any, Origin]
    feeds: set[Any] = field(default_factory=set)

    def origin(self, atom: Any) -> Origin:
        """Returns where a variable or a literal comes from."""
        return CONSTANT if _compat.is_literal(atom) else self.origins.get(atom, INPUT)

    def weight(self, eqn: Any) -> int | None:
        """Returns which operand of a product is made of parameters, if only one is."""
        made = [self.origin(v).made is Made.PARAMETERS for v in eqn.invars[:2]]
        others = [self.origin(v).made is Made.INPUTS for v in eqn.invars[:2]]
        if made[0] and others[1]:
            return 0
        return 1 if made[1] and others[0] else None


def flow(jaxpr: Any, given: Given) -> Flow:
    """Returns what is known of the values of an open jaxpr."""
    found = _forward(jaxpr, given.inputs)
    _backward(jaxpr, found, given.feeds)
    return found


# -- forward: what values are made of --------------------------------------------------------------


def _forward(jaxpr: Any, inputs: tuple[Origin, ...]) -> Flow:
    found = Flow(dict(zip(jaxpr.invars, inputs, strict=True)))
    for eqn in jaxpr.eqns:
        operands = tuple(found.origin(v) for v in eqn.invars)
        found.origins.update(zip(eqn.outvars, _results(eqn, operands, found), strict=True))
    return found


def _results(eqn: Any, operands: tuple[Origin, ...], found: Flow) -> Sequence[Origin]:
    if structure.is_call(eqn):
        return _call_results(eqn, operands)
    if is_layer(eqn, found):
        return [Origin(Made.INPUTS, "", after_layer=True)] * len(eqn.outvars)
    return [joined(operands)] * len(eqn.outvars)


def is_layer(eqn: Any, found: Flow) -> bool:
    """Whether an equation multiplies a weight with something else, or takes rows of a table."""
    if eqn.primitive.name in PRODUCTS:
        return found.weight(eqn) is not None
    return is_table(eqn, found)


def is_table(eqn: Any, found: Flow) -> bool:
    """Whether an equation takes rows of a parameter, which ones depending on the inputs."""
    if eqn.primitive.name not in traits.PICKS or len(eqn.invars) < 2:
        return False
    taken = found.origin(eqn.invars[0]).made is Made.PARAMETERS
    return taken and any(found.origin(v).made is Made.INPUTS for v in eqn.invars[1:])


@by_program
def _outputs(jaxpr: Any, inputs: tuple[Origin, ...]) -> tuple[Origin, ...]:
    opened = _compat.closed(jaxpr).jaxpr
    found = _forward(opened, inputs)
    return tuple(found.origin(v) for v in opened.outvars)


def _call_results(eqn: Any, operands: tuple[Origin, ...]) -> Sequence[Origin]:
    name = eqn.primitive.name
    if name == "cond":
        branches = [_outputs(b, operands[1:]) for b in eqn.params["branches"]]
        return [joined(found) for found in zip(*branches, strict=True)]
    if name == "scan":
        inputs = scan_inputs(eqn, operands)
        return _outputs(eqn.params["jaxpr"], inputs)
    if name == "while":
        return while_inputs(eqn, operands)[-len(eqn.outvars) :] if eqn.outvars else ()
    return _outputs(structure.single_program(eqn), operands)


def scan_inputs(eqn: Any, operands: tuple[Origin, ...]) -> tuple[Origin, ...]:
    """Returns the origins of the inputs of a scan's body, once its carry is stable."""
    consts, carry = _compat.scan_counts(eqn.params)
    return _stable(eqn.params["jaxpr"], operands, consts, carry)


def while_inputs(eqn: Any, operands: tuple[Origin, ...]) -> tuple[Origin, ...]:
    """Returns the origins of the inputs of a `while`'s body, once its carry is stable."""
    operands = operands[eqn.params["cond_nconsts"] :]
    consts = eqn.params["body_nconsts"]
    return _stable(eqn.params["body_jaxpr"], operands, consts, len(operands) - consts)


def _stable(body: Any, inputs: tuple[Origin, ...], consts: int, carry: int) -> tuple[Origin, ...]:
    end = consts + carry
    for _ in range(_MAX_PASSES):
        outs = _outputs(body, inputs)[:carry]
        pairs = zip(inputs[consts:end], outs, strict=True)
        found = (*inputs[:consts], *(joined(pair) for pair in pairs), *inputs[end:])
        if found == inputs:
            return found
        inputs = found
    unknown = (Origin(Made.INPUTS, "", after_layer=True),) * carry
    return (*inputs[:consts], *unknown, *inputs[end:])


# -- backward: which values another layer reads -------------------------------------------------


def _backward(jaxpr: Any, found: Flow, outputs: Sequence[bool]) -> None:
    found.feeds.update(
        v
        for v, feeds in zip(jaxpr.outvars, outputs, strict=True)
        if feeds and not _compat.is_literal(v)
    )
    for eqn in reversed(jaxpr.eqns):
        read = _operands_feed(eqn, found)
        found.feeds.update(
            v
            for v, feeds in zip(eqn.invars, read, strict=True)
            if feeds and not _compat.is_literal(v)
        )


def _operands_feed(eqn: Any, found: Flow) -> Sequence[bool]:
    outs = tuple(v in found.feeds for v in eqn.outvars)
    count = len(eqn.invars)
    if is_layer(eqn, found) and not scopes.is_transposed(eqn.source_info.name_stack):
        return [True] * count
    if not structure.is_call(eqn):
        return [any(outs)] * count
    origins = tuple(found.origin(v) for v in eqn.invars)
    name = eqn.primitive.name
    if name == "cond":
        branches = [_inputs_feed(b, origins[1:], outs) for b in eqn.params["branches"]]
        return [False, *(any(read) for read in zip(*branches, strict=True))]
    if name == "scan":
        return scan_feeds(eqn, origins, outs)[0]
    if name == "while":
        return while_feeds(eqn, origins, outs)[0]
    return _inputs_feed(structure.single_program(eqn), origins, outs)


@by_program
def _inputs_feed(
    jaxpr: Any, inputs: tuple[Origin, ...], outputs: tuple[bool, ...]
) -> tuple[bool, ...]:
    opened = _compat.closed(jaxpr).jaxpr
    found = _forward(opened, inputs)
    _backward(opened, found, outputs)
    return tuple(v in found.feeds for v in opened.invars)


Feeds = tuple[tuple[bool, ...], tuple[bool, ...]]
"""Of the operands of a loop, and of the results of its body."""


def scan_feeds(eqn: Any, origins: tuple[Origin, ...], outs: tuple[bool, ...]) -> Feeds:
    """Returns which operands of a scan, and which results of its body, a later layer reads."""
    consts, carry = _compat.scan_counts(eqn.params)
    inputs = scan_inputs(eqn, origins)
    return _stable_feeds(eqn.params["jaxpr"], inputs, consts, carry, outs)


def while_feeds(eqn: Any, origins: tuple[Origin, ...], outs: tuple[bool, ...]) -> Feeds:
    """Returns which operands of a `while`, and which results of its body, a later layer reads."""
    inputs = while_inputs(eqn, origins)
    consts = eqn.params["body_nconsts"]
    read, body = _stable_feeds(eqn.params["body_jaxpr"], inputs, consts, len(inputs) - consts, outs)
    return ((False,) * eqn.params["cond_nconsts"] + read, body)


def _stable_feeds(
    body: Any, inputs: tuple[Origin, ...], consts: int, carry: int, outs: tuple[bool, ...]
) -> Feeds:
    while True:  # flags are only ever added
        read = _inputs_feed(body, inputs, outs)
        pairs = zip(outs[:carry], read[consts : consts + carry], strict=True)
        found = (*(a or b for a, b in pairs), *outs[carry:])
        if found == outs:
            return read, outs
        outs = found


# -- a call's programs ---------------------------------------------------------------------------


def inside(eqn: Any, program: Any, found: Flow, given: Given) -> Given | None:
    """Returns what is known of a program inside an equation; None where nothing is quantised.

    A function with a derivative of its own is multiplied as its author wrote it.
    """
    name = eqn.primitive.name
    if name in structure.CUSTOM:
        return None
    origins = tuple(found.origin(v) for v in eqn.invars)
    outs = tuple(v in found.feeds for v in eqn.outvars)
    if name == "scan":
        return _with(given, scan_inputs(eqn, origins), scan_feeds(eqn, origins, outs)[1])
    if name == "while":
        inputs = while_inputs(eqn, origins)
        if program is eqn.params["body_jaxpr"]:
            return _with(given, inputs, while_feeds(eqn, origins, outs)[1])
        carry = inputs[eqn.params["body_nconsts"] :]
        return _with(given, (*origins[: eqn.params["cond_nconsts"]], *carry), (False,))
    return _with(given, origins[1:] if name == "cond" else origins, outs)


def _with(given: Given, inputs: tuple[Origin, ...], feeds: tuple[bool, ...]) -> Given:
    return replace(given, inputs=inputs, feeds=feeds)


# -- the whole program, once ---------------------------------------------------------------------


def whole(jaxpr: Any, inputs: tuple[Origin, ...]) -> Given:
    """Returns what is known of a whole function of which `inputs` are the arrays' origins."""
    given = Given(inputs, (False,) * len(jaxpr.outvars), frozenset(), frozenset())
    tables: set[str] = set()
    unplaced: set[str] = set()
    _collect(jaxpr, given, tables, unplaced)
    return Given(inputs, given.feeds, frozenset(tables), frozenset(unplaced))


def _collect(jaxpr: Any, given: Given, tables: set[str], unplaced: set[str]) -> None:
    found = flow(jaxpr, given)
    for eqn in jaxpr.eqns:
        if is_table(eqn, found):
            tables.add(found.origin(eqn.invars[0]).path)
        if is_first(eqn, found) or is_last(eqn, found):
            weight = found.weight(eqn)
            unplaced.add(found.origin(eqn.invars[weight or 0]).path)
        if structure.is_call(eqn):
            for program in _programs(eqn):
                inner = inside(eqn, program, found, given)
                if inner is not None:
                    _collect(_compat.closed(program).jaxpr, inner, tables, unplaced)


def _programs(eqn: Any) -> Sequence[Any]:
    name = eqn.primitive.name
    if name == "cond":
        return eqn.params["branches"]
    if name == "while":
        return [eqn.params["body_jaxpr"]]
    return [eqn.params["jaxpr"] if name == "scan" else structure.single_program(eqn)]


def _is_forward_product(eqn: Any, found: Flow) -> bool:
    if eqn.primitive.name not in PRODUCTS or found.weight(eqn) is None:
        return False
    return not scopes.is_transposed(eqn.source_info.name_stack)


def is_first(eqn: Any, found: Flow) -> bool:
    """Whether no layer stands between a layer's product and the inputs."""
    if not _is_forward_product(eqn, found):
        return False
    read = eqn.invars[1 - (found.weight(eqn) or 0)]
    return not found.origin(read).after_layer


def is_last(eqn: Any, found: Flow) -> bool:
    """Whether no layer stands between a layer's product and the outputs."""
    return _is_forward_product(eqn, found) and eqn.outvars[0] not in found.feeds
