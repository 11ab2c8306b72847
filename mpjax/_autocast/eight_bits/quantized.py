"""Chooses the products that are multiplied in 8 bits: a recipe for each, or why it stays in 16."""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from mpjax._autocast.arguments import stateful
from mpjax._autocast.decide.decided import products
from mpjax._autocast.eight_bits import delayed, layers
from mpjax._autocast.eight_bits.layers import DataFlow, Given, Made, Origin
from mpjax._autocast.known import scopes
from mpjax._autocast.known.contraction import adds_nothing, free_axes
from mpjax._autocast.product import ArrayRole, Config, current, quantized
from mpjax._base.dtypes import FLOAT32
from mpjax._base.errors import message, warn
from mpjax._jaxpr.equation import Eqn, Jaxpr
from mpjax._policies.policy import Policy
from mpjax._policies.quantized_policy import QuantizedPolicy, map_to_type, recipes_in
from mpjax._policies.recipes import Recipe
from mpjax._policies.spelling import matches, of_operation

SMALLEST = 4096
"""Elements of a weight below which a product stays in 16 bits: its casts would cost more."""
MULTIPLE = 16
"""Both sizes of a weight must be multiples of it, as matrix units need them."""
_ANY_PATH = "\0"  # no layer is called so: a pattern that matches it matches everything


def quantizes(policy: scopes.Policies) -> bool:
    """Whether a policy, or a policy of a map, has a recipe."""
    return bool(recipes_in(policy))


