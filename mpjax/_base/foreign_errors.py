"""Error texts for a name or an attribute of another library: they say what to type here."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

from mpjax._base.described import described, library_kind
from mpjax._base.dtypes import describe, torch_dtype
from mpjax._base.errors import message, misspelt, nearest, of_one_width
from mpjax._base.foreign_attributes import ATTRIBUTES
from mpjax._base.foreign_names import DEVICES, DTYPE_WORDS, MODE_WORDS, POLICIES, PRODUCTS
from mpjax._base.keywords import mixed_with


def no_attribute(
    name: str, known: Iterable[str] = (), module: str = "mpjax", library: Any = None
) -> str:
    """Returns the error text for a name that a module does not have.

    Args:
      name: the name.
      known: the module's own names.
      module: the module, of which a user wrote an attribute.
      library: the one that the module extends, as optax, whose names are asked for too.
    """
    got = f"has no attribute {name!r}."
    if (here := ATTRIBUTES.get(name)) is not None:
        fix = [f"Here it is {here}."]
    elif library is not None and not name.startswith("_") and hasattr(library, name):
        fix = [f"It is {library.__name__}'s: type {library.__name__}.{name}."]
    else:
        fix = [f"Did you mean {module}.{word}?" for word in misspelt(name, known)]
        fix = fix or [f"Type dir({module}) for the names that it has."]
    return message(f"module {module!r}", got, *fix)


def attributes_of(module: str, known: list[str], library: Any = None) -> Callable[[str], NoReturn]:
    """Returns the `__getattr__` of a module of mpjax; the arguments are those of `no_attribute`."""

    def missing(name: str) -> NoReturn:
        raise AttributeError(no_attribute(name, known, module, library))

    return missing


class NoAttributeOfError(AttributeError):
    """An object has no such attribute; mpjax's name for it is looked up when the error is shown.

    Reading an attribute that is missing, as `hasattr` does, then costs no search.
    """

    def __init__(self, cls: type, attribute: str, names: dict[str, str]) -> None:
        super().__init__(attribute)
        self._cls = cls
        self._names = names

    def __str__(self) -> str:
        (name,) = self.args
        here = self._names.get(name)
        fields = list(getattr(self._cls, "__dataclass_fields__", ()))
        known = dict.fromkeys((*fields, *dir(self._cls)))
        known = [n for n in known if not n.startswith(("_", "tree_"))]
        close = misspelt(name, known)
        fix = [f"Here it is {here}."] if here else [f"Did you mean .{word}?" for word in close]
        if not fix:
            fix = [f"It has {', '.join(f'.{word}' for word in known)}."]
        return message(self._cls.__name__, f"has no attribute {name!r}.", *fix)


def attribute_error(names: dict[str, str]) -> Callable[[Any, str], NoReturn]:
    """Returns the `__getattr__` of a class; `names` has other libraries' attributes."""

    def missing(self: Any, name: str) -> NoReturn:
        raise NoAttributeOfError(type(self), name, names)

    return missing


def folded(name: str) -> str:
    """Returns the key of a policy's name: BF16-Mixed and bf16_mixed have one, O1 and o1 another."""
    return name.lower().replace("_", "-")


def no_keras_policy(kind: str) -> str:
    """Returns the error text for a Keras class that is no pair of floating dtypes."""
    got = f"a Keras {kind} is no policy of floating dtypes."
    allowed = "Allowed: a Keras DTypePolicy, or its config."
    fix = "Type the name that it was made from, such as 'mixed_bfloat16'."
    return message("get_policy", got, allowed, fix)


def no_keras_map(spec: Any, where: str = "get_policy") -> str | None:
    """Returns the error text for a Keras `DTypePolicyMap`, or its config; None for all else.

    Its paths are of layers and not of parameters, an exact path wins over a pattern, and a plain
    path covers nothing below it: it is refused with the map to type, and not translated.
    """
    if hasattr(spec, "default_policy"):
        default, rules = spec.default_policy, spec if isinstance(spec, Mapping) else {}
    else:
        config = spec.get("config", spec) if isinstance(spec, Mapping) else spec
        if not isinstance(config, Mapping) or "policy_map" not in config:
            return None
        default, rules = config.get("default_policy"), config["policy_map"]
    names = {key: _keras_name(policy) for key, policy in rules.items()}
    plain = {key: name for key, name in names.items() if not _REGEX_SIGNS.search(key)}
    typed = plain | {f"re:{key}": name for key, name in names.items() if key not in plain}
    fix = f"Type PolicyMap({_keras_name(default)!r}, {typed or {'re:encoder/.*': 'float32'}!r})"
    differs = ": a plain path covers all below it too, and the first rule that matches wins."
    fix += differs if typed else ", with your own paths."
    if where == "PolicyMap":
        got = "a Keras DTypePolicyMap has other rules: an exact path, then a regular expression."
        return message(where, got, "Allowed: PolicyMap(default, rules) of mpjax.", fix)
    got = "a Keras DTypePolicyMap is many policies, by the paths of Keras layers."
    return message(where, got, "Allowed: a Keras DTypePolicy, or its config.", fix)


