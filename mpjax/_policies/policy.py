"""Policy: the dtypes of parameters, computation and outputs, and every name for one."""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._base import dtypes as _dtypes
from mpjax._base.dtypes import POLICY_DTYPES, DType
from mpjax._base.errors import message
from mpjax._base.foreign_attributes import POLICY_ATTRIBUTES
from mpjax._base.foreign_errors import (
    attribute_error,
    folded,
    no_config,
    no_keras_map,
    no_keras_policy,
    no_policy,
    unknown_policy,
)
from mpjax._base.foreign_keywords import POLICY_KEYWORDS, SPEC
from mpjax._base.foreign_names import POLICY_ROWS
from mpjax._base.keywords import names_keywords
from mpjax._base.public import public
from mpjax._base.tree import cast_tree
from mpjax._base.typing import DTypeSpec, KnownPolicy

T = TypeVar("T")

HALF = "half"
"""A dtype that is settled at its first use: `half_dtype()` of the backend at that time."""


@public
@jax.tree_util.register_static
class Policy:
    """Three dtypes: parameters are stored in one, computed with in another, returned in a third.

    A policy is immutable and hashable. Two policies are equal if their dtypes are equal, however
    they were spelled. A policy is a pytree without leaves, so it may be a (static) argument of a
    jitted function. `get_policy` makes one from a name.

    Args:
      param_dtype: of stored parameters.
      compute_dtype: of the operands of matrix products and convolutions.
      output_dtype: of the model's results.

    Raises:
      ValueError: an argument names no dtype.
      TypeError: an argument names an integer, complex or 8-bit dtype.

    Dtypes:
      float16, bfloat16, float32 and float64; casting to float64 needs 64-bit types on.

    Transforms:
      Casts are ordinary conversions, differentiable and valid under every transformation.

    Example:
      >>> policy = mpjax.Policy(jnp.float32, jnp.bfloat16, jnp.float32)
      >>> policy.cast_to_compute({"w": jnp.ones(2), "step": 3})
      {'step': 3, 'w': Array([1, 1], dtype=bfloat16)}
      >>> str(policy), mpjax.get_policy(str(policy)) == policy
      ('p=f32,c=bf16,o=f32', True)

    References:
      Micikevicius et al., Mixed Precision Training, 2018, https://arxiv.org/abs/1710.03740
    """

    __slots__ = ("_given", "_names")
    _given: str | None  # the name that `get_policy` was given; not compared by ==
    _names: tuple[str, str, str]  # short names; 'half' where the backend decides

    @names_keywords(POLICY_KEYWORDS, "Policy")
    def __init__(
        self,
        param_dtype: DTypeSpec = jnp.float32,
        compute_dtype: DTypeSpec = jnp.float32,
        output_dtype: DTypeSpec = jnp.float32,
    ) -> None:
        given = (param_dtype, compute_dtype, output_dtype)
        named = zip(("param_dtype", "compute_dtype", "output_dtype"), given, strict=True)
        names = tuple(_name_of(spec, f"Policy({field})") for field, spec in named)
        object.__setattr__(self, "_names", names)
        object.__setattr__(self, "_given", None)

    @property
    def name(self) -> str:
        """The name that it was made by, 'bf16-mixed'; without one, its `str`."""
        return self._given or str(self)

    def named(self, name: str) -> "Policy":
        """Returns the same policy, which remembers another name; it is equal to this one."""
        new = copy.copy(self)
        object.__setattr__(new, "_given", name)
        return new

    if not TYPE_CHECKING:  # or an editor would believe that there is any attribute
        __getattr__ = attribute_error(POLICY_ATTRIBUTES)

    @property
    def param_dtype(self) -> DType:
        """The dtype in which parameters are stored."""
        return _dtype_of(self._names[0])

    @property
    def compute_dtype(self) -> DType:
        """The dtype of the operands of products and convolutions."""
        return _dtype_of(self._names[1])

    @property
    def output_dtype(self) -> DType:
        """The dtype of the model's results."""
        return _dtype_of(self._names[2])

    def cast_to_param(self, tree: T) -> T:
        """Returns `tree` with its floating leaves in `param_dtype`; see `cast_to_compute`."""
        return self._cast(tree, self.param_dtype, "cast_to_param")

    def cast_to_compute(self, tree: T) -> T:
        """Returns `tree` with its floating leaves in `compute_dtype`.

        These pass through: integers, booleans, PRNG keys, complex values, 8-bit floats, Python
        scalars, strings, None, Flax's `_overwrite_with_gradient` collection, and float64 leaves
        unless the policy names float64. `ShapeDtypeStruct`s keep their sharding. A leaf that
        already has the dtype is returned itself, and no operation is added.

        Raises:
          ValueError: `compute_dtype` is float64 and 64-bit types are off.
        """
        return self._cast(tree, self.compute_dtype, "cast_to_compute")

    def cast_to_output(self, tree: T) -> T:
        """Returns `tree` with its floating leaves in `output_dtype`; see `cast_to_compute`."""
        return self._cast(tree, self.output_dtype, "cast_to_output")

    def with_output_dtype(self, output_dtype: DTypeSpec) -> "Policy":
        """Returns this policy with another `output_dtype`."""
        return Policy(self._names[0], self._names[1], output_dtype)

    def to_dict(self) -> dict[str, str]:
        """Returns the policy as names that JSON or YAML can hold; `from_dict` reads them."""
        fields = ("param_dtype", "compute_dtype", "output_dtype")
        return dict(zip(fields, map(_long_name, self._names), strict=True))

    @classmethod
    def from_dict(cls, config: Mapping[str, str]) -> "Policy":
        """Returns the policy that `to_dict` gave `config` for; a missing field is an error."""
        fields = {"param_dtype", "compute_dtype", "output_dtype"}
        if set(config) != fields:
            got = f"got the keys {sorted(config)}."
            allowed = f"Allowed, all of them: {sorted(fields)}."
            fix = "Type what policy.to_dict() gave, or a name, such as 'bf16-mixed'."
            raise ValueError(message("Policy.from_dict", got, allowed, fix))
        return cls(**config)

    def to_jmp(self) -> Any:
        """Returns the `jmp.Policy` of the same dtypes; needs jmp installed."""
        import jmp  # type: ignore[import-not-found,unused-ignore]  # optional peer

        # jmp looks its names up by scalar type, so that is what it gets.
        scalars: Any = (jnp.dtype(_dtype_of(name)).type for name in self._names)
        return jmp.Policy(*scalars)

    def _cast(self, tree: T, dtype: DType, where: str) -> T:
        return cast_tree(tree, dtype, move_float64="f64" in self._names, where=where)

    def __str__(self) -> str:
        return "p={},c={},o={}".format(*self._names)

    def __repr__(self) -> str:
        made = f"Policy({', '.join(f'{k}={v!r}' for k, v in self.to_dict().items())})"
        return made if self._given is None else f"{made}.named({self._given!r})"

    def __eq__(self, other: object) -> bool:
        return self._names == other._names if isinstance(other, Policy) else NotImplemented

    def __hash__(self) -> int:
        return hash((Policy, self._names))

    def __setattr__(self, name: str, value: object) -> None:
        kind = type(self).__name__
        fix = f"Make another, e.g. mpjax.{kind}({name}=...)."
        raise AttributeError(message(kind, f"is immutable; got {name} = {value!r}.", fix))

    def __delattr__(self, name: str) -> None:
        raise AttributeError(message(type(self).__name__, f"is immutable; cannot delete {name}."))

    def __reduce__(self) -> Any:
        return rebuilt, (Policy, self._names, self._given)


