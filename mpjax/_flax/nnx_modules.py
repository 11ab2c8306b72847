"""NNX modules that hold their policy: attributes and parameters, set by path in the graph."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax._base.errors import message
from mpjax._base.tree import is_array_or_shape
from mpjax._flax.module_dtypes import (
    FIELDS,
    NO_DTYPE,
    OWN,
    ModuleFinding,
    policy_at,
    reason_at,
    same_dtype,
    scalar_type,
)
from mpjax._policies.policy import Policy
from mpjax._policies.policy_map import PolicyMap
from mpjax._policies.spelling import in_model

Path = tuple[Any, ...]
_MARK = "mpjax_mark"


@dataclasses.dataclass(frozen=True)
class Mark:
    """The mark of `set_policy` on a module: the dtypes that it has set, and why.

    It is an attribute that is no state, so that it lives through `nnx.split`, `nnx.clone` and
    `nnx.jit`: a later `set_policy` may replace the dtypes of an earlier one, and no others.
    """

    given: tuple[tuple[str, str], ...]  # field → the name of the dtype that was set
    reason: str

    def value(self, field: str) -> str:
        """Returns the name of the dtype that a field was given, '' for none."""
        return dict(self.given).get(field, "")


def mark_of(module: Any) -> Mark | None:
    """Returns the mark of `set_policy` on a module, None for none."""
    return getattr(module, _MARK, None)


def set_dtypes(
    model: nnx.Module, policy: Policy | PolicyMap, *, override: bool
) -> tuple[dict[str, ModuleFinding], list[str]]:
    """Sets attributes and parameters of all modules.

    Returns:
      What became of each module, by path; and the paths of the parameters.
    """
    findings: dict[str, ModuleFinding] = {}
    defaults: dict[Path, dict[str, Any]] = {}  # path → dtypes by default, which it may pass down
    root = type(model).__name__
    kept: set[Path] = set()  # modules that have set the dtype of their parameters
    for path, module in modules_of(model, "set_policy"):
        name = path_text(path)
        had = {field: getattr(module, field) for field in FIELDS if hasattr(module, field)}
        above = [defaults[path[:end]] for end in range(len(path)) if path[:end] in defaults]
        defaults[path] = {f: v for f, v in had.items() if _is_default(module, f, v, above)}
        given = mark_of(module)
        again = {f for f, v in had.items() if given and same_dtype(given.value(f), v)}
        free = {f for f in had if override or f in again or f in defaults[path]}
        decisive = {"dtype"} & had.keys() or had.keys()
        spelled = in_model(root, name)
        reason = reason_at(policy, spelled) if decisive & free else OWN
        reason = reason if had else NO_DTYPE
        _give(module, free, policy_at(policy, spelled), reason)
        if "param_dtype" in had and "param_dtype" not in free:
            kept.add(path)
        findings[name] = ModuleFinding(
            path=name,
            class_name=type(module).__name__,
            reason=reason,
            has_parameters=bool(parameters_of(module)) and not _is_flax(module),
        )
    return findings, _cast_params(model, policy, kept)


def modules_of(model: Any, where: str) -> list[tuple[Path, nnx.Module]]:
    """Returns the modules of a model, parents before children."""
    if not isinstance(model, nnx.Module):
        fix = f"Type mpjax.nnx.{where}(model, 'bf16-mixed') with the model itself."
        if any(base.__module__.startswith("flax.linen") for base in type(model).__mro__):
            fix = "For a linen module: model = mpjax.linen.with_policy(model, 'bf16-mixed')."
        got = f"got a {type(model).__name__}."
        raise TypeError(message(where, got, "Allowed: a flax.nnx.Module.", fix))

    def order(item: tuple[Path, Any]) -> Any:
        return [(isinstance(key, str), key) for key in item[0]]

    return sorted(nnx.iter_modules(model), key=order)


def path_text(path: Path) -> str:
    """Returns a path as users write it: 'layers/0/norm'."""
    return "/".join(map(str, path))


def _is_default(module: Any, field: str, value: Any, above: list[dict[str, Any]]) -> bool:
    """Whether a value is the default of the constructor's argument, or one passed down."""
    if isinstance(module, nnx.Embed) and field == "dtype":
        return same_dtype(value, module.embedding.dtype)  # its constructor replaces None by that
    if value is None or same_dtype(value, _constructor_default(type(module), field)):
        return True
    passed_down = [values[field] for values in above if values.get(field) is not None]
    return any(same_dtype(value, other) for other in passed_down)


