"""Plans an instrumented run of a jaxpr: its rows, where each stands, and the graph of its values.

A plan is pure data: a row for each equation that computes floating values (a transpose has none),
and a graph of who reads whom. Nothing is bound here; `_run` runs a plan, `_follow` walks its graph.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from mpjax._autocast.known import scopes
from mpjax._base import compat
from mpjax._base.dtypes import short_name
from mpjax._jaxpr import structure
from mpjax._jaxpr.equation import Eqn
from mpjax.numerics import _frames, _names
from mpjax.numerics._own import is_identity

FORWARD, BACKWARD, RECOMPUTED = "forward", "backward", "recomputed"

# The same values, moved or repeated: what holds of the operand holds of the result.
_SAMES = """
abs broadcast_in_dim copy copy_p device_put expand_dims mesh_cast name neg optimization_barrier
pcast pvary reshard reshape rev sharding_constraint squeeze stop_gradient tile transpose
"""
_SAME = frozenset(_SAMES.split())
_CALLS = "jit closed_call core_call custom_jvp_call custom_vjp_call"
_INLINED = frozenset(_CALLS.split())


class RunAs(enum.Enum):
    """The way to run an equation."""

    OTHER = "no floating result"
    SAME = "the values of its operands"
    SITE = "has a row"
    INLINED = "a program, run in place"
    REMAT = "a program that is computed again"
    SCAN = "scan"
    WHILE = "while"
    COND = "cond"
    SHARD_MAP = "shard_map"


@dataclasses.dataclass(frozen=True)
class Level:
    """A loop, or the shards, that a row is inside of: one column of its index."""

    kind: str  # scan, while or shard_map
    first_row: int
    length: int | None  # None where it is not known beforehand
    reverse: bool = False

    def executed(self, index: int) -> int:
        """Returns when the iteration ran that has this index in the user's arrays."""
        if self.kind == "shard_map":
            return 0
        return self.length - 1 - index if self.reverse and self.length else index


@dataclasses.dataclass
class MeasuredSite:
    """The subject of one row: an operation, an argument or a constant."""

    module: str  # path of named scopes; of an argument, its path in the tree
    operation: str
    where: str  # the user's source line, 'file.py:12'
    phase: str  # forward, backward or recomputed; argument or constant
    dtype: Any
    shape: tuple[int, ...]
    levels: tuple[Level, ...] = ()
    branch: tuple[int, ...] = ()  # of each `cond` around it
    library: str = ""  # the line of the library that the user's line called


@dataclasses.dataclass
class RunStep:
    """One equation: how it is run, its rows, and the blocks inside it."""

    eqn: Eqn
    kind: RunAs
    blocks: tuple[Block, ...] = ()
    level: int = -1  # the column of the index, of a loop


@dataclasses.dataclass
class Block:
    """One jaxpr at one place, and the range of its rows."""

    jaxpr: Any  # closed
    steps: list[RunStep]
    first_row: int
    last_row: int

    @property
    def rows(self) -> int:
        return self.last_row - self.first_row


@dataclasses.dataclass(frozen=True)
class _Around:
    """The place of an equation, inherited from the equations that it is inside of."""

    path: tuple[str, ...] = ()
    phase: str = FORWARD
    where: str = ""
    library: str = ""
    levels: tuple[Level, ...] = ()
    branch: tuple[int, ...] = ()


Node = int | None
"""A value in the graph; None for one that is always finite: an integer, a finite literal."""