def rebuilt(cls: type[Policy], args: tuple[Any, ...], given: str | None) -> Policy:
    """Returns a policy of a class from its arguments, and the name that it remembers."""
    policy = cls(*args)
    object.__setattr__(policy, "_given", given)
    return policy


_FOLDED = frozenset(folded(name) for name, *_ in POLICY_ROWS)


def _name_of(spec: DTypeSpec, where: str) -> str:
    if spec == HALF and isinstance(spec, str):
        return HALF
    is_dtype = isinstance(spec, str) and _dtypes.is_dtype_name(spec.lower())  # 'F16', misspelt
    if isinstance(spec, str) and folded(spec) in _FOLDED and not is_dtype:
        got = f"{spec!r} names a policy, and this is one dtype of three."
        raise ValueError(message(where, got, f"Type mpjax.get_policy({spec!r})."))
    return _dtypes.short_name(_dtypes.canonical_dtype(spec, where))


def _dtype_of(name: str) -> DType:
    return _dtypes.half_dtype() if name == HALF else POLICY_DTYPES[name]


def _long_name(name: str) -> str:
    return HALF if name == HALF else POLICY_DTYPES[name].name


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyName:
    """A row of the table of names that other libraries' users know."""

    name: str
    policy: Policy
    source: str  # the library that it comes from