def _constructor_default(cls: type, field: str) -> Any:
    """Returns the default of a constructor's argument, '' where it has none.

    An argument that goes on to a base class by `**kwargs`, as in `nnx.LoRALinear`, has its default
    there.
    """
    for base in cls.__mro__:
        if "__init__" not in vars(base):
            continue
        parameters = inspect.signature(vars(base)["__init__"]).parameters
        if field in parameters:
            default = parameters[field].default
            return "" if default is inspect.Parameter.empty else default
        if not any(p.kind == p.VAR_KEYWORD for p in parameters.values()):
            break
    return ""


def _give(module: Any, free: set[str], policy: Policy, reason: str) -> None:
    values = {"dtype": policy.compute_dtype, "param_dtype": policy.param_dtype}
    if isinstance(module, (nnx.WeightNorm, nnx.SpectralNorm)):
        values["dtype"] = policy.param_dtype  # they write the inner layer's weights in it
    for field in free:
        setattr(module, field, scalar_type(values[field]))
    given = tuple((field, values[field].name) for field in sorted(free))
    setattr(module, _MARK, Mark(given, reason))
    if isinstance(module, nnx.RNNCellBase) and free:
        _give_carry_dtype(module, policy)


# -- recurrent cells: a carry must have one dtype throughout -----------------------------------


@dataclasses.dataclass(frozen=True)
class CarryDType:
    """An activation function whose result is cast to the dtype of a cell's carry."""

    activation_fn: Callable[..., Any]
    dtype: str

    def __call__(self, x: Any) -> Any:
        """Returns the activation of `x`."""
        return self.activation_fn(x).astype(self.dtype)


def _give_carry_dtype(cell: Any, policy: Policy) -> None:
    """Makes a cell return a carry of the dtype that it started from, so that `nnx.RNN` can scan it.

    A carry starts in the cell's `param_dtype`, which after construction serves nothing else. The
    gated cells compute theirs in the wider of `param_dtype` and their gates' dtype. A SimpleCell
    would return a bfloat16 carry for a float32 one, which `lax.scan` refuses.
    """
    with jax.numpy_dtype_promotion("standard"):
        wide = jnp.promote_types(policy.param_dtype, policy.compute_dtype)
    mark = getattr(cell, _MARK)
    kept = tuple((field, wide.name if field == "param_dtype" else d) for field, d in mark.given)
    setattr(cell, _MARK, dataclasses.replace(mark, given=kept))
    cell.param_dtype = scalar_type(wide)
    if isinstance(cell, nnx.SimpleCell):
        plain = cell.activation_fn
        plain = plain.activation_fn if isinstance(plain, CarryDType) else plain
        cell.activation_fn = CarryDType(plain, wide.name)


# -- parameters --------------------------------------------------------------------------------


def parameters_of(module: Any) -> list[Any]:
    """Returns the arrays, or shapes, of the parameters that a module holds itself."""
    own = [x for x in vars(module).values() if isinstance(x, nnx.Param)]
    leaves = [x for variable in own for x in jax.tree.leaves(variable.get_value())]
    return [x for x in leaves if is_array_or_shape(x)]


def _is_flax(module: Any) -> bool:
    return type(module).__module__.split(".")[0] == "flax"


def _cast_params(model: nnx.Module, policy: Policy | PolicyMap, kept: set[Path]) -> list[str]:
    """Casts the parameters of all but some modules; returns the paths of all."""
    names: list[str] = []
    for path, variable in nnx.iter_graph(model):
        if not isinstance(variable, nnx.Param):
            continue
        name = path_text(path)
        names.append(name)
        value = variable.get_value()
        chosen = policy_at(policy, in_model(type(model).__name__, name))
        cast_value = value if path[:-1] in kept else chosen.cast_to_param(value)
        if cast_value is not value:
            variable.set_value(cast_value)
    return names
