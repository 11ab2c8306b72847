"""Checks a policy against an accelerator's row of the table; warns, or raises."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, cast

import jax

from mpjax._base.errors import SupportWarning, message, warn
from mpjax._base.shown import Shown, html_table
from mpjax._hardware.find import DeviceLike, find_accelerator
from mpjax._hardware.table import BLOCK_UNITS, Accelerator, Cell, Status
from mpjax._policies.recipes import DTYPES as EIGHT_BIT


class PolicyLike(Protocol):
    """The part of a policy that is read here."""

    def to_dict(self) -> dict[str, str]:
        """Returns 'param_dtype', 'compute_dtype' and 'output_dtype', by name ('half' included)."""
        ...


class PolicyMapLike(Protocol):
    """The part of a map from paths to policies that is read here."""

    @property
    def default(self) -> PolicyLike:
        """The policy of paths that no rule matches."""
        ...

    @property
    def rules(self) -> Sequence[tuple[str, PolicyLike]]:
        """Patterns and their policies."""
        ...


@dataclasses.dataclass(frozen=True)
class DtypeFinding:
    """The support of one dtype of a policy on an accelerator."""

    where: str  # 'policy'; in a PolicyMap 'default' or the pattern of a rule
    roles: tuple[str, ...]  # of 'param', 'compute', 'output'; of a recipe 'fprop', 'dgrad', 'wgrad'
    dtype: str
    status: Status
    reason: str
    instead: tuple[str, ...]  # the names of policies to type; empty if nothing is wrong

    def __str__(self) -> str:
        where = "" if self.where == "policy" else f"{self.where!r}: "
        return f"{where}{', '.join(self.roles)} {self.dtype} is {self.status}: {self.reason}"


@dataclasses.dataclass(frozen=True, repr=False)
class SupportReport(Shown):
    """The support of a policy on an accelerator, dtype by dtype."""

    policy: str  # as text
    accelerator: Accelerator
    findings: tuple[DtypeFinding, ...]

    @property
    def name(self) -> str:
        """The policy as a sentence has it: in quotes, if it is a name."""
        return self.policy if self.policy.startswith("PolicyMap") else repr(self.policy)

    @property
    def status(self) -> Status:
        """The worst status among the findings."""
        statuses = {finding.status for finding in self.findings}
        return next(status for status in reversed(_SEVERITY) if status in statuses)

    @property
    def ok(self) -> bool:
        """Whether nothing is slow or unsupported."""
        return self.status not in ("slow", "unsupported")

    def lines(self, *statuses: Status) -> list[str]:
        """Returns the findings of these statuses as text, then what to type instead."""
        chosen = [finding for finding in self.findings if finding.status in statuses]
        instead = dict.fromkeys(name for finding in chosen for name in finding.instead)
        shown = [name if name == _X64 else repr(name) for name in instead]
        advice = [f"Type {', or '.join(shown)} instead."] if shown else []
        return [*map(str, chosen), *advice]

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain values, for JSON."""
        return {
            "policy": self.policy,
            "device": self.accelerator.key,
            "description": self.accelerator.name,
            "ok": self.ok,
            "status": self.status,
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
        }

    def _headline(self) -> str:
        return f"{self.name} on {self.accelerator.name}: {self.status}"

    def __str__(self) -> str:
        return "\n  ".join((self._headline(), *self.lines(*_SEVERITY)))

    def _repr_html_(self) -> str:
        cells = [
            (f.where, ", ".join(f.roles), f.dtype, f.status, f.reason, ", or ".join(f.instead))
            for f in self.findings
        ]
        headers = ("policy", "role", "dtype", "status", "why", "type instead")
        return html_table(self._headline(), headers, cells)


_SEVERITY: tuple[Status, ...] = ("native", "unknown", "slow", "unsupported")


def examine(policy: PolicyLike | PolicyMapLike, accelerator: Accelerator) -> SupportReport:
    """Returns the support of a policy, or a `PolicyMap`'s default and rules, on `accelerator`."""
    if hasattr(policy, "rules"):
        policies = cast("PolicyMapLike", policy)
        parts = [("default", policies.default), *policies.rules]
        text = f"PolicyMap of {len(policies.rules)} rules"
    else:
        parts = [("policy", cast("PolicyLike", policy))]
        text = getattr(policy, "name", str(policy))
    findings = [finding for part in parts for finding in _findings(*part, accelerator)]
    return SupportReport(text, accelerator, tuple(findings))