POLICY_NAMES: tuple[PolicyName, ...] = tuple(
    PolicyName(name=name, policy=Policy(*dtypes.split()), source=source)
    for name, dtypes, source in POLICY_ROWS
)
_BY_NAME = {row.name: row.policy for row in POLICY_NAMES}
_BY_FOLDED = {folded(name): policy for name, policy in _BY_NAME.items()}
_AMBIGUOUS = {  # name → mixed, all of it, who means the former
    "bf16": ("bf16-mixed", "bfloat16", "Lightning and Accelerate"),
    "fp16": ("16-mixed", "float16", "Accelerate and DeepSpeed"),
}
_KEYS = {"p": 0, "params": 0, "c": 1, "compute": 1, "o": 2, "output": 2}
# Read while tracing and part of JAX's own cache key: another default is another program.
default = jax.make_user_context(None)


def chosen_policy(spec: Any, where: str) -> Any:
    """Returns `get_policy(spec)`; refuses a lone dtype of 16 bits, which means mixed to some.

    Raises:
      ValueError: `spec` is `jnp.bfloat16` or `jnp.float16`, as an object.
    """
    policy = get_policy(spec)
    is_dtype = isinstance(spec, (type, np.dtype))
    if not is_dtype or policy.compute_dtype.itemsize > 2:
        return policy
    name = policy.compute_dtype.name
    mixed = "bf16-mixed" if name == "bfloat16" else "16-mixed"
    got = f"got {name} alone: mixed, as in torch.autocast, or all of it, loss included?"
    fix = f"Type {mixed!r} (float32 parameters and loss) or {name!r} ({name} throughout)."
    raise ValueError(message(where, got, fix))


def shown_name(policy: Any) -> str:
    """Returns the name that a policy was made by, for a report; the text of a map."""
    return policy.name if isinstance(policy, Policy) else str(policy)


M = TypeVar("M")  # a PolicyMap, which a higher layer defines


@overload
def get_policy(spec: None = ...) -> Policy: ...
@overload
def get_policy(spec: KnownPolicy | str | int | Mapping[str, Any] | Policy) -> Policy: ...
@overload
def get_policy(spec: M) -> M: ...
@names_keywords(SPEC)
def get_policy(spec: Any = None) -> Any:
    """Returns the policy that `spec` names.

    Args:
      spec: a name known from Lightning ('bf16-mixed', 16), Keras ('mixed_float16'), Apex ('O1') or
        jmp ('p=f32,c=bf16,o=f32', 'full'); a dtype; a `Policy`, `PolicyMap`, `jmp.Policy`, Keras
        `DTypePolicy` or its config; None for the scoped default (see `default_policy`), or float32
        throughout if there is none.

    Returns:
      A `Policy`; a `PolicyMap` is returned itself. It asks no device: 'half' becomes a dtype when
      one of its dtypes is read.

    Raises:
      ValueError: the name is unknown, or it is 'bf16' or 'fp16', which have two meanings.
      TypeError: it names a dtype that a policy cannot have, or is no name at all.

    Example:
      >>> policy = mpjax.get_policy("bf16-mixed")
      >>> print(policy, policy.name)
      p=f32,c=bf16,o=f32 bf16-mixed
      >>> mpjax.get_policy("c=f16") == mpjax.get_policy("params=float32,compute=float16")
      True

    References:
      Lightning, `Trainer(precision=)`; Keras, `DTypePolicy`; Apex, `opt_level`; jmp, `get_policy`
    """
    if spec is None:
        return default.value or Policy()
    is_map = hasattr(spec, "policy_for") and not isinstance(spec, type)
    if isinstance(spec, Policy) or is_map:
        return spec
    is_name = isinstance(spec, str) or (isinstance(spec, int) and not isinstance(spec, bool))
    if is_name:
        name = str(spec).strip()
        return _parse(name).named(name)
    if isinstance(spec, Mapping):
        return _from_config(cast("Mapping[str, Any]", spec))
    return _from_object(spec)


