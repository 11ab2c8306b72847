"""Finds operands that come from parameters, and the products of a network's first and last layer.

It follows the data flow, so that any function can be analysed: a forward pass finds the origin of
each value, a backward pass finds whether a later layer reads it. A *layer* is a product of a weight
with an activation, such as `x @ w`, or a gather of rows of a table (an embedding).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from mpjax._autocast.known import scopes, traits
from mpjax._base import compat
from mpjax._jaxpr import structure
from mpjax._jaxpr.caches import by_program
from mpjax._jaxpr.equation import Eqn, Jaxpr
from mpjax._jaxpr.op_rules import PRODUCTS
from mpjax._jaxpr.structure import Part


class Made(enum.IntEnum):
    """The values from which a value is computed."""

    CONSTANTS = 0  # none of the function's arguments
    PARAMETERS = 1  # parameters, and constants
    INPUTS = 2  # other arguments too


class Origin(NamedTuple):
    """The origin of a value: parameters, inputs or constants."""

    made: Made
    path: str = ""  # of the first parameter, if it is computed from parameters
    after_layer: bool = False  # whether it is computed from a layer's result


CONSTANT = Origin(Made.CONSTANTS)
INPUT = Origin(Made.INPUTS)


def joined(origins: Sequence[Origin]) -> Origin:
    """Returns the origin of a value that is computed from several others."""
    made = max((o.made for o in origins), default=Made.CONSTANTS)
    if made is Made.PARAMETERS:
        return next(o for o in origins if o.made is made)
    return Origin(made, "", any(o.after_layer for o in origins))


@dataclass(frozen=True)
class Given:
    """The origins of a program's inputs, and the uses of its outputs. Hashable: in a plan's key."""

    inputs: tuple[Origin, ...]
    feeds: tuple[bool, ...]  # for each output, whether a later layer reads it
    tables: frozenset[str]  # paths of parameters of which a gather takes rows
    unplaced: frozenset[str]  # paths of the first and last layers' weights, for derivatives inside
    keeps_history: bool = True  # whether products here can have histories: not in a branch


@dataclass
class DataFlow:
    """The origin of each value of a program, and the values that a later layer reads."""

    origins: dict[Any, Origin]
    feeds: set[Any] = field(default_factory=set)

    def origin(self, atom: Any) -> Origin:
        """Returns the origin of a variable or a literal."""
        return CONSTANT if compat.is_literal(atom) else self.origins.get(atom, INPUT)

    def weight(self, eqn: Eqn) -> int | None:
        """Returns the place of the operand of a product that is a weight, None if there is none."""
        made = [self.origin(v).made is Made.PARAMETERS for v in eqn.invars[:2]]
        others = [self.origin(v).made is Made.INPUTS for v in eqn.invars[:2]]
        if made[0] and others[1]:
            return 0
        return 1 if made[1] and others[0] else None


def flow(jaxpr: Jaxpr, given: Given) -> DataFlow:
    """Returns the data flow of an open jaxpr."""
    data_flow = _forward(jaxpr, given.inputs)
    _backward(jaxpr, data_flow, given.feeds)
    return data_flow


# -- forward: origins ------------------------------------------------------------------------------


def _forward(jaxpr: Jaxpr, inputs: tuple[Origin, ...]) -> DataFlow:
    data_flow = DataFlow(dict(zip(jaxpr.invars, inputs, strict=True)))
    for eqn in jaxpr.eqns:
        operands = tuple(data_flow.origin(v) for v in eqn.invars)
        data_flow.origins.update(zip(eqn.outvars, _results(eqn, operands, data_flow), strict=True))
    return data_flow


def _results(eqn: Eqn, operands: tuple[Origin, ...], data_flow: DataFlow) -> Sequence[Origin]:
    if structure.is_call(eqn):
        return structure.forward(eqn, operands, _outputs, joined)
    if is_layer(eqn, data_flow):
        return [Origin(Made.INPUTS, "", after_layer=True)] * len(eqn.outvars)
    return [joined(operands)] * len(eqn.outvars)


def is_layer(eqn: Eqn, data_flow: DataFlow) -> bool:
    """Whether an equation multiplies a weight with an activation, or takes rows of a table."""
    if eqn.primitive.name in PRODUCTS:
        return data_flow.weight(eqn) is not None
    return is_table(eqn, data_flow)


def is_table(eqn: Eqn, data_flow: DataFlow) -> bool:
    """Whether an equation takes rows of a parameter by an index that depends on the inputs."""
    if eqn.primitive.name not in traits.PICKS or len(eqn.invars) < 2:
        return False
    taken = data_flow.origin(eqn.invars[0]).made is Made.PARAMETERS
    return taken and any(data_flow.origin(v).made is Made.INPUTS for v in eqn.invars[1:])


@by_program
def _outputs(jaxpr: Any, inputs: tuple[Origin, ...]) -> tuple[Origin, ...]:
    opened = compat.closed(jaxpr).jaxpr
    data_flow = _forward(opened, inputs)
    return tuple(data_flow.origin(v) for v in opened.outvars)


# -- backward: values that a later layer reads ---------------------------------------------------


def _backward(jaxpr: Jaxpr, data_flow: DataFlow, outputs: Sequence[bool]) -> None:
    data_flow.feeds.update(
        v
        for v, feeds in zip(jaxpr.outvars, outputs, strict=True)
        if feeds and not compat.is_literal(v)
    )
    for eqn in reversed(jaxpr.eqns):
        read = _operands_feed(eqn, data_flow)
        data_flow.feeds.update(
            v
            for v, feeds in zip(eqn.invars, read, strict=True)
            if feeds and not compat.is_literal(v)
        )


def _operands_feed(eqn: Eqn, data_flow: DataFlow) -> Sequence[bool]:
    outs = tuple(v in data_flow.feeds for v in eqn.outvars)
    count = len(eqn.invars)
    if is_layer(eqn, data_flow) and not scopes.is_transposed(eqn):
        return [True] * count
    if not structure.is_call(eqn):
        return [any(outs)] * count
    origins = tuple(data_flow.origin(v) for v in eqn.invars)
    read = [False] * count
    for part in structure.parts(eqn):
        if not part.is_condition:
            fed = _feeds(part, origins, outs)[0]
            for i, feeds in zip(part.operands, fed, strict=True):
                read[i] |= feeds
    return read


@by_program
def _inputs_feed(
    jaxpr: Any, inputs: tuple[Origin, ...], outputs: tuple[bool, ...]
) -> tuple[bool, ...]:
    opened = compat.closed(jaxpr).jaxpr
    data_flow = _forward(opened, inputs)
    _backward(opened, data_flow, outputs)
    return tuple(v in data_flow.feeds for v in opened.invars)


def _feeds(
    part: Part, origins: tuple[Origin, ...], outs: tuple[bool, ...]
) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """Returns, for a program's inputs and for its outputs, whether a later layer reads each."""
    inputs = tuple(structure.settled(part, origins, _outputs, joined)[0])
    while True:  # flags are only ever added
        read = _inputs_feed(part.program, inputs, outs)
        again = read[part.carried]
        fed = (*(a or b for a, b in zip(outs, again, strict=False)), *outs[len(again) :])
        if fed == outs:
            return read, outs
        outs = fed