class RunPlan:
    """The rows of a program, its blocks, and the graph of its values."""

    def __init__(self, jaxpr: Any, names: Sequence[str]) -> None:
        self.sites: list[MeasuredSite] = []
        self.reads: list[list[int]] = []  # node → nodes that it is made of
        self.row_of: dict[int, int] = {}
        self.made_by: dict[int, Any] = {}  # row → equation
        self.literals: set[int] = set()  # nodes that are inf or NaN as written
        self.depth = 0
        inputs = [self._leaf(v, n, "argument") for v, n in zip(_ins(jaxpr), names, strict=True)]
        self.arguments = len(self.sites)
        self.block, self.outputs = self._block(jaxpr, inputs, _Around())
        _names.adopt(self)

    # -- nodes and rows ------------------------------------------------------------------------

    def node(self, reads: Sequence[Node] = ()) -> int:
        """Returns a new node, made of others."""
        self.reads.append([n for n in reads if n is not None])
        return len(self.reads) - 1

    def _row(self, site: MeasuredSite, reads: Sequence[Node] = ()) -> int:
        node = self.node(reads)
        self.row_of[node] = len(self.sites)
        self.sites.append(site)
        return node

    def _leaf(self, var: Any, name: str, kind: str, around: _Around | None = None) -> Node:
        if not is_inexact(var):
            return None
        around = around or _Around()
        place = (around.levels, around.branch)
        return self._row(MeasuredSite(name, kind, "", kind, var.aval.dtype, var.aval.shape, *place))

    def _atom(self, atom: Any, env: dict[Any, Node]) -> Node:
        if not compat.is_literal(atom):
            return env[atom]
        if not is_inexact(atom) or bool(np.all(np.isfinite(np.asarray(atom.val, np.complex128)))):
            return None
        node = self.node()
        self.literals.add(node)
        return node

    # -- programs ------------------------------------------------------------------------------

    def _block(
        self, jaxpr: Any, inputs: Sequence[Node], around: _Around
    ) -> tuple[Block, list[Node]]:
        jaxpr = compat.closed(jaxpr)
        first = len(self.sites)
        env: dict[Any, Node] = dict(zip(jaxpr.jaxpr.invars, inputs, strict=True))
        for var in jaxpr.jaxpr.constvars:
            env[var] = self._leaf(var, "/".join(around.path), "constant", around)
        steps = [self._step(eqn, env, around) for eqn in jaxpr.jaxpr.eqns]
        outputs = [self._atom(v, env) for v in jaxpr.jaxpr.outvars]
        return Block(jaxpr, steps, first, len(self.sites)), outputs

    def _step(self, eqn: Eqn, env: dict[Any, Node], around: _Around) -> RunStep:
        operands = [self._atom(v, env) for v in eqn.invars]
        kind = _kind(eqn)
        inside = _enter(eqn, around)
        if kind in _HOLDERS:
            outs, step = _HOLDERS[kind](self, eqn, operands, inside)
        else:
            outs, step = self._outs(eqn, kind, operands, inside), RunStep(eqn, kind)
        env.update(zip(eqn.outvars, outs, strict=True))
        return step

    def _outs(
        self, eqn: Eqn, kind: RunAs, operands: Sequence[Node], around: _Around
    ) -> Sequence[Node]:
        if kind is RunAs.SAME:
            paired = len(eqn.outvars) == len(eqn.invars)
            return [operands[i if paired else 0] for i in range(len(eqn.outvars))]
        if kind is RunAs.OTHER:
            return [None] * len(eqn.outvars)
        made = next(v for v in eqn.outvars if is_inexact(v)).aval
        site = MeasuredSite(
            "/".join(around.path),
            _names.operation(eqn),
            around.where,
            around.phase,
            made.dtype,
            made.shape,
            around.levels,
            around.branch,
            around.library,
        )
        node = self._row(site, operands)
        self.made_by[self.row_of[node]] = eqn
        return [node if is_inexact(v) else None for v in eqn.outvars]

    def plan_inlined(self, eqn: Eqn, operands: Any, around: _Around) -> Any:
        block, outs = self._block(structure.single_program(eqn), operands, around)
        return outs, RunStep(eqn, _kind(eqn), (block,))

    def _merged(self, reads: Sequence[Node], avals: Sequence[Any]) -> list[Node]:
        """Returns nodes that get their reads later: the carries of a loop, and its slices."""
        pairs = zip(reads, avals, strict=True)
        return [self.node([n]) if is_inexact(v) else None for n, v in pairs]

    def _tie(self, node: Node, source: Node) -> None:
        if node is not None and source is not None:
            self.reads[node].append(source)

    def plan_repeated(self, eqn: Eqn, operands: Any, around: _Around) -> Any:
        """Plans a loop or a `shard_map`, whose rows have an index of iterations or shards."""
        kind, part = _kind(eqn), structure.parts(eqn)[-1]
        jaxpr, start = compat.closed(part.program), part.carried.start
        length, reverse = eqn.params.get("length"), eqn.params.get("reverse", False)
        level = Level(kind.value, len(self.sites), length, reverse)
        given = [operands[i] for i in part.operands]
        merged = self._merged(given[start:], jaxpr.jaxpr.invars[start:])
        block, outs = self._block(jaxpr, [*given[:start], *merged], self._at(around, level))
        for node, out in zip(merged[: part.carries], outs, strict=False):
            self._tie(node, out)
        # The merged nodes, and not `outs`: a loop of no iterations returns its initial carry.
        results = [*merged[: part.carries], *outs[part.carries :]]
        return results, RunStep(eqn, kind, (block,), len(around.levels))

    def plan_cond(self, eqn: Eqn, operands: Any, around: _Around) -> Any:
        blocks: list[Block] = []
        merged = [self.node() if is_inexact(v) else None for v in eqn.outvars]
        platforms = eqn.params.get("branches_platforms") is not None
        for number, branch in enumerate(eqn.params["branches"]):
            chosen = () if platforms else (number,)  # a platform's branch is not the user's
            inside = dataclasses.replace(around, branch=(*around.branch, *chosen))
            block, outs = self._block(branch, operands[1:], inside)
            blocks.append(block)
            for node, out in zip(merged, outs, strict=True):
                self._tie(node, out)
        return merged, RunStep(eqn, RunAs.COND, tuple(blocks))

    def _at(self, around: _Around, level: Level) -> _Around:
        levels = (*around.levels, level)
        self.depth = max(self.depth, len(levels))
        return dataclasses.replace(around, levels=levels)