class QuantizedProducts:
    """Decides about the products of one program; does nothing if no policy has a recipe."""

    def __init__(self, jaxpr: Jaxpr, policy: scopes.Policies, given: Given | None) -> None:
        self.policy = policy
        self.given = given
        self.flow: DataFlow | None = layers.flow(jaxpr, given) if given is not None else None

    def entering(self, eqn: Eqn, inner: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `inner`, which plans a program inside an equation, with the origins of inputs."""
        flow, given = self.flow, self.given
        if flow is None or given is None:
            return inner

        def plan(program: Any, in_states: Any, wants: Any, settings: Any, outside: Any) -> Any:
            known = layers.inside(eqn, program, flow, given)
            if known is not None and known.keeps_history and not delayed.keeps(eqn):
                known = replace(known, keeps_history=False)
            return inner(program, in_states, wants, replace(settings, given=known), outside)

        return plan

    def config(
        self, eqn: Eqn, settings: Any, low: Any, *, exact: bool
    ) -> tuple[Config | None, str, Any]:
        """Returns the 8-bit config of a product or None, the reason, and the other products' dtype.

        Args:
          eqn: its equation.
          settings: those of its plan, whose scopes are around it.
          low: the dtype of products that are not quantised, None for float32.
          exact: whether rounding the result would ruin a reader.
        """
        skipped = self.flow is None or settings.as_written
        # A ragged product has no axes for scales; an outer product sums nothing: it is elementwise.
        if skipped or eqn.primitive.name == "ragged_dot_general" or adds_nothing(eqn):
            return None, "", low
        weight = self.flow.weight(eqn) if self.flow is not None else None
        path = self.path(eqn)
        scope = settings.scope + scopes.of(eqn)
        recipe, rule = _recipe(self.policy, scope, path)
        if recipe is None:
            left = "no rule asks for it" if rule is None else f"rule {rule!r}"
            return None, "" if weight is None else f"not in 8 bits: {left}", low
        why = self._why_not(eqn, weight, path, recipe, rule)
        why = "what reads it needs it exact" if exact else why
        if weight is None or why:
            return None, f"not in 8 bits: {why}", low
        roles = _roles(eqn, weight)
        how = quantized(recipe, low or FLOAT32, roles, keeps=settings.in_loop)
        lost = recipe.has_history and self._why_no_history(eqn)
        if lost:
            how = current(how, records=False)
        return how, _said(recipe, path, lost or ""), low or FLOAT32

    def path(self, eqn: Eqn) -> str:
        """Returns the path of the weight of a product, empty where it has none."""
        weight = self.flow.weight(eqn) if self.flow is not None else None
        return self.flow.origin(eqn.invars[weight]).path if self.flow and weight is not None else ""

    def _why_no_history(self, eqn: Eqn) -> str:
        if scopes.is_transposed(eqn):
            return "inside a derivative"
        is_kept = self.given is not None and self.given.keeps_history
        return "" if is_kept else "inside a branch, a while loop or a shard_map"

    def _why_not(
        self, eqn: Eqn, weight: int | None, path: str, recipe: Recipe, rule: str | None
    ) -> str:
        if weight is None:
            return _no_weight(self.flow, eqn)
        if eqn.primitive.name != "dot_general":
            return "a convolution"
        sizes = _sizes(eqn, weight)
        if sizes[0] % recipe.block_size:
            why = f"it adds up {sizes[0]}, which blocks of {recipe.block_size} do not divide"
            if rule is not None and not matches(rule, _ANY_PATH):
                _refuse_blocks(eqn, why, recipe, rule, path)
            return why
        if rule is not None:  # a user's rule overrules the defaults below
            return ""
        if self.given is not None and path in self.given.tables:
            return f"{path or 'the weight'} is a table that rows are taken from"
        if place := self._place(eqn, path):
            return place
        if any(size % MULTIPLE for size in sizes) or math.prod(sizes) < SMALLEST:
            return f"its weight is small or odd: {sizes[0]} x {sizes[1]}"
        return ""

    def _place(self, eqn: Eqn, path: str) -> str:
        """Returns why a product of the first or last layer is not quantised, empty for others."""
        flow, given = self.flow, self.given
        if flow is None or given is None:
            return ""
        if scopes.is_transposed(eqn):
            return "the derivative of the first or last layer" if path in given.unplaced else ""
        if layers.is_first(eqn, flow):
            return "the first layer"
        return "the last layer" if layers.is_last(eqn, flow) else ""


def _recipe(
    policy: scopes.Policies, scope: tuple[str, ...], path: str
) -> tuple[Recipe | None, str | None]:
    """Returns the recipe for a product, and the pattern of the map's rule that chose it or None."""
    chosen: Any = policy
    rule = None
    if not isinstance(policy, Policy):
        spellings = of_operation(scope)
        named = spellings if isinstance(spellings, tuple) else (spellings,)
        index = policy.deciding((*named, path) if path else named)
        rule, chosen = (None, policy.default) if index is None else policy.rules[index]
    recipe = chosen.recipe if isinstance(chosen, QuantizedPolicy) else None
    return recipe, rule


def _refuse_blocks(eqn: Eqn, why: str, recipe: Recipe, rule: str, path: str) -> None:
    """Refuses a rule for a layer whose length is no multiple of the block size.

    A pattern that matches everything does not ask for this layer: its product stays in 16 bits.
    """
    if scopes.is_transposed(eqn):
        return  # a gradient's product of another length stays in 16 bits
    got = f"rule {rule!r} asks for {recipe}, and the product of {path or 'a weight'} has none:"
    where = f"autocast, {scopes.location(eqn)}"
    fix = f"Type {{{rule!r}: 'float8_from_mixed_bfloat16'}}, whose scales need no blocks, or "
    fix += "another policy for this path before the rule."
    raise ValueError(message(where, got, f"{why}.", fix))


def _roles(eqn: Eqn, weight: int) -> Any:
    """Returns the roles of a product's operands and result.

    A product with a weight in a derivative taken inside the function is a dgrad: its other operand
    is a cotangent, and its result the cotangent of the input.
    """
    if scopes.is_transposed(eqn):
        other, result = ArrayRole.RESULT, ArrayRole.INPUT
    else:
        other, result = ArrayRole.INPUT, ArrayRole.RESULT
    return (ArrayRole.WEIGHT, other, result) if weight == 0 else (other, ArrayRole.WEIGHT, result)


def _sizes(eqn: Eqn, weight: int) -> tuple[int, int]:
    """Returns the contracted length of a product, and the number of columns of its weight."""
    contracted, _ = eqn.params["dimension_numbers"]
    shape = eqn.invars[weight].aval.shape
    summed = math.prod(shape[i] for i in contracted[weight])
    return summed, math.prod(free_axes(eqn, weight))


def _no_weight(flow: DataFlow | None, eqn: Eqn) -> str:
    made = [flow.origin(v).made for v in eqn.invars[:2]] if flow is not None else []
    if Made.CONSTANTS in made:
        return "an operand is a constant"
    if all(m is Made.PARAMETERS for m in made):
        return "both operands are parameters"
    return "neither operand is a parameter"


def _said(recipe: Recipe, path: str, lost: str) -> str:
    scales = {"tensor": "one scale each", "channel": "a scale a row"}
    each = scales.get(recipe.granularity, f"a scale for {recipe.block_size} values")
    if recipe.has_history:
        each = f"of the values at hand, {lost}" if lost else "scales of earlier steps"
    left = [name for name, pair in recipe.products.items() if pair is None]
    rest = f", not {' and '.join(left)}" if left else ""
    pattern = re.sub(r"\d+", "*", path) or "an argument"  # so that alike layers share a line
    return f"{type(recipe).__name__}, {each}{rest}: {pattern}"


def prepared(jaxpr: Jaxpr, settings: Any, paths: Callable[[], list[str | None]]) -> Any:
    """Returns the settings for a whole function, with the origins of its arrays.

    Args:
      jaxpr: the function, open.
      settings: of its plan.
      paths: returns, for each array, its path if it is a parameter, else None.
    """
    if not quantizes(settings.policy):
        return settings
    return replace(settings, given=layers.whole(jaxpr, origins(paths())))


def widened(args: Any, policy: scopes.Policies) -> Any:
    """Returns arguments with 16-bit parameters widened to float32.

    Autocast only decides about float32 values. Widening is exact, and a product that rounds the
    value to 16 bits again gets the same bits.
    """
    default = policy if isinstance(policy, Policy) else policy.default
    narrow = default.param_dtype
    if not quantizes(policy) or narrow.itemsize >= FLOAT32.itemsize:
        return args

    def widen(leaf: Any) -> Any:
        is_narrow = isinstance(leaf, (jax.Array, np.ndarray)) and leaf.dtype == narrow
        return leaf.astype(FLOAT32) if is_narrow else leaf

    return jax.tree.map(widen, args, is_leaf=lambda x: isinstance(x, stateful.object_types()))


def warn_if_nothing(plan: Any) -> None:
    """Warns if a policy has a recipe and no product of a function is quantised."""
    if not quantizes(plan.settings.policy):
        return
    decisions = [decision for decision, _ in products(plan)]
    if any(d.how is not None for d in decisions):
        return
    counts = collections.Counter(f"{scopes.location(d.eqn)}: {d.reason.text}" for d in decisions)
    rows = [f"{row}{f' (×{n})' if n > 1 else ''}" for row, n in list(counts.items())[:8]]
    text = message(
        "autocast",
        f"{plan.settings.policy} quantises no product of this function.",
        *(rows or ["It has no products."]),
        f"Type {map_to_type(plan.settings.policy, 'mlp*')} for a layer by its path, "
        "or autocast(fun, policy, params=...) where other arguments are parameters.",
    )
    warn(text)


def weights(given: Given | None) -> list[str]:
    """Returns the paths of a function's parameters; an argument that is one array has path ''."""
    return [] if given is None else [o.path for o in given.inputs if o.made is Made.PARAMETERS]


def origins(paths: list[str | None]) -> tuple[Origin, ...]:
    """Returns the origins of arrays, given a path for each parameter and None for others."""
    return tuple(layers.INPUT if path is None else Origin(Made.PARAMETERS, path) for path in paths)


def shown_dtype(config: Config) -> Any:
    """Returns the dtype that `explain` shows for a product: that of its first operand."""
    return config.direction(config.roles).dtype(config.roles[0])