def check_policy(
    policy: PolicyLike | PolicyMapLike,
    device: DeviceLike | str | None = None,
    *,
    where: str,
) -> SupportReport:
    """Returns `examine`'s report; warns of slow dtypes, and raises on those that cannot run.

    A dtype that is slow on a CPU is reported without a warning: people try code on CPUs.

    Args:
      policy: a `Policy` or `PolicyMap`.
      device: as `find_accelerator` takes it.
      where: the function that the user called, for the message.

    Raises:
      ValueError: a dtype cannot run, or `device` is an unknown name.

    Warns:
      SupportWarning: a dtype is slow on an accelerator other than a CPU.
    """
    report = examine(policy, find_accelerator(device, where))
    row = report.accelerator
    if report.status == "unsupported":
        got = f"{report.name} cannot run on {row.name}."
        raise ValueError(message(where, got, *report.lines("unsupported")))
    if report.status == "slow" and row.family != "cpu":
        got = f"{report.name} gains little or nothing on {row.name}."
        warn(message(where, got, *report.lines("slow")), SupportWarning)
    return report


def _findings(where: str, policy: PolicyLike, accelerator: Accelerator) -> list[DtypeFinding]:
    roles: dict[tuple[str, Cell], list[str]] = {}
    for field, dtype in policy.to_dict().items():
        role = field.removesuffix("_dtype")
        if role == "recipe":
            continue
        if dtype == "half":  # jmp's rule; the policy itself would ask the backend that is here
            dtype = "bfloat16" if accelerator.family == "tpu" else "float16"
        roles.setdefault((dtype, _judge(role, dtype, accelerator)), []).append(role)
    recipe: Any = getattr(policy, "recipe", None)
    directions, blocks = ({}, 1) if recipe is None else (recipe.products, recipe.block_size)
    for product, pair in directions.items():
        for name in dict.fromkeys(pair or ()):
            dtype = EIGHT_BIT[name]
            cell = _judge_blocks(blocks, accelerator.cell(dtype), accelerator)
            roles.setdefault((dtype, cell), []).append(product)
    return [
        DtypeFinding(where, tuple(names), dtype, *cell, instead=_instead(dtype, cell, accelerator))
        for (dtype, cell), names in roles.items()
    ]


def _judge(role: str, dtype: str, accelerator: Accelerator) -> Cell:
    if dtype == "float64" and not jax.config.read("jax_enable_x64"):
        return Cell("unsupported", "64-bit types are off in JAX, which would give float32")
    # Parameters and outputs are stored and added, which only float64 makes costly.
    if role != "compute" and dtype != "float64":
        return Cell("native", "stored and added, not multiplied")
    return accelerator.cell(dtype)


_WITHOUT_BLOCKS = "no unit takes a scale for each block of values; 16-bit products"


def _judge_blocks(size: int, cell: Cell, accelerator: Accelerator) -> Cell:
    """Returns the cell of operands that have a scale for each `size` values; 1 is for no blocks."""
    units = BLOCK_UNITS.get(accelerator.key)
    # XLA uses a unit's own blocks only: others are products of 16 bits.
    if size == 1 or cell.status != "native" or units == size:
        return cell
    if units is None and accelerator.key in BLOCK_UNITS:
        return Cell("unknown", "its units take blocks; whether XLA uses them was not seen")
    return Cell("slow", _WITHOUT_BLOCKS)


_X64 = "jax.config.update('jax_enable_x64', True) at the start"


def _instead(dtype: str, cell: Cell, accelerator: Accelerator) -> tuple[str, ...]:
    if cell.status == "unsupported":
        return _X64, "32-true"
    if cell.reason == _WITHOUT_BLOCKS:
        return ("float8_from_mixed_bfloat16",)
    if cell.status == "slow" and dtype in EIGHT_BIT.values():
        has_other = accelerator.cell("int8").status == "native"
        return *(["int8_from_mixed_bfloat16"] * has_other), accelerator.policy
    if cell.status == "slow":
        return ("32-true" if dtype == "float64" else accelerator.policy,)
    return ()