_HOLDERS: dict[RunAs, Any] = {
    RunAs.INLINED: RunPlan.plan_inlined,
    RunAs.REMAT: RunPlan.plan_inlined,
    RunAs.SCAN: RunPlan.plan_repeated,
    RunAs.WHILE: RunPlan.plan_repeated,
    RunAs.COND: RunPlan.plan_cond,
    RunAs.SHARD_MAP: RunPlan.plan_repeated,
}


def is_inexact(atom: Any) -> bool:
    """Whether a variable or literal holds floating or complex values."""
    dtype = getattr(atom.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def _ins(jaxpr: Any) -> Sequence[Any]:
    return jaxpr.jaxpr.invars


def _kind(eqn: Eqn) -> RunAs:
    name = eqn.primitive.name
    by_name = {"scan": RunAs.SCAN, "while": RunAs.WHILE, "cond": RunAs.COND}
    by_name["shard_map"] = RunAs.SHARD_MAP
    if name in by_name:
        return by_name[name]
    if name in structure.CHECKPOINTS:
        # A checkpoint that was not differentiated recomputes nothing: it is a call.
        return RunAs.REMAT if eqn.params.get("differentiated") else RunAs.INLINED
    if name in _INLINED:
        return RunAs.INLINED
    if not any(map(is_inexact, eqn.outvars)):
        return RunAs.OTHER
    return RunAs.SAME if _is_same(eqn) else RunAs.SITE


def _is_same(eqn: Eqn) -> bool:
    """Whether an equation only moves or repeats its operands, or casts to a wider dtype."""
    if not eqn.invars:
        return False
    source = eqn.invars[0]
    if eqn.primitive.name == "convert_element_type":
        narrow, wide = getattr(source.aval, "dtype", None), eqn.outvars[0].aval.dtype
        return is_inexact(source) and short_name(narrow) in _EXACT.get(short_name(wide), ())
    if is_identity(eqn):
        return source.aval.dtype == eqn.outvars[0].aval.dtype
    same = eqn.primitive.name in _SAME and is_inexact(source)
    return same and len(eqn.outvars) in (1, len(eqn.invars))


_EXACT = {"f32": ("f16", "bf16", "f32"), "f64": ("f16", "bf16", "f32", "f64")}


def _enter(eqn: Eqn, around: _Around) -> _Around:
    """Returns the place of the equations inside an equation, or of the equation itself."""
    names = scopes.of(eqn)
    phase = around.phase
    if scopes.RECOMPUTED in names:
        phase = RECOMPUTED
    elif phase == FORWARD and scopes.is_transposed(eqn):
        phase = BACKWARD
    own = _names.path(eqn.source_info.name_stack)
    if _kind(eqn) is RunAs.REMAT:
        own = _names.once(own)
    path = (*around.path, *own)
    where, library = _frames.lines(eqn)
    if not where:
        where, library = around.where, around.library
    return dataclasses.replace(around, path=path, phase=phase, where=where, library=library)
