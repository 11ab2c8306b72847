"""Translates a policy's recipes to rules of qwix, to serve with qwix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpjax._base.errors import message
from mpjax._policies import spelling
from mpjax._policies.policy import Policy
from mpjax._policies.quantized_policy import QuantizedPolicy
from mpjax._policies.recipes import DTYPES, Recipe


def qwix_rules(default: Policy, rules: Sequence[tuple[str, Policy]]) -> list[Any]:
    """Returns `qwix.QtRule`s; the first match wins, as in a `PolicyMap`.

    Raises:
      ImportError: qwix is not installed.
    """
    try:
        import qwix  # type: ignore[import-not-found,unused-ignore]  # optional peer
    except ImportError as error:
        text = message("to_qwix_rules", "qwix is not installed.", "Type pip install qwix.")
        raise ImportError(text) from error
    pairs = [*((spelling.module_regex(pattern), policy) for pattern, policy in rules)]
    return [qwix.QtRule(module_path=path, **fields(policy)) for path, policy in pairs] + [
        qwix.QtRule(**fields(default))
    ]


def fields(policy: Policy) -> dict[str, Any]:
    """Returns the fields of a rule of qwix; none for a policy without a recipe."""
    if not isinstance(policy, QuantizedPolicy):
        return {}
    recipe = policy.recipe
    forward = recipe.products["fprop"]
    if forward is None:
        return {}
    inputs, weights = forward
    rule: dict[str, Any] = {"weight_qtype": DTYPES[weights], "act_qtype": DTYPES[inputs]}
    if gradient := _gradient_dtype(recipe):
        rule["bwd_qtype"] = gradient
    if recipe.granularity == "tensor":
        rule["disable_channelwise_axes"] = True
    if recipe.block_size > 1:
        rule["tile_size"] = recipe.block_size
        rule["bwd_weight_grad_tile_size"] = recipe.block_size
    if recipe.margin:
        method = f"absmax,{2.0**recipe.margin:g}"
        names = ("weight_calibration_method", "act_calibration_method", "bwd_calibration_method")
        rule |= dict.fromkeys(names, method)
    return rule


def _gradient_dtype(recipe: Recipe) -> str | None:
    """Returns qwix's one dtype for the gradients of both products, None if a recipe has two."""
    both = [recipe.products[name] for name in ("dgrad", "wgrad")]
    dtypes = {pair[0] if pair else None for pair in both}
    (dtype,) = dtypes if len(dtypes) == 1 else (None,)
    return DTYPES[dtype] if dtype else None
