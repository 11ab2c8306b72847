"""Recipes: the products to multiply in 8 bits, with their dtypes and scales, as data."""

from __future__ import annotations

import ast
import dataclasses
import re
from typing import Any, ClassVar, TypeAlias, TypeVar

from mpjax._base.errors import message, nearest
from mpjax._base.foreign_keywords import RECIPE, RECIPE_OF
from mpjax._base.keywords import names_keywords

Pair: TypeAlias = tuple[str, str]
"""The dtypes of both operands: of input and weight, or of a gradient and the other operand."""

DTYPES = {"int8": "int8", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}
"""A recipe's name for an 8-bit dtype → JAX's."""

_BY_FULL_NAME = {full: short for short, full in DTYPES.items()}
_FOUR_BITS = re.compile(r"(?:u?int|nf|fp|float)4", re.IGNORECASE)
_PRODUCTS = ("fprop", "dgrad", "wgrad")
_HYBRID: Pair = ("e5m2", "e4m3")


def _short_name(dtype: Any) -> str:
    name = dtype if isinstance(dtype, str) else getattr(dtype, "name", None)
    name = name or getattr(dtype, "__name__", repr(dtype))
    return _BY_FULL_NAME.get(name, name)


def _other_recipe(name: str) -> tuple[str, ...]:
    """Returns the hint for a dtype that belongs to another recipe, or to none."""
    if _FOUR_BITS.match(name):
        return (
            "XLA compiles no 4-bit product for a CPU; 8 bits are the fewest here.",
            "Type 'int8' or 'float8'.",
        )
    if name == "int8":
        return ("Type mpjax.Int8CurrentScaling().",)
    if name.lower() == "hybrid":
        return ("Type Float8CurrentScaling(): e4m3 forward and e5m2 for gradients is its default.",)
    if name in DTYPES:
        return ("Type mpjax.Float8CurrentScaling().",)
    if name.startswith("float8_"):
        return ("Of the float8 dtypes XLA multiplies e4m3fn and e5m2: type 'e4m3' or 'e5m2'.",)
    return ()


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Recipe:
    """The way in which a policy multiplies in 8 bits; its subclasses are made, not it.

    Immutable, hashable, and printed as the expression that makes it.

    Args:
      fprop: the dtypes of input and weight in the forward product: "int8", "e4m3" or "e5m2", one
        for both or a pair; None to multiply in the policy's own dtype.
      dgrad: those of the gradient and the weight, which give the input's gradient.
      wgrad: those of the gradient and the input, which give the weight's.
      granularity: the part that has a scale of its own: "tensor", or "channel", that is each row
        that a product adds up over.
      margin: bits that are left free above the largest value.

    Raises:
      ValueError: a dtype, a pair or a granularity that the recipe has not.
      TypeError: an argument is of another type.
    """

    allowed_dtypes: ClassVar[tuple[str, ...]] = ("e4m3", "e5m2")
    granularities: ClassVar[tuple[str, ...]] = ("tensor", "channel")
    block_size: ClassVar[int] = 1  # values that share a scale; has to divide the contracted length
    has_history: ClassVar[bool] = False  # whether scales are those of earlier steps

    fprop: Pair | str | None = ("e4m3", "e4m3")
    dgrad: Pair | str | None = _HYBRID
    wgrad: Pair | str | None = _HYBRID
    granularity: str = "tensor"
    margin: int = 0

    def __post_init__(self) -> None:
        for product in _PRODUCTS:
            object.__setattr__(self, product, self._pair(product))
        if all(getattr(self, product) is None for product in _PRODUCTS):
            fix = f"Type {type(self).__name__}() for its defaults, or use a policy without recipe."
            raise ValueError(message(type(self).__name__, "quantises no product.", fix))
        self._check_granularity()
        self._check_count("margin", 0, 8)

    @property
    def steps_stored(self) -> int:
        """Of how many earlier steps the largest values are stored, for scales that follow them."""
        return 0

    def _check_granularity(self) -> None:
        if self.granularity not in self.granularities:
            allowed = f"Allowed: {', '.join(map(repr, self.granularities))}."
            fix = f"Type {type(self).__name__}(granularity={self.granularities[0]!r})."
            where = f"{type(self).__name__}(granularity=)"
            raise ValueError(message(where, f"got {self.granularity!r}.", allowed, fix))

    def _pair(self, product: str) -> Pair | None:
        given = getattr(self, product)
        if given is None:
            return None
        both = (given, given) if not isinstance(given, (tuple, list)) else tuple(given)
        where = f"{type(self).__name__}({product}=)"
        allowed = f"Allowed: None, one of {', '.join(map(repr, self.allowed_dtypes))}, or a pair."
        if len(both) != 2:
            raise ValueError(message(where, f"got {given!r}, not two dtypes.", allowed))
        names = tuple(_short_name(name) for name in both)
        for name in names:
            if name not in self.allowed_dtypes:
                raise ValueError(message(where, f"got {name!r}.", allowed, *_other_recipe(name)))
        if names == ("e5m2", "e5m2"):
            got = "got e5m2 for both operands, which GPUs have no product for."
            raise ValueError(message(where, got, f"Type {product}=('e5m2', 'e4m3')."))
        return names[0], names[1]

    def _check_count(self, name: str, least: int, most: int) -> None:
        value = getattr(self, name)
        where = f"{type(self).__name__}({name}=)"
        allowed = f"Allowed: a whole number from {least} to {most}."
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(message(where, f"got {value!r}.", allowed))
        if not least <= value <= most:
            raise ValueError(message(where, f"got {value}.", allowed))

    @property
    def products(self) -> dict[str, Pair | None]:
        """The operands' dtypes by product: 'fprop', 'dgrad' and 'wgrad'."""
        return {product: getattr(self, product) for product in _PRODUCTS}

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The full names of the 8-bit dtypes that it multiplies in."""
        pairs = [pair for pair in self.products.values() if pair]
        return tuple(dict.fromkeys(DTYPES[name] for pair in pairs for name in pair))

    def __repr__(self) -> str:
        fields = [(f.name, getattr(self, f.name), f.default) for f in dataclasses.fields(self)]
        given = [f"{name}={value!r}" for name, value, default in fields if value != default]
        return f"{type(self).__name__}({', '.join(given)})"

    __str__ = __repr__


K = TypeVar("K", bound=type[Recipe])


def _names_keywords(kind: K) -> K:
    """Returns a recipe whose error for a keyword of Transformer Engine says what to type."""
    names = {**RECIPE, **RECIPE_OF.get(kind.__name__, {})}
    kind.__init__ = names_keywords(names, kind.__name__)(kind.__init__)
    return kind


@_names_keywords
@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Int8CurrentScaling(Recipe):
    """int8 with the scales of the values at hand, one a row; weights' gradients stay 16-bit.

    Example:
      >>> mpjax.Int8CurrentScaling(wgrad="int8")
      Int8CurrentScaling(wgrad=('int8', 'int8'))

    References:
      Jacob et al., Quantization and Training of Neural Networks, 2018, https://arxiv.org/abs/1712.05877
    """

    allowed_dtypes: ClassVar[tuple[str, ...]] = ("int8",)

    fprop: Pair | str | None = ("int8", "int8")
    dgrad: Pair | str | None = ("int8", "int8")
    wgrad: Pair | str | None = None
    granularity: str = "channel"


@_names_keywords
@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Float8CurrentScaling(Recipe):
    """float8 with the scale of the values at hand: e4m3 forward, e5m2 for gradients; no state.

    Example:
      >>> mpjax.Float8CurrentScaling(granularity="channel")
      Float8CurrentScaling(granularity='channel')

    References:
      Micikevicius et al., FP8 Formats for Deep Learning, 2022, https://arxiv.org/abs/2209.05433
    """


@_names_keywords
@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class DelayedScaling(Recipe):
    """float8 with the scales of earlier steps; `make_train_step` stores the amax histories.

    A value is cast with a scale that is known before the value is computed. The scale follows from
    the largest magnitudes of earlier steps; `make_train_step` and `with_amax_history` store them. A
    value larger than the scale allows is clipped. An inf or NaN stays one.

    Args:
      fprop, dgrad, wgrad, margin: as in `Recipe`.
      granularity: "tensor".
      amax_history_len: of how many steps the largest values are stored.
      amax_compute_algo: the scale follows from the "max" of these values, or from the
        "most_recent" one, which alone is stored then.

    Raises:
      ValueError, TypeError: as `Recipe`.

    Example:
      >>> mpjax.DelayedScaling(amax_history_len=16)
      DelayedScaling(amax_history_len=16)

    References:
      Transformer Engine, `DelayedScaling`; Micikevicius et al., FP8 Formats for Deep Learning,
      2022, https://arxiv.org/abs/2209.05433
    """

    granularities: ClassVar[tuple[str, ...]] = ("tensor",)
    has_history: ClassVar[bool] = True

    amax_history_len: int = 1024
    amax_compute_algo: str = "max"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_count("amax_history_len", 1, 2**16)
        if self.amax_compute_algo not in ("max", "most_recent"):
            where = "DelayedScaling(amax_compute_algo=)"
            got = f"got {self.amax_compute_algo!r}."
            raise ValueError(message(where, got, "Allowed: 'max', 'most_recent'."))

    @property
    def steps_stored(self) -> int:
        """Of how many earlier steps the largest values are stored: of those that are read."""
        return 1 if self.amax_compute_algo == "most_recent" else self.amax_history_len

    @property
    def without_history(self) -> Recipe:
        """The same dtypes with the scales of the values at hand."""
        pairs = {product: getattr(self, product) for product in _PRODUCTS}
        return Float8CurrentScaling(**pairs, margin=self.margin)


@_names_keywords
@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class MXFP8BlockScaling(Recipe):
    """e4m3 with a power of two for each 32 values that are added up, as Blackwell multiplies it.

    Example:
      >>> mpjax.MXFP8BlockScaling(wgrad=None)
      MXFP8BlockScaling(wgrad=None)

    References:
      OCP Microscaling Formats (MX) v1.0; Mishra et al., 2025, https://arxiv.org/abs/2506.08027
    """

    allowed_dtypes: ClassVar[tuple[str, ...]] = ("e4m3",)
    granularities: ClassVar[tuple[str, ...]] = ("block",)
    block_size: ClassVar[int] = 32

    dgrad: Pair | str | None = ("e4m3", "e4m3")
    wgrad: Pair | str | None = ("e4m3", "e4m3")
    granularity: str = "block"


@_names_keywords
@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Float8BlockScaling(MXFP8BlockScaling):
    """e4m3 with a power of two for each 128 values that are added up.

    Example:
      >>> mpjax.Float8BlockScaling()
      Float8BlockScaling()

    References:
      DeepSeek-V3 Technical Report, 2024, https://arxiv.org/abs/2412.19437
    """

    block_size: ClassVar[int] = 128


RECIPES: dict[str, type[Recipe]] = {
    kind.__name__: kind
    for kind in (
        Float8CurrentScaling,
        DelayedScaling,
        Float8BlockScaling,
        MXFP8BlockScaling,
        Int8CurrentScaling,
    )
}
"""Every recipe by its name."""

MODES: dict[str, Recipe] = {"int8": Int8CurrentScaling(), "float8": Float8CurrentScaling()}
"""The first word of a name such as 'int8_from_mixed_bfloat16' → its recipe."""


def get_recipe(spec: Any, where: str = "recipe") -> Recipe:
    """Returns the recipe of `spec`: itself, its name, or the text that it prints.

    Raises:
      ValueError: an unknown name, or an argument that the recipe has not.
      TypeError: it is no recipe and no text.
    """
    if isinstance(spec, Recipe):
        return spec
    if isinstance(spec, type) and issubclass(spec, Recipe) and spec is not Recipe:
        return spec()
    if not isinstance(spec, str):
        allowed = f"Allowed: {', '.join(RECIPES)}, or its name."
        fix = "Type mpjax.Float8CurrentScaling()."
        raise TypeError(message(where, f"got {spec!r} as a recipe.", allowed, fix))
    if spec in MODES:
        return MODES[spec]
    name, arguments = _parsed(spec, where)
    if name not in RECIPES:
        raise ValueError(_unknown(name, where))
    kind = RECIPES[name]
    fields = [field.name for field in dataclasses.fields(kind)]
    for argument in arguments:
        if argument not in fields:
            got = f"{name} has no argument {argument!r}."
            raise ValueError(message(where, got, f"Allowed: {', '.join(fields)}."))
    return kind(**arguments)


def _parsed(text: str, where: str) -> tuple[str, dict[str, Any]]:
    """Reads 'Name' or 'Name(field=value)': names and literals, nothing is evaluated."""
    try:
        node = ast.parse(text.strip(), mode="eval").body
        if isinstance(node, ast.Name):
            return node.id, {}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.args:
            pairs = [(word.arg, ast.literal_eval(word.value)) for word in node.keywords]
            return node.func.id, {name: value for name, value in pairs if name}
    except (SyntaxError, ValueError):
        pass  # said below, as of any other text
    fix = "Type, for example, 'Float8CurrentScaling(wgrad=None)'."
    raise ValueError(message(where, f"cannot read the recipe {text!r}.", fix))


def _unknown(name: str, where: str) -> str:
    if "int4" in name.lower() or "fp4" in name.lower() or "float4" in name.lower():
        return message(where, f"there is no recipe {name!r}.", *_other_recipe(name))
    close = nearest(name, [*RECIPES, *MODES], 1)
    allowed = f"Accepted: {', '.join([*MODES, *RECIPES])}."
    fix = [f"Did you mean {close[0]!r}?"] if close else []
    return message(where, f"unknown recipe {name!r}.", allowed, *fix)
