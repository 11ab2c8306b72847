"""`find_promotions`: where a 16-bit value becomes float32 though nobody wrote that it should."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mpjax._base import compat
from mpjax._base.dtypes import short_name
from mpjax._base.keywords import names_keywords
from mpjax._base.shown import Shown, Table
from mpjax._base.tree import is_array_or_shape, jax_dtype
from mpjax._jaxpr import structure
from mpjax._jaxpr.equation import Eqn
from mpjax.numerics import _names
from mpjax.numerics._frames import Call, call_of
from mpjax.numerics._program import argument_names, argument_paths, check_function, traced


@dataclasses.dataclass(frozen=True)
class Promotion:
    """One place where a value is widened."""

    where: str  # 'file.py:12'
    module: str
    function: str  # of JAX, as it was called: 'multiply', 'where', 'mean'
    source: str  # the dtype that the value had
    target: str
    shape: tuple[int, ...]
    bytes: int  # that the wider value takes more
    because: str
    fix: str
    library: bool  # in an installed package, as Flax's norms against float32 statistics


@dataclasses.dataclass(frozen=True, repr=False)
class Promotions(Shown):
    """The result of `find_promotions`: mistakes first, those of installed libraries apart."""

    function: str
    rows: tuple[Promotion, ...]  # in the user's own files
    library: tuple[Promotion, ...]

    @property
    def bytes(self) -> int:
        """The bytes that wider values take more, all together."""
        return sum(row.bytes for row in self.rows)

    def __bool__(self) -> bool:
        return bool(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def advice(self, most: int = 3) -> list[str]:
        """Returns the costliest as sentences."""
        worst = sorted(self.rows, key=lambda row: -row.bytes)[:most]
        return [
            f"{r.where}: {r.function} makes {r.target} of {r.source}, because of {r.because}: "
            f"{r.bytes} bytes more. Type {r.fix}."
            for r in worst
        ]

    def to_dict(self) -> dict[str, Any]:
        """Returns all of it as dicts and lists, for JSON."""
        return dataclasses.asdict(self)

    def _headline(self) -> str:
        worst = self.advice(1)
        return f"{self._title()}{'; ' + worst[0].partition(': ')[0] if worst else ''}"

    def _title(self) -> str:
        if not self.rows:
            return f"{self.function}: no 16-bit value is widened by promotion"
        return f"{self.function}: {len(self.rows)} promotions, {self.bytes} bytes more"

    def _blocks(self) -> list[str | Table]:
        blocks: list[str | Table] = [self._title()]
        if self.rows:
            headers = ("where", "function", "from", "to", "bytes", "because of", "type")
            cells = [
                (r.where, r.function, r.source, r.target, f"{r.bytes}", r.because, r.fix)
                for r in self.rows[:20]
            ]
            more = f"… and {len(self.rows) - 20} more, in .rows" if len(self.rows) > 20 else ""
            blocks.append(Table(headers, cells, more))
        if not self.library:
            return blocks
        places = ", ".join(dict.fromkeys(f"{r.where} ({r.function})" for r in self.library[:4]))
        return [*blocks, f"in libraries, by their own choice: {len(self.library)}, as {places}"]


@names_keywords(where="numerics.find_promotions", behind="(params, batch)")
def find_promotions(fun: Callable[..., Any]) -> Callable[..., Promotions]:
    """Returns a function that lists the lines that widen a 16-bit value by accident.

    A NumPy scalar, a float32 constant, a float32 table, or `dtype=` of a reduction makes a 16-bit
    operand float32, and everything that follows. `x.astype(...)` and `preferred_element_type=` are
    on purpose, and so are JAX's functions that widen inside and narrow again.

    Args:
      fun: any function of arrays; gradients of one too.

    Returns:
      A function of the arguments of `fun`, arrays or `jax.ShapeDtypeStruct`s: nothing is computed.
      It returns `Promotions`: `print` it; `.rows` has the line, the bytes and what to type of each,
      `.library` what installed packages do, as Flax's norms against float32 statistics.

    Raises:
      TypeError: `fun` is no function, or cannot be traced.

    Dtypes:
      float16 and bfloat16 that become float32 or wider.

    Transforms:
      None: it is for people. Inside `fun` all of JAX's; a loop's body counts once.

    Example:
      >>> fun = lambda x: x * np.float32(2)
      >>> promotions = mpjax.numerics.find_promotions(fun)(jnp.ones(8, jnp.bfloat16))
      >>> [(row.function, row.because, row.bytes) for row in promotions.rows]
      [('multiply', 'a float32 scalar', 16)]

    References:
      JAX, `jax_numpy_dtype_promotion`, https://github.com/jax-ml/jax/issues/7368
    """
    check_function(fun, "numerics.find_promotions", "fun")

    def run(*args: Any) -> Promotions:
        leaves, treedef = jax.tree.flatten(args)
        places = [i for i, leaf in enumerate(leaves) if is_array_or_shape(leaf)]

        def flat(*arrays: Any) -> Any:
            full = list(leaves)
            for place, array in zip(places, arrays, strict=True):
                full[place] = array
            return fun(*jax.tree.unflatten(treedef, full))

        paths = argument_paths(args, argument_names(fun, len(args)))
        structs = [jax.ShapeDtypeStruct(leaves[i].shape, jax_dtype(leaves[i])) for i in places]
        with jax.numpy_dtype_promotion("standard"):
            jaxpr, _ = traced(flat, structs, "numerics.find_promotions")
        known = {v: _argument(paths[i]) for v, i in zip(jaxpr.jaxpr.invars, places, strict=True)}
        walk = _PromotionWalk()
        walk.program(jaxpr, known, ())
        rows = _once(walk.promotions)
        own = tuple(row for row in rows if not row.library)
        name = getattr(fun, "__name__", type(fun).__name__)
        return Promotions(name, own, tuple(row for row in rows if row.library))

    return run


def _argument(path: str) -> str:
    return f"the float32 argument {path!r}"


_SCALAR, _CONSTANT, _TABLE, _OTHER = (
    "a float32 scalar",
    "a float32 constant",
    "a float32 table",
    "a float32 value",
)
_FIXES = {
    _SCALAR: "a Python number: float(c)",
    _CONSTANT: "c.astype(x.dtype)",
    _TABLE: "table.astype(x.dtype)",
    _OTHER: "y.astype(x.dtype)",
}
_INLINED = frozenset(
    {"jit", "pjit", "closed_call", "core_call", *structure.CHECKPOINTS}
    | {"custom_jvp_call", "custom_vjp_call"}
)
_FILLED = frozenset({"ones", "zeros", "full", "ones_like", "zeros_like", "full_like", "eye"})
_REDUCED = "mean sum prod var std nanmean nansum average cumsum cumprod"
_REDUCTIONS = frozenset(_REDUCED.split())


@dataclasses.dataclass
class _Node:
    """An equation, flat among the others of its body."""

    eqn: Eqn
    call: Call
    module: str
    reads: list[Any]
    makes: list[Any]


class _PromotionWalk:
    def __init__(self) -> None:
        self.promotions: list[Promotion] = []

    def program(self, jaxpr: Any, known: dict[Any, str], path: tuple[str, ...]) -> None:
        """Adds the promotions of one function body; calls in it are walked in place."""
        nodes: list[_Node] = []
        origin: dict[Any, str] = {}  # value → what it comes from
        jaxpr = compat.closed(jaxpr)
        env: dict[Any, Any] = {v: v for v in jaxpr.jaxpr.invars}
        origin |= {env[v]: text for v, text in known.items()}
        outs = self._flatten(jaxpr, env, nodes, origin, path, None)
        readers: dict[Any, list[_Node]] = {}
        for node in nodes:
            for value in node.reads:
                readers.setdefault(value, []).append(node)
        for node in nodes:
            counts = _widens(node.eqn) and not node.call.is_cast
            if counts and _leaves_line(node, readers, set(outs)):
                self.promotions.append(_promotion(node, readers, origin))

    def _flatten(
        self,
        jaxpr: Any,
        env: dict[Any, Any],
        nodes: list[_Node],
        origin: dict[Any, str],
        path: tuple[str, ...],
        outer: Call | None,
    ) -> list[Any]:
        for var in jaxpr.jaxpr.constvars:
            env[var] = object()
            origin[env[var]] = _SCALAR if var.aval.ndim == 0 else _CONSTANT

        def read(atom: Any) -> Any:
            if not compat.is_literal(atom):
                return env[atom]
            value = object()
            origin[value] = _OTHER if atom.aval.weak_type else _SCALAR
            return value

        for eqn in jaxpr.jaxpr.eqns:
            inside = (*path, *_names.modules(_names.scopes.of(eqn)))
            # Inside a function of JAX, as `jnp.mean`, equations count to the line that called it.
            call = outer if outer is not None and outer.where else call_of(eqn)
            values = [read(v) for v in eqn.invars]
            if eqn.primitive.name in _INLINED:
                inner = compat.closed(_program_of(eqn))
                inner_env = dict(zip(inner.jaxpr.invars, values, strict=True))
                user = eqn.primitive.name not in ("jit", "pjit") or not _is_of_jax(eqn, call)
                if not user and not call.function:
                    call = dataclasses.replace(call, function=str(eqn.params.get("name", "")))
                made = self._flatten(
                    inner, inner_env, nodes, origin, inside, None if user else call
                )
            else:
                made = [object() for _ in eqn.outvars]
                nodes.append(_Node(eqn, call, "/".join(inside), values, made))
                for inner in compat.programs(eqn):
                    self.program(inner, {}, inside)
                text = _derived(eqn, [origin.get(v) for v in values], call)
                origin |= dict.fromkeys(made, text) if text else {}
            env.update(zip(eqn.outvars, made, strict=True))
        return [read(v) for v in jaxpr.jaxpr.outvars]


def _is_of_jax(eqn: Eqn, call: Call) -> bool:
    """Whether a jitted function is one of JAX's own, which a line called, and not the user's."""
    lines = {call_of(inner).where for inner in compat.equations(eqn.params["jaxpr"])}
    return lines <= {call.where, ""}


def _program_of(eqn: Eqn) -> Any:
    return next(eqn.params[n] for n in ("jaxpr", "call_jaxpr", "fun_jaxpr") if n in eqn.params)


def _derived(eqn: Eqn, origins: Sequence[str | None], call: Call) -> str | None:
    """Returns the origin of a result: a table if positions go in, else the only one of operands."""
    if eqn.primitive.name == "iota":
        return _TABLE
    if eqn.primitive.name == "broadcast_in_dim" and call.function in _FILLED:
        return _CONSTANT
    known = {text for text in origins if text}
    if len(known) == 1 and len(eqn.invars) == 1:
        return known.pop()
    return _TABLE if known and known <= {_TABLE, _SCALAR, _CONSTANT, _OTHER} else None


def _itemsize(atom: Any) -> int:
    dtype = getattr(atom.aval, "dtype", None)
    floats = dtype is not None and jnp.issubdtype(dtype, jnp.floating)
    return jnp.dtype(dtype).itemsize if floats else 0


def _widens(eqn: Eqn) -> bool:
    """Whether a 16-bit operand meets a wider one, or is converted."""
    sizes = [_itemsize(v) for v in eqn.invars]
    if not eqn.outvars or _itemsize(eqn.outvars[0]) < 4 or 2 not in sizes:
        return False
    if eqn.primitive.name == "convert_element_type":
        return True
    return eqn.primitive.name in ("dot_general", "conv_general_dilated") and max(sizes) >= 4


def _leaves_line(node: _Node, readers: dict[Any, list[_Node]], outs: set[Any]) -> bool:
    """Whether a widened value, or one made of it, is wide where the next line reads it."""
    waiting, seen = list(node.makes), set[Any]()
    while waiting:
        value = waiting.pop()
        if value in seen:
            continue
        seen.add(value)
        if value in outs:
            return True
        for reader in readers.get(value, ()):
            # A value that is widened and narrowed again within one line was meant to be.
            if reader.call.where != node.call.where or reader.call.line != node.call.line:
                return True
            wide = [v for v in reader.eqn.outvars if _itemsize(v) >= 4]
            if wide:
                waiting += reader.makes
    return False


def _promotion(node: _Node, readers: dict[Any, list[_Node]], origin: dict[Any, str]) -> Promotion:
    eqn = node.eqn
    widened = [v for v in eqn.invars if _itemsize(v) == 2]
    target = eqn.outvars[0].aval
    because = _because(node, readers, origin)
    fix = _FIXES.get(because, _FIXES[_OTHER])
    if because.startswith("dtype="):
        fix = "no dtype=, or cast after"
    shape = tuple(widened[0].aval.shape)
    return Promotion(
        where=node.call.where,
        module=node.module,
        function=node.call.function or _reader(node, readers),
        source=short_name(widened[0].aval.dtype),
        target=short_name(target.dtype),
        shape=shape,
        bytes=widened[0].aval.size * (target.dtype.itemsize - 2),
        because=because,
        fix=fix,
        library=node.call.library,
    )


def _reader(node: _Node, readers: dict[Any, list[_Node]]) -> str:
    """Returns the operation that reads a widened value, where its function cannot be told."""
    consumers = [reader for value in node.makes for reader in readers.get(value, ())]
    return (consumers[0] if consumers else node).eqn.primitive.name


def _because(node: _Node, readers: dict[Any, list[_Node]], origin: dict[Any, str]) -> str:
    """Returns the reason: the wide operand of the operation that reads the value."""
    if node.call.function in _REDUCTIONS:
        return "dtype= of a reduction"
    waiting: list[_Node] = [node] if node.eqn.primitive.name != "convert_element_type" else []
    values, seen = list(node.makes), set[Any]()
    while values:
        value = values.pop()
        if value in seen:
            continue
        seen.add(value)
        for reader in readers.get(value, ()):
            if len(reader.reads) > 1:
                waiting.append(reader)
            elif reader.call.line == node.call.line:
                values += reader.makes
    for reader in waiting:
        for atom, value in zip(reader.eqn.invars, reader.reads, strict=True):
            if _itemsize(atom) >= 4 and value not in seen and value not in node.makes:
                return origin.get(value, _OTHER)
    return _OTHER


def _once(rows: Iterable[Promotion]) -> list[Promotion]:
    """Returns each place once: a derivative traces the same line again."""
    return list(dict.fromkeys(rows))
