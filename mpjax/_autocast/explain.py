"""What autocast decided for a function, and why: the plan, as a table to read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import jax

from mpjax import _compat
from mpjax._autocast import api, control, scopes
from mpjax._autocast import plan as planning
from mpjax._autocast.plan import FLOAT32, Action, Decision, Plan
from mpjax._autocast.states import Kind
from mpjax._dtypes import short_name
from mpjax._op_rules import OP_RULES, parse_rules
from mpjax._policy import get_policy

_HEADERS = ("module", "operation", "count", "dtype", "reason", "where")


@dataclass(frozen=True)
class Row:
    """One distinct decision: an operation in a module, its dtype, and why."""

    module: str  # the path of `jax.named_scope`s; empty outside of any
    operation: str
    count: int
    dtype: str  # of the operands of a product, of the result of any other operation
    reason: str
    where: str  # the first source line


@dataclass(frozen=True)
class Casts:
    """The casts of one kind in the program that autocast gives."""

    source: str
    target: str
    count: int
    bytes: int  # of their results


@dataclass(frozen=True)
class Explanation:
    """What `explain` found; `str()` is a plain table, rich prints a coloured one."""

    function: str
    policy: str
    rows: tuple[Row, ...]
    casts: tuple[Casts, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns the table as dicts and lists, for JSON."""
        return {
            "function": self.function,
            "policy": self.policy,
            "rows": [asdict(row) for row in self.rows],
            "casts": [asdict(cast) for cast in self.casts],
        }

    def _cells(self) -> list[tuple[str, ...]]:
        return [
            tuple(str(getattr(r, name)) for name in Row.__dataclass_fields__) for r in self.rows
        ]

    def _title(self) -> str:
        return f"{self.function} under {self.policy}"

    def _footer(self) -> str:
        counts = [f"{c.count} {c.source} to {c.target} ({_size(c.bytes)})" for c in self.casts]
        return f"casts: {', '.join(counts) or 'none'}"

    def __str__(self) -> str:
        table = [_HEADERS, *self._cells()]
        widths = [max(len(row[i]) for row in table) for i in range(len(_HEADERS))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in table
        ]
        return "\n".join([self._title(), *lines, self._footer()])

    def __rich__(self) -> Any:
        from rich.table import Table  # only for who prints with rich

        table = Table(*_HEADERS, title=self._title(), caption=self._footer())
        last = None
        for row, cells in zip(self.rows, self._cells(), strict=True):
            style = "bold" if row.dtype in ("bf16", "f16") else ""
            if last is not None and row.module != last:
                table.add_section()
            last = row.module
            table.add_row(*cells, style=style)
        return table


def explain(
    fun: Callable[..., Any], policy: Any = None, *, rules: Any = None, dot_precision: Any = None
) -> Callable[..., Explanation]:
    """Returns a function that tells what `autocast` does with `fun` on the same arguments.

    Args:
      fun: a function of arrays.
      policy, rules, dot_precision: as for `autocast`.

    Returns:
      A function of the arguments of `fun`. Its result prints as a table of operation, module
      path, dtype and reason, and has `.rows`, `.casts` and `.to_dict()`. Nothing is computed.

    Raises:
      ValueError, TypeError: as `autocast`.

    Dtypes:
      The table names the dtype that a product reads, and that in which any other operation's
      result is held.

    Transforms:
      None: it is for people.

    Example:
      >>> table = mpjax.explain(lambda w, x: jnp.sum(jnp.exp(x @ w)), "bf16-mixed")(
      ...     jnp.ones((4, 2)), jnp.ones((8, 4))
      ... )
      >>> [(row.operation, row.dtype) for row in table.rows]
      [('dot_general', 'bf16'), ('exp', 'f32'), ('reduce_sum', 'f32')]

    References:
      autocast
    """
    overrides, widest = parse_rules(rules)
    fast = api.autocast(fun, policy, rules=rules, dot_precision=dot_precision)

    def explained(*args: Any, **kwargs: Any) -> Explanation:
        found = get_policy(policy)
        ordered = tuple(sorted(overrides.items()))
        settings = planning.Settings(found, ordered, widest, None)
        plan = api.plan_traced(api.trace(fun, args, kwargs).jaxpr, settings)
        program = api.trace(fast, args, kwargs).jaxpr.jaxpr
        name = getattr(fun, "__name__", type(fun).__name__)
        return Explanation(name, str(found), _rows(plan), _casts(program))

    return explained


def _rows(plan: Plan) -> tuple[Row, ...]:
    counts: dict[tuple[str, str, str, str], list[Any]] = {}
    for module, decision, dtype in _decisions(plan, ()):
        key = (module, decision.eqn.primitive.name, dtype, decision.reason)
        entry = counts.setdefault(key, [0, scopes.location(decision.eqn)])
        entry[0] += 1
    rows = [
        Row(module, operation, count, dtype, reason, where)
        for (module, operation, dtype, reason), (count, where) in counts.items()
    ]
    order = {row.module: i for i, row in reversed(list(enumerate(rows)))}
    return tuple(sorted(rows, key=lambda row: order[row.module]))


def _decisions(plan: Plan, around: tuple[str, ...]) -> Iterator[tuple[str, Decision, str]]:
    for decision in plan.decisions:
        eqn = decision.eqn
        path = around + tuple(n for n in scopes.of(eqn) if n != scopes.AS_WRITTEN)
        if decision.call is not None:
            for inner in decision.call.plans:
                yield from _decisions(inner, path)
        elif _is_of_interest(decision):
            yield "/".join(path), decision, _dtype(plan, decision)


def _is_of_interest(decision: Decision) -> bool:
    """Leaves out what only moves values or is not float32: the table answers for dtypes."""
    eqn = decision.eqn
    if not any(map(planning.is_float32, eqn.outvars)):
        return False
    rule = OP_RULES.get(eqn.primitive.name)
    return control.is_call(eqn) or (rule is not None and rule.op_class.value != "keep")


def _dtype(plan: Plan, decision: Decision) -> str:
    if decision.action is Action.PRODUCT:
        return short_name(decision.low)
    state = plan.states[decision.eqn.outvars[0]]
    return short_name(state.dtype if state.kind == Kind.LOW else FLOAT32)


def _casts(jaxpr: Any) -> tuple[Casts, ...]:
    found: dict[tuple[str, str], list[int]] = {}
    for eqn in _equations(jaxpr):
        if eqn.primitive.name != "convert_element_type":
            continue
        source, target = eqn.invars[0].aval, eqn.outvars[0].aval
        floats = [jax.numpy.issubdtype(a.dtype, jax.numpy.floating) for a in (source, target)]
        if all(floats) and source.dtype != target.dtype:
            key = (short_name(source.dtype), short_name(target.dtype))
            entry = found.setdefault(key, [0, 0])
            entry[0] += 1
            entry[1] += target.size * target.dtype.itemsize
    return tuple(Casts(*key, *entry) for key, entry in found.items())


def _equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in _compat.programs(eqn):
            yield from _equations(inner)


def _size(count: int) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 10_000:
            return f"{count} {unit}"
        count //= 1000
    return f"{count} GB"
