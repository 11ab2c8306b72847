"""QuantizedPolicy: a policy with products in 8 bits, and its names."""

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from mpjax._base.errors import message, nearest
from mpjax._base.foreign_keywords import QUANTIZED
from mpjax._base.keywords import names_keywords
from mpjax._base.public import public
from mpjax._base.typing import DTypeSpec
from mpjax._policies import policy as _policy
from mpjax._policies.parts import policies_in
from mpjax._policies.policy import Policy, get_policy
from mpjax._policies.recipes import MODES, DelayedScaling, Recipe, get_recipe

NAMES = (
    *("int8_from_mixed_bfloat16", "int8_from_float32", "float8_from_mixed_bfloat16"),
    *("float8_from_bfloat16", "float8_from_mixed_float16"),
)
"""Keras's names, for lists; any 16- or 32-bit policy may stand after `_from_`."""

_FROM = "_from_"
_KEY = "q="


@public
@jax.tree_util.register_static
class QuantizedPolicy(Policy):
    """A policy whose products with parameters are multiplied in 8 bits, as a recipe says.

    Everything else is as under `base`: storage, activations, and the products that a recipe
    excludes. `autocast` quantises; the casts of this policy are those of `base`.

    It is immutable, hashable, and a pytree without leaves, as `Policy` is.

    Args:
      base: the policy of everything else, or its name: 16- or 32-bit.
      recipe: such as `Float8CurrentScaling()`; or "int8", "float8", or the name of a recipe.

    Raises:
      ValueError: a name is unknown, or `base` computes in float64.
      TypeError: `base` is quantised already or a map, or `recipe` is no recipe.

    Dtypes:
      Those of `base`, and int8, float8_e4m3fn or float8_e5m2 for the operands of products.

    Transforms:
      As `Policy`.

    Example:
      >>> policy = mpjax.QuantizedPolicy("bf16-mixed", mpjax.Float8CurrentScaling(wgrad=None))
      >>> str(policy), mpjax.get_policy(str(policy)) == policy
      ('p=f32,c=bf16,o=f32,q=Float8CurrentScaling(wgrad=None)', True)
      >>> mpjax.get_policy("int8_from_mixed_bfloat16").recipe
      Int8CurrentScaling()

    References:
      Keras, `QuantizedDTypePolicy`; Transformer Engine, `transformer_engine.common.recipe`
    """

    __slots__ = ("_recipe",)
    _recipe: Recipe

    @names_keywords(QUANTIZED, "QuantizedPolicy")
    def __init__(self, base: Any = "bf16-mixed", recipe: Any = "float8") -> None:
        if isinstance(base, Recipe) or (isinstance(base, str) and base in MODES):
            got = f"got {base!r}, a recipe, where the base is named."
            fix = f"Type QuantizedPolicy('bf16-mixed', {base!r})."
            raise TypeError(message("QuantizedPolicy(base)", got, "Allowed: a policy.", fix))
        base = _checked_base(get_policy(base))
        super().__init__(*base._names)
        object.__setattr__(self, "_recipe", get_recipe(recipe, "QuantizedPolicy(recipe)"))

    @property
    def base(self) -> Policy:
        """The policy of everything that is not quantised."""
        return Policy(*self._names)

    @property
    def recipe(self) -> Recipe:
        """The recipe: the products to multiply in 8 bits, their dtypes and scales."""
        return self._recipe

    def with_output_dtype(self, output_dtype: DTypeSpec) -> "QuantizedPolicy":
        """Returns this policy with another `output_dtype`."""
        return QuantizedPolicy(self.base.with_output_dtype(output_dtype), self._recipe)

    def to_dict(self) -> dict[str, str]:
        """Returns the policy as names that JSON or YAML can hold; `from_dict` reads them."""
        return {**super().to_dict(), "recipe": str(self._recipe)}

    @classmethod
    def from_dict(cls, config: Mapping[str, str]) -> "QuantizedPolicy":
        """Returns the policy that `to_dict` gave `config` for; a missing field is an error."""
        if "recipe" not in config:
            fix = "Type Policy.from_dict for a policy without a recipe."
            raise ValueError(message("QuantizedPolicy.from_dict", "got no 'recipe'.", fix))
        base = Policy.from_dict({key: config[key] for key in config if key != "recipe"})
        return cls(base, config["recipe"])

    def to_jmp(self) -> Any:
        """Raises TypeError: jmp has no quantised policies."""
        fix = "Type policy.base.to_jmp() for the rest of it."
        raise TypeError(message("QuantizedPolicy.to_jmp", "jmp knows no recipes.", fix))

    def __str__(self) -> str:
        return f"{super().__str__()},{_KEY}{self._recipe}"

    def __repr__(self) -> str:
        made = f"QuantizedPolicy({str(self.base)!r}, {self._recipe})"
        return made if self._given is None else f"{made}.named({self._given!r})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Policy):
            return NotImplemented
        if not isinstance(other, QuantizedPolicy):
            return False
        return (self._names, self._recipe) == (other._names, other._recipe)

    def __hash__(self) -> int:
        return hash((QuantizedPolicy, self._names, self._recipe))

    def __reduce__(self) -> Any:
        return _policy.rebuilt, (QuantizedPolicy, (self.base, self._recipe), self._given)