def _from_object(spec: Any) -> Policy:
    if (read := _read_elsewhere(spec)) is not None:  # which refuses a recipe
        return read
    if (text := no_policy(spec)) is not None:
        raise ValueError(text)
    if hasattr(spec, "param_dtype") and hasattr(spec, "output_dtype"):  # jmp.Policy
        return Policy(spec.param_dtype, spec.compute_dtype, spec.output_dtype)
    if hasattr(spec, "variable_dtype") and hasattr(spec, "name"):  # keras.DTypePolicy
        if hasattr(spec, "default_policy"):
            raise ValueError(no_keras_map(spec))
        return _parse(spec.name)
    dtype = _dtypes.canonical_dtype(spec, "get_policy")
    return Policy(dtype, dtype, dtype)


def _from_config(config: Mapping[str, Any]) -> Policy:
    if (read := _read_elsewhere(config)) is not None:
        return read
    inner = config.get("config", config)  # Keras wraps it: {"class_name": ..., "config": {...}}
    if isinstance(inner, Mapping) and set(inner) >= {"name"}:
        return _parse(cast("Mapping[str, str]", inner)["name"])
    if isinstance(inner, Mapping) and (read := _read_elsewhere(inner)) is not None:
        return read
    if "class_name" in config:
        raise ValueError(no_keras_map(config) or no_keras_policy(str(config["class_name"])))
    if (text := no_keras_map(config) or no_config(config)) is not None:
        raise ValueError(text)
    return Policy.from_dict(config)


_READERS: list[Callable[[Any], Policy | None]] = []


def read_names_with(reader: Callable[[Any], Policy | None]) -> None:
    """Registers a reader of names and configs that `get_policy` asks first, as of 8 bits."""
    _READERS.append(reader)


def _read_elsewhere(spec: Any) -> Policy | None:
    return next(filter(None, (reader(spec) for reader in _READERS)), None)


def _parse(name: str) -> Policy:
    if (read := _read_elsewhere(name)) is not None:
        return read
    if "=" in name:
        return _parse_pairs(name)
    if name.lower() in _AMBIGUOUS:
        mixed, whole, who = _AMBIGUOUS[name.lower()]
        got = f"{name!r} means two things: mixed for {who}, all {whole} for others."
        fix = f"Type {mixed!r} (float32 parameters) or {whole!r} ({whole} throughout)."
        raise ValueError(message("get_policy", got, fix))
    if folded(name) in _BY_FOLDED:
        return _BY_FOLDED[folded(name)]
    if _dtypes.is_dtype_name(name):
        return Policy(name, name, name)
    dtype = _dtypes.existing_dtype(name)
    if dtype is None:
        names = {row.name: row.name for row in POLICY_NAMES}
        names |= {word: mixed for word, (mixed, *_) in _AMBIGUOUS.items()}
        raise ValueError(unknown_policy(name, names))
    return _from_object(dtype)  # a dtype that no policy can have: the error says why


def _parse_pairs(text: str) -> Policy:
    """Reads jmp's grammar: params default to f32, compute follows params, output compute."""
    fields: list[str | None] = [None, None, None]
    for part in text.split(","):
        key, _, value = (piece.strip() for piece in part.partition("="))
        if key not in _KEYS:
            got = f"unknown key {key!r} in {text!r}."
            fix = "Allowed: params (p), compute (c), output (o); e.g. 'p=f32,c=bf16,o=f32'."
            raise ValueError(message("get_policy", got, fix))
        if fields[_KEYS[key]] is not None:
            got = f"{key!r} is given twice in {text!r}."
            raise ValueError(message("get_policy", got, "Give each of p, c and o once."))
        fields[_KEYS[key]] = _name_of(value, f"get_policy({text!r})")
    param = fields[0] or "f32"
    compute = fields[1] or param
    return Policy(param, compute, fields[2] or compute)
