"""Reports the dtypes that a policy gives to the modules of a network, and those out of its reach.

Linen and NNX are read in different ways; the tables and warnings about their modules are the same.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp

from mpjax._base.dtypes import DType, require_x64, short_name
from mpjax._base.errors import message, warn
from mpjax._base.shown import Shown, html_table
from mpjax._policies.order import refuse_policy_first
from mpjax._policies.parts import policies_in
from mpjax._policies.policy import Policy, get_policy
from mpjax._policies.policy_map import PolicyMap
from mpjax._policies.quantized_policy import QuantizedPolicy
from mpjax._policies.spelling import Path, in_model

FIELDS = ("dtype", "param_dtype")
_HEADERS = ("module", "class", "dtype", "param_dtype", "parameters", "reason")

BY_POLICY = "policy"
OWN = "set in the model"
NO_DTYPE = "has no dtype"
AS_WRITTEN = "as written"


def as_checked_policy(model: Any, policy: Any, where: str) -> Policy | PolicyMap:
    """Returns the policy that `policy` names for a model.

    Raises:
      TypeError: the policy was given as the model.
      ValueError: it needs 64-bit types, and JAX has none.
    """
    refuse_policy_first(model, policy, where, "model")
    checked = get_policy(policy)
    for each in policies_in(checked):
        require_x64(each.compute_dtype, where)
        require_x64(each.param_dtype, where)
    if any(isinstance(each, QuantizedPolicy) for each in policies_in(checked)):
        text = message(
            where,
            f"got {str(checked)!r}, and modules multiply in its base's dtype alone.",
            "Allowed: any policy; products in 8 bits are autocast's.",
            "Type autocast(loss_fn, policy), or make_train_step(loss_fn, tx, policy), as well.",
        )
        warn(text)
    return checked


def _rules(policy: Policy | PolicyMap) -> tuple[tuple[str, Policy], ...]:
    return policy.rules if isinstance(policy, PolicyMap) else ()


def rule_index(policy: Policy | PolicyMap, path: Path) -> int | None:
    """Returns the number of the rule of a map that decides a path, None for the default."""
    return policy.deciding(path) if isinstance(policy, PolicyMap) else None


def policy_at(policy: Policy | PolicyMap, path: Path) -> Policy:
    """Returns the policy of the module at a path; that of the root is the path ''."""
    return policy.policy_for(path) if isinstance(policy, PolicyMap) else policy


def reason_at(policy: Policy | PolicyMap, path: Path) -> str:
    """Returns the source of the dtypes of the module at a path, in words: the policy, or a rule."""
    index = rule_index(policy, path)
    if index is None or not isinstance(policy, PolicyMap):
        return BY_POLICY
    return f"rule {policy.rules[index][0]!r}"


def scalar_type(dtype: DType) -> Any:
    """Returns `jnp.bfloat16` for bfloat16: as users write it, and callable."""
    return getattr(jnp, dtype.name)


def same_dtype(a: Any, b: Any) -> bool:
    """Whether two values of a `dtype` attribute mean the same, None being one of them."""
    if a is None or b is None:
        return a is b
    try:
        return jnp.dtype(a) == jnp.dtype(b)
    except TypeError:  # a field of that name may hold anything
        return False


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModuleFinding:
    """The result for one module: its class, its path, and the reason of its dtypes."""

    path: str
    class_name: str
    reason: str  # BY_POLICY, a rule, OWN, NO_DTYPE, AS_WRITTEN
    has_parameters: bool = False  # of its own, and its class is not one of Flax's


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModuleRow:
    """One module: its path, its class, its dtypes, its own parameters, and why."""

    path: str
    class_name: str
    dtype: str  # 'inputs' where it computes in what it is given
    param_dtype: str  # of the parameters that are there
    parameters: int  # numbers that it holds itself, without those below it
    reason: str


@dataclasses.dataclass(frozen=True, repr=False)
class ModuleTable(Shown):
    """The modules of a network: a table in `print` and in a notebook."""

    title: str
    rows: tuple[ModuleRow, ...]

    def __getitem__(self, path: str) -> ModuleRow:
        """Returns the row of a module by its path; that of the whole network is ''."""
        for row in self.rows:
            if row.path == path:
                return row
        allowed = f"There are: {', '.join(repr(row.path) for row in self.rows)}."
        raise KeyError(message("ModuleTable", f"no module at {path!r}.", allowed))

    def to_dict(self) -> dict[str, Any]:
        """Returns the table as dicts and lists, for JSON."""
        return {"title": self.title, "rows": [dataclasses.asdict(row) for row in self.rows]}

    def _headline(self) -> str:
        dtypes: dict[str, int] = {}
        for row in self.rows:
            dtypes[row.dtype] = dtypes.get(row.dtype, 0) + (row.dtype != "-")
        counts = ", ".join(f"{n} in {dtype}" for dtype, n in dtypes.items() if n)
        return f"{self.title}: {len(self.rows)} modules" + (f", {counts}" if counts else "")

    def _cells(self) -> list[tuple[str, ...]]:
        return [
            (r.path or ".", r.class_name, r.dtype, r.param_dtype, f"{r.parameters or ''}", r.reason)
            for r in self.rows
        ]

    def __str__(self) -> str:
        table = [_HEADERS, *self._cells()]
        widths = [max(len(row[i]) for row in table) for i in range(len(_HEADERS))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in table
        ]
        return "\n".join([self.title, *lines])

    def _repr_html_(self) -> str:
        return html_table(self.title, _HEADERS, self._cells())

    def __rich__(self) -> Any:
        from rich.table import Table  # optional: only printing with rich needs it

        table = Table(*_HEADERS, title=self.title)
        for row, cells in zip(self.rows, self._cells(), strict=True):
            style = "bold" if row.dtype in ("bf16", "f16") else ""
            table.add_row(*cells, style=style)
        return table


def dtype_text(holder: Any) -> str:
    """Returns the `dtype` attribute of a module as its table says it."""
    if not hasattr(holder, "dtype"):
        return "-"
    return "inputs" if holder.dtype is None else short_name(holder.dtype)


def row_of(path: str, module: Any, leaves: Iterable[Any], reason: str) -> ModuleRow:
    """Returns the row of a module with its own parameters, arrays or their shapes."""
    arrays = [leaf for leaf in leaves if hasattr(leaf, "dtype")]
    dtypes = sorted({short_name(leaf.dtype) for leaf in arrays})
    return ModuleRow(
        path=path,
        class_name=type(module).__name__,
        dtype=dtype_text(module),
        param_dtype=" ".join(dtypes) or "-",
        parameters=sum(leaf.size for leaf in arrays),
        reason=reason,
    )


# -- warnings --------------------------------------------------------------------------------


def warn_of(
    policy: Policy | PolicyMap,
    findings: Mapping[str, ModuleFinding],
    where: str,
    *,
    model: str,
    also: Iterable[str] = (),
) -> None:
    """Warns of each rule that changes nothing, and of modules that the policy cannot reach.

    Args:
      policy: the policy that was set.
      findings: all modules of the network, by path.
      where: the function in whose name the warnings speak.
      model: the name that may stand before each path.
      also: paths that a rule may name besides: those of parameters.
    """
    if isinstance(policy, PolicyMap):
        policy.warn_unused([in_model(model, path) for path in (*findings, *also)], where)
    places = [(in_model(model, path), finding) for path, finding in findings.items()]
    for check in (_idle, _unreached):
        for text in check(policy, places, where):
            warn(text)


Places = list[tuple[Path, ModuleFinding]]


def _idle(policy: Any, places: Places, where: str) -> Iterable[str]:
    """Yields a warning for each rule, or the default, that changes none of its modules."""
    rules = _rules(policy)
    decided: dict[int | None, Places] = {}
    for path, finding in places:
        decided.setdefault(rule_index(policy, path), []).append((path, finding))
    for index in sorted(decided, key=lambda index: -1 if index is None else index):
        findings = [finding for _, finding in decided[index]]
        if any(f.reason not in (OWN, NO_DTYPE) for f in findings):
            continue
        if any(f.has_parameters and not _is_lowered(policy, path) for path, f in decided[index]):
            continue  # the rule names a module without a dtype, and asks for what it does already
        own = [f for f in findings if f.reason == OWN]
        if index is None and not own:
            continue  # the default's modules are containers, which compute nothing
        example = (own or findings)[0]
        subject = "the policy"
        if index is not None:
            subject = f"rule {index + 1} of {len(rules)}, {rules[index][0]!r},"
        what = "has a dtype of its own" if own else NO_DTYPE
        got = f"{subject} changes nothing: {example.path!r} ({example.class_name}) {what}"
        yield message(where, *_idle_lines(got, example, bool(own)))


def _idle_lines(got: str, example: ModuleFinding, is_own: bool) -> tuple[str, str, str]:
    if is_own:
        allowed = "A dtype that the model sets itself stays."
        return f"{got}.", allowed, "Drop it there, or pass override=True."
    allowed = "Allowed: modules with an attribute `dtype`, such as Dense, Linear or BatchNorm."
    fix = f"Give {example.class_name} a `dtype`, or write a rule for a module that has one."
    return f"{got}.", allowed, fix


def _is_lowered(policy: Policy | PolicyMap, path: Path) -> bool:
    """Whether a module is to compute in another dtype than its parameters have."""
    chosen = policy_at(policy, path)
    return chosen.compute_dtype != chosen.param_dtype


def _unreached(policy: Any, places: Places, where: str) -> Iterable[str]:
    """Yields a warning for custom modules with parameters that the policy cannot lower."""
    custom = [
        f
        for path, f in places
        if f.has_parameters and f.reason == NO_DTYPE and _is_lowered(policy, path)
    ]
    if not custom:
        return
    first = ", ".join(f"{f.path or '.'!r} ({f.class_name})" for f in custom[:3])
    more = f" and {len(custom) - 3} more" if len(custom) > 3 else ""
    got = (
        f"{first}{more} holds parameters and has no dtype: it computes in what they are stored in."
    )
    allowed = "A policy sets attributes; what is computed without one is not reached."
    fix = (
        "Give it a `dtype` and cast with it, or use mpjax.autocast; to leave it as it is, "
        "write a rule: its path, 'float32'."
    )
    yield message(where, got, allowed, fix)
