"""Decisions about a program: in which dtype every value is held, how each operation is run.

It is pure data over one jaxpr, made by `decide` before anything is computed: the state of each
value, and an action for each equation. `plan` adds the order in which these run.
"""

from __future__ import annotations

import enum
import functools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from mpjax._autocast.decide import may, reads, states
from mpjax._autocast.decide.must.steps import Relations
from mpjax._autocast.decide.reasons import Reason
from mpjax._autocast.decide.states import State
from mpjax._autocast.known import scopes
from mpjax._autocast.known.facts import Fact, Facts
from mpjax._base import compat
from mpjax._base.dtypes import FLOAT32
from mpjax._jaxpr.equation import Eqn
from mpjax._jaxpr.op_rules import PRODUCTS, OpClass, op_class


@dataclass(frozen=True)
class Settings:
    """The user's wishes and a program's place; hashable, so that equal settings share plans."""

    policy: scopes.Policies
    overrides: tuple[tuple[str, OpClass], ...] = ()
    widest: bool = False
    dot_precision: Any = None
    scope: tuple[str, ...] = ()  # names around the jaxpr, for the paths of a PolicyMap
    as_written: bool = False  # inside a region that is left alone
    params: tuple[int | str, ...] | None = None  # the arguments that hold parameters
    given: Any = None  # a `layers.Given` where products are quantised
    asked: frozenset[tuple[Any, int]] = frozenset()  # of values: flags of `read_flags`
    float32_precision: Any = None  # JAX's global default, of products that stay float32
    in_loop: bool = False  # in the body of a loop, which keeps forward and backward apart
    in_rule: bool = False  # in a function with derivative rules, or in one of its rules
    may: frozenset[str] = may.ALL  # the permissions that are granted: what may be low

    @functools.cached_property
    def rules(self) -> dict[str, OpClass]:
        return dict(self.overrides)

    @functools.cached_property
    def held_full(self) -> frozenset[str]:
        """The operations that follow their operands unless the user holds them in float32."""
        return frozenset(
            name
            for name, kind in self.overrides
            if kind is OpClass.FULL and op_class(name, {}) is not kind
        )

    @functools.cached_property
    def other_reads(self) -> reads.Others:
        """Demands of the user's rules, and of equal values elsewhere."""
        return reads.Others(self.held_full, self.asked)


class Outside(NamedTuple):
    """Tells of a program's inputs what is known where it is called, beside their states."""

    facts: tuple[Fact, ...] | None = None  # None: they have nothing in common
    ahead: tuple[bool, ...] = ()  # whether a product of the forward pass outside depends on each
    relations: Relations = ()


NOTHING = Outside()
"""Of a function's own arguments."""


class Action(enum.Enum):
    """The way in which one equation is run."""

    AS_TRACED = "as traced"  # on the dtypes that it was written with
    KEEP = "keep"  # on whatever its operand is held in
    PRODUCT = "product"  # on low operands
    ATTENTION = "attention"  # by a kernel that reads low operands
    FUSED = "fused"  # in float32 inside a group that XLA fuses, rounded where it is stored
    NATIVE = "native"  # follows its operands, outside any group
    CALL = "call"  # a program of its own


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision for one equation."""

    eqn: Eqn
    action: Action
    reason: Reason
    low: Any = None  # the dtype of a product's operands
    out_dtype: Any = None  # that of a product's or native operation's result
    call: Any = None  # a `control.DecidedCall`, where the action is to call
    unchanged: Any = None  # the same of a call that runs as traced: `explain` lists its products
    how: Any = None  # a `product.Config`, where a product is quantised
    path: str = ""  # of the weight of one that is


@dataclass(slots=True, eq=False, weakref_slot=True)
class Decided:
    """Everything that was decided of a jaxpr.

    It is remembered as long as the program of an equation lives (`caches`), so that it holds its
    program weakly; whoever reads it holds the equation, or the trace, that the program is of.
    """

    program: weakref.ref[Any]
    settings: Settings
    in_states: tuple[State, ...]
    out_states: tuple[State, ...]
    states: dict[Any, State]
    decisions: list[Decision]
    low_copies: tuple[Any, ...]  # per input, the dtype of the low copy that products read, or None
    reads: dict[Any, int]  # how each value is read, in flags
    facts: Facts
    ahead: tuple[bool, ...]  # of each output, whether a product of the forward pass depends on it
    changed: bool  # whether anything differs from what was traced

    @property
    def jaxpr(self) -> Any:
        """The closed jaxpr that this was decided of."""
        return compat.closed(self.program())


def unchanged_products(call: Any) -> Iterator[Decision]:
    """Yields the products inside a call that runs as traced, a `control.DecidedCall`."""
    for program in call.programs:
        for decision in program.decisions:
            if decision.eqn.primitive.name in PRODUCTS:
                yield decision
            if decision.unchanged is not None:
                yield from unchanged_products(decision.unchanged)


def products(decided: Decided) -> Iterator[tuple[Decision, int]]:
    """Yields the products of a program, also inside, each with how its result is read, in flags."""
    for decision in decided.decisions:
        if decision.eqn.primitive.name in PRODUCTS:
            yield decision, decided.reads.get(decision.eqn.outvars[0], 0)
        for inner in decision.call.programs if decision.call else ():
            yield from products(inner)


def initial_state(aval: Any) -> State:
    """Returns the state of an input."""
    return states.INPUT if getattr(aval, "dtype", None) == FLOAT32 else states.FOREIGN