def _keras_name(policy: Any) -> str:
    """Returns the name of a Keras policy, of its config, or of its default for None."""
    config = policy.get("config", policy) if isinstance(policy, Mapping) else policy
    if isinstance(config, Mapping) and "mode" in config:
        return f"{config['mode']}_from_{config.get('source_name') or 'mixed_bfloat16'}"
    name = config.get("name") if isinstance(config, Mapping) else getattr(config, "name", config)
    return str(name or "mixed_bfloat16")


_REGEX_SIGNS = re.compile(r"[\\^$*+?{}|()\[\]]")


def no_policy(spec: Any) -> str | None:
    """Returns the error text for an object that names no policy; None if it may be a dtype."""
    name = "'bf16-mixed'"
    is_array = hasattr(spec, "shape") and hasattr(spec, "dtype") and not isinstance(spec, type)
    if isinstance(spec, bool):
        got = f"got {spec}: a policy is named, and not switched on or off."
        fix = f"Type {name}, or '32-true' for none."
    elif is_array:
        got = f"got an array, {describe(spec)}, where a policy is named."
        fix = f"Type the function, and not what it returned: mpjax.autocast(fun, {name})."
    elif (torchs := torch_dtype(spec)) is not None:
        got = f"got {spec!r}, a dtype of PyTorch."
        fix = f"Type {mixed_with(torchs)!r}, or {torchs!r} for all of it."
    elif isinstance(spec, type) and spec.__module__.partition(".")[0] == "mpjax":
        got = f"got the class {spec.__name__}, where a policy is named."
        fix = (
            f"Call it: mpjax.{spec.__name__}({_ARGUMENTS.get(spec.__name__, '')}); or type {name}."
        )
    elif library_kind(spec) or (callable(spec) and not isinstance(spec, type)):
        got = f"got {described(spec)}, where a policy is named."
        fix = f"The policy stands behind what it is for: mpjax.autocast(fun, {name})."
    elif isinstance(spec, tuple) and type(spec) is not tuple:
        got = f"got a {type(spec).__name__}, where a policy is named."
        fix = f"Type its name, such as {name}."
    elif isinstance(spec, (list, tuple)):
        got = f"got a {type(spec).__name__}."
        fix = f"Type mpjax.Policy({', '.join(map(repr, spec))}), or its name, such as {name}."
    else:
        return None
    accepted = "Accepted: a name, a dtype, a Policy or a PolicyMap."
    return message("get_policy", got, accepted, fix)


_ARGUMENTS = {
    "Policy": "'float32', 'bfloat16', 'float32'",
    "PolicyMap": "'bf16-mixed', {'head': 'float32'}",
    "QuantizedPolicy": "'bf16-mixed', 'float8'",
}
_CONFIG = frozenset(
    (
        *("param_dtype", "compute_dtype", "output_dtype", "params", "compute", "output"),
        *("default", "rules", "recipe", "name", "mode", "dtype", "p", "c", "o"),
    )
)
"""Keys of a policy's config, and of what looks like one."""


def no_config(spec: Mapping[Any, Any]) -> str | None:
    """Returns the error text for a mapping that is no policy's config; None if it may be one."""
    if not spec or not _CONFIG.isdisjoint(spec):
        return None
    shown = ", ".join(map(repr, list(spec)[:3])) + ", ..." * (len(spec) > 3)
    got = f"got a mapping with the keys {shown}, where a policy is named."
    accepted = "Accepted: a name, a dtype, a Policy or a PolicyMap."
    fix = "The policy stands behind what it is for, such as parameters; its name is 'bf16-mixed'."
    rules = {str(key): value for key, value in spec.items() if isinstance(value, str)}
    if len(rules) == len(spec):
        fix = f"For policies by path, type mpjax.PolicyMap('bf16-mixed', {rules!r})."
    return message("get_policy", got, accepted, fix)