# -- a call's programs ---------------------------------------------------------------------------


def inside(eqn: Eqn, program: Any, data_flow: DataFlow, given: Given) -> Given | None:
    """Returns the origins and uses for a program inside an equation; None if nothing is quantised.

    Nothing is quantised in a function with rules of its author.
    """
    if structure.has_rules(eqn):
        return None
    origins = tuple(data_flow.origin(v) for v in eqn.invars)
    outs = tuple(v in data_flow.feeds for v in eqn.outvars)
    parts = structure.parts(eqn)
    part = next(p for p in parts if p.program is program)
    if part.is_condition:
        body = parts[-1]
        carried = structure.settled(body, origins, _outputs, joined)[0][body.carried]
        asked = [origins[i] for i in part.operands]
        return _with(given, (*asked[: part.carried.start], *carried), (False,))
    inputs = tuple(structure.settled(part, origins, _outputs, joined)[0])
    return _with(given, inputs, _feeds(part, origins, outs)[1])


def _with(given: Given, inputs: tuple[Origin, ...], feeds: tuple[bool, ...]) -> Given:
    return replace(given, inputs=inputs, feeds=feeds)


# -- the whole program, once ---------------------------------------------------------------------


def whole(jaxpr: Jaxpr, inputs: tuple[Origin, ...]) -> Given:
    """Returns the origins and uses for a whole function, given the origins of its arrays."""
    given = Given(inputs, (False,) * len(jaxpr.outvars), frozenset(), frozenset())
    tables: set[str] = set()
    unplaced: set[str] = set()
    _collect(jaxpr, given, tables, unplaced)
    return Given(inputs, given.feeds, frozenset(tables), frozenset(unplaced))


def _collect(jaxpr: Jaxpr, given: Given, tables: set[str], unplaced: set[str]) -> None:
    data_flow = flow(jaxpr, given)
    for eqn in jaxpr.eqns:
        if is_table(eqn, data_flow):
            tables.add(data_flow.origin(eqn.invars[0]).path)
        if is_first(eqn, data_flow) or is_last(eqn, data_flow):
            weight = data_flow.weight(eqn)
            unplaced.add(data_flow.origin(eqn.invars[weight or 0]).path)
        if structure.is_call(eqn):
            for part in structure.parts(eqn):
                inner = None if part.is_condition else inside(eqn, part.program, data_flow, given)
                if inner is not None:
                    _collect(compat.closed(part.program).jaxpr, inner, tables, unplaced)


def _is_forward_product(eqn: Eqn, data_flow: DataFlow) -> bool:
    if eqn.primitive.name not in PRODUCTS or data_flow.weight(eqn) is None:
        return False
    return not scopes.is_transposed(eqn)


def is_first(eqn: Eqn, data_flow: DataFlow) -> bool:
    """Whether a product is that of a first layer: its activation comes after no other layer."""
    if not _is_forward_product(eqn, data_flow):
        return False
    read = eqn.invars[1 - (data_flow.weight(eqn) or 0)]
    return not data_flow.origin(read).after_layer


def is_last(eqn: Eqn, data_flow: DataFlow) -> bool:
    """Whether a product is that of a last layer: no other layer reads its result."""
    return _is_forward_product(eqn, data_flow) and eqn.outvars[0] not in data_flow.feeds
