"""Names operations by module, primitive and source line, autocast's own included."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, Protocol

from mpjax._autocast.known import scopes
from mpjax._base import compat
from mpjax._jaxpr.equation import Eqn
from mpjax._jaxpr.op_rules import PRODUCTS


class PlanGraph(Protocol):
    """The part of a plan that names are made from: its rows, and the graph of its values."""

    sites: list[Any]
    reads: list[list[int]]
    row_of: dict[int, int]
    arguments: int


_NOT_MODULES = frozenset({scopes.AS_WRITTEN, scopes.RECOMPUTED, "checkpoint"})


def modules(names: Iterable[str]) -> tuple[str, ...]:
    """Returns the scopes that name modules: no transformation, and no einsum's 'ij,jk->ik'."""
    return tuple(name for name in names if name not in _NOT_MODULES and "->" not in name)


@functools.lru_cache(maxsize=8192)
def path(name_stack: Any) -> tuple[str, ...]:
    """Returns the modules in a name stack.

    Where JAX differentiates a checkpointed program, it writes the scopes around that twice: before
    the transformation, and behind it.
    """
    scope: tuple[str, ...] = ()
    for segment in scopes.segments(name_stack):
        own = modules(segment)
        scope = own if own[: len(scope)] == scope else (*scope, *own)
    return scope


def once(path: tuple[str, ...]) -> tuple[str, ...]:
    """Returns a path that was written twice; inside shard_map no transformation is between."""
    half = len(path) // 2
    return path[:half] if path[:half] == path[half:] else path


def operation(eqn: Eqn) -> str:
    """Returns the name of an equation's primitive; of a product in low precision, the product's."""
    for param in eqn.params.values():
        traced = getattr(param, "traced", None)
        for inner in () if traced is None else compat.equations(traced):
            if inner.primitive.name in PRODUCTS:
                return inner.primitive.name
    return eqn.primitive.name


def adopt(plan: PlanGraph) -> None:
    """Gives a cast that autocast inserted the module and line of the operation that it is for."""
    graph = Neighbours(plan)
    for row in range(plan.arguments, len(plan.sites)):
        site = plan.sites[row]
        # The rounding of a product's result goes by the product's name.
        if site.operation == "rounded_result":
            site.operation = next((plan.sites[r].operation for r in graph.before(row)), "")
        if site.operation == "convert_element_type":
            # A cast of a product's operand, say, stands in the product's module.
            for reader in graph.after(row)[:1]:
                _inside_of(site, plan.sites[reader])
        if not site.where and site.phase != "constant":
            near = [*graph.after(row), *graph.before(row)]
            for other in (plan.sites[r] for r in near):
                if other.where:
                    site.module = site.module or other.module
                    site.where, site.library = other.where, other.library
                    # Gradients are unscaled, and added up, after the transposed part of a program.
                    site.phase = site.phase if other.phase == "forward" else "backward"
                    break


def _inside_of(site: Any, reader: Any) -> None:
    """Moves a cast into the module that reads it, where that is inside the cast's own."""
    if reader.module.startswith(site.module) and reader.module != site.module:
        site.module = reader.module


class Neighbours:
    """The graph of rows: an edge leads from a row to its reader, through values without rows."""

    def __init__(self, plan: PlanGraph) -> None:
        self.plan = plan
        self.node_of = {row: node for node, row in plan.row_of.items()}
        self.readers: list[list[int]] = [[] for _ in plan.reads]
        for node, reads in enumerate(plan.reads):
            for read in reads:
                self.readers[read].append(node)

    def after(self, row: int) -> list[int]:
        """Returns the rows that read a row, in program order."""
        return self._reached(row, self.readers)

    def before(self, row: int) -> list[int]:
        """Returns the rows that a row reads, arguments left out."""
        rows = self._reached(row, self.plan.reads)
        return [r for r in rows if r >= self.plan.arguments]

    def _reached(self, row: int, edges: list[list[int]]) -> list[int]:
        rows: set[int] = set()
        seen: set[int] = set()
        waiting = list(edges[self.node_of[row]])
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            other = self.plan.row_of.get(node)
            if other is None:
                waiting += edges[node]
            else:
                rows.add(other)
        return sorted(rows)