def unknown_policy(name: str, names: Mapping[str, str]) -> str:
    """Returns the error text for a name that is none of the policies' `names`.

    Each stands for the name to type: 'bf16', which has two meanings, for 'bf16-mixed'.
    """
    if folded(name) in ("tf32", "tensorfloat32", "tf32x3"):
        got = f"{name!r} is how float32 products are computed, and no dtype of a policy."
        fix = "Type mpjax.autocast(fun, '32-true', dot_precision='tf32')."
        return message("get_policy", got, fix)
    if folded(name) in PRODUCTS:
        got = f"{name!r} is how float32 products are computed, and no dtype of a policy."
        fix = "Type mpjax.autocast(fun, '32-true', dot_precision='tf32'), or 'bf16x3', or a "
        fix += "jax.lax.Precision."
        return message("get_policy", got, fix)
    if folded(name).partition(":")[0] in DEVICES:
        got = f"{name!r} is a device: JAX puts a computation where its arrays are."
        return message("get_policy", got, "Type 'bf16-mixed' or '16-mixed'.")
    if folded(name) in ("dynamic", "static"):
        got = f"{name!r} is a way to scale the loss, and no policy."
        fix = "Type mpjax.DynamicLossScale(), or '16-mixed', which has one."
        return message("get_policy", got, fix)
    if len(parts := name.split(",")) == 3:
        got = f"unknown policy {name!r}."
        fix = "Type 'p={},c={},o={}'.".format(*map(str.strip, parts))
        return message("get_policy", got, "Accepted: parameters, computation, output by key.", fix)
    if re.search(r"(nf|fp|float|^f|int|^i|mxfp|^)4($|[^0-9])|4.?bit|gptq|awq", folded(name)):
        got = f"unknown policy {name!r}: there are no products of 4 bits."
        allowed = "XLA compiles none for a CPU; 8 bits are the fewest here."
        fix = "Type 'int8_from_mixed_bfloat16'; mpjax.quantize(params, it) for weights in 8 bits."
        return message("get_policy", got, allowed, fix)
    if re.search("(fp|float|^f|int|^i|^)8|transformer-engine|hybrid|e4m3|e5m2", folded(name)):
        return _no_eight_bits(name)
    accepted = (
        "Accepted: 'bf16-mixed', '16-mixed', '32-true', 'mixed_bfloat16', 'O2', "
        "'p=f32,c=bf16,o=f32', or one dtype; `python -m mpjax names` lists all."
    )
    meant = POLICIES.get(folded(name)) or _by_words(name)
    near = of_one_width(name, names)
    close = nearest(folded(name), near, 1) or nearest(name, near, 1)
    close = [meant] if meant else [names[each] for each in close]
    fix = f"Did you mean get_policy({close[0]!r})?" if close else "E.g. get_policy('bf16-mixed')."
    return message("get_policy", f"unknown policy {name!r}.", accepted, fix)


def _by_words(name: str) -> str | None:
    """Returns the policy of two words, a dtype and a mode in any order: 'fp16-full', 'amp_half'."""
    words = folded(name).split("-")
    widths = [DTYPE_WORDS[word] for word in words if word in DTYPE_WORDS]
    modes = [MODE_WORDS[word] for word in words if word in MODE_WORDS]
    if (len(words), len(widths), len(modes)) != (2, 1, 1):
        return None
    return f"{widths[0]}-{modes[0] if widths[0].endswith('16') else 'true'}"


def _no_eight_bits(name: str) -> str:
    """Returns the error text for a name of 8 bits without a base."""
    got = f"unknown policy {name!r}: 8 bits is a recipe of products, and no dtype of a policy."
    allowed = "Accepted: 'int8_from_mixed_bfloat16', 'float8_from_mixed_bfloat16', or either "
    allowed += "from another base, such as 'float8_from_mixed_float16'."
    kind = "int8" if re.search("^(int|i)?8", folded(name)) else "float8"
    base = "mixed_float16" if folded(name).endswith("float16") else "mixed_bfloat16"
    base = "mixed_bfloat16" if folded(name).endswith("bfloat16") else base
    fix = f"Type '{kind}_from_{base}'."
    if folded(name).startswith("transformer-engine"):  # Lightning stores weights in 16 bits
        low = base.removeprefix("mixed_")
        fix = f"Type 'float8_from_{low}', or 'float8_from_{base}' for float32 parameters."
    return message("get_policy", got, allowed, fix)