def _checked_base(base: Any) -> Policy:
    where = "QuantizedPolicy(base)"
    if not isinstance(base, Policy) or isinstance(base, QuantizedPolicy):
        fix = "Put quantised policies into the map: PolicyMap('bf16-mixed', {'mlp*': 'int8_from_"
        fix += "mixed_bfloat16'})."
        got = f"got a {type(base).__name__}."
        raise TypeError(message(where, got, "Allowed: a Policy or a name of one.", fix))
    if "float64" in base.to_dict().values():
        got = f"got {base}, which names float64."
        fix = "Type QuantizedPolicy('float32', ...)."
        raise ValueError(message(where, got, "Allowed: 16- and 32-bit policies.", fix))
    return base


def _read(spec: Any) -> Policy | None:
    """Returns the quantised policy that a name or a config is of; None where it is of none.

    Raises:
      ValueError: it is a recipe, which says how to multiply and nothing else.
    """
    if isinstance(spec, Recipe) or (isinstance(spec, type) and issubclass(spec, Recipe)):
        recipe = f"{spec.__name__}()" if isinstance(spec, type) else str(spec)
        got = f"got {recipe}, a recipe of products, where a policy is named."
        fix = f"Type mpjax.QuantizedPolicy('bf16-mixed', mpjax.{recipe})."
        raise ValueError(message("get_policy", got, "Allowed: a policy that holds it.", fix))
    if hasattr(spec, "amax_history_length") and hasattr(spec, "name"):  # Keras
        return _with_history(spec.name, spec.amax_history_length)
    if not isinstance(spec, (str, Mapping)):
        return None
    if not isinstance(spec, str):
        if "mode" in spec and "source_name" in spec:  # Keras
            name = f"{spec['mode']}{_FROM}{spec['source_name']}"
            return _with_history(name, spec.get("amax_history_length", _DEFAULT_OF_KERAS))
        return QuantizedPolicy.from_dict(spec) if "recipe" in spec else None
    if _KEY in spec:
        base, _, recipe = spec.partition(_KEY)
        return QuantizedPolicy(base.rstrip(",") or "bf16-mixed", get_recipe(recipe, "get_policy"))
    mode, separator, _ = spec.lower().partition(_FROM)
    if not separator:
        return None
    base = spec[len(mode) + len(_FROM) :]
    if mode not in MODES or not base:
        _refuse(mode, base)
    return QuantizedPolicy(_named_base(mode, base), MODES[mode])


def _with_history(name: str, length: int) -> Policy | None:
    """Returns the policy of a Keras name, with the amax history that was chosen in Keras."""
    policy = _read(name)
    if length == _DEFAULT_OF_KERAS or not isinstance(policy, QuantizedPolicy):
        return policy
    return QuantizedPolicy(policy.base, DelayedScaling(amax_history_len=length))


_DEFAULT_OF_KERAS = 1024  # steps, if none was chosen: the policy is read by its name


def _named_base(mode: str, base: str) -> Any:
    try:
        return get_policy(base)
    except ValueError:
        pass
    bases = [name.partition(_FROM)[2] for name in NAMES]
    word = re.sub("^(bf16|fp?16)$", r"mixed_\1", base.lower().replace("-", "_"))
    word = re.sub("(?<![a-z])(b?)fp?(16|32)", r"\1float\2", word)
    word = "float32" if word.endswith("float32") else word
    meant = (nearest(word, bases, 1) or bases)[0]
    got = f"unknown policy {f'{mode}{_FROM}{base}'!r}: {base!r} is no base."
    accepted = f"Accepted: {', '.join(f'{mode}{_FROM}{name}' for name in dict.fromkeys(bases))}."
    fix = f"Did you mean get_policy({f'{mode}{_FROM}{meant}'!r})?"
    raise ValueError(message("get_policy", got, accepted, fix))


def _refuse(mode: str, base: str) -> None:
    got = f"there are no {mode!r} products." if base else f"{mode}{_FROM!r} has no base behind it."
    base = base or "mixed_bfloat16"
    why = [f"Accepted: {', '.join(f'{name}{_FROM}{base}' for name in MODES)}."]
    if "4" in mode:
        why.insert(0, "XLA compiles no 4-bit product for a CPU; 8 bits are the fewest here.")
    raise ValueError(message("get_policy", got, *why))


_policy.read_names_with(_read)


def recipes_in(policy: Any) -> list[Recipe]:
    """Returns the recipes of a policy, or of the policies of a map."""
    return [p.recipe for p in policies_in(policy) if isinstance(p, QuantizedPolicy)]


def map_to_type(policy: Any, pattern: str) -> str:
    """Returns a map to type: what `pattern` matches in the 8-bit dtypes of a policy, same base."""
    mode = "int8" if any("int8" in recipe.dtypes for recipe in recipes_in(policy)) else "float8"
    is_float16 = any(p.compute_dtype == jnp.float16 for p in policies_in(policy))
    base, mixed = ("16-mixed", "mixed_float16") if is_float16 else ("bf16-mixed", "mixed_bfloat16")
    return f"PolicyMap({base!r}, {{{pattern!r}: '{mode}_from_{mixed}'}})"
