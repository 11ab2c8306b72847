"""`quantize`: weights in 8 bits for inference, chosen by a policy."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from mpjax._autocast.eight_bits.quantized import MULTIPLE, SMALLEST
from mpjax._autocast.product import scaled
from mpjax._base.errors import message, warn
from mpjax._base.foreign_keywords import QUANTIZE
from mpjax._base.keywords import names_keywords
from mpjax._base.quantized_array import QuantizedArray, is_quantized
from mpjax._base.tree import is_array, is_castable, is_overwritten, leaf_paths
from mpjax._base.typing import PolicySpec
from mpjax._policies.order import refuse_policy_first
from mpjax._policies.policy import chosen_policy
from mpjax._policies.policy_map import PolicyMap
from mpjax._policies.quantized_policy import QuantizedPolicy, map_to_type, recipes_in
from mpjax._policies.recipes import DTYPES, Recipe
from mpjax._weights import attention_kernels as attention

_WHERE = "quantize"


@names_keywords(QUANTIZE)
def quantize(params: Any, policy: PolicySpec, *, channel_axis: int = -1) -> Any:
    """Returns `params` with weights in 8 bits: a quarter of the memory, for inference.

    A weight is an array of two axes or more, of 4096 elements at least and with sizes that divide
    by 16. Its last two axes are the matrix, those in front a stack of layers or experts; kernels of
    Flax's attention, which have an axis of heads, are found by their names and shapes. Other arrays
    stay as they are, and so do paths that a `PolicyMap` gives another policy. Exclude tables that
    rows are gathered from that way: they would be widened to float32 as a whole.

    Args:
      params: any pytree.
      policy: its recipe names the dtype, that of weights in `fprop`. A rule of a `PolicyMap`
        includes small weights, too.
      channel_axis: the axis of output channels, each of which has a scale: a product does not sum
        over it. -1 for kernels of Flax and Haiku, -2 for those of Equinox and PyTorch. For Flax's
        attention it is known.

    Returns:
      A tree with a `QuantizedArray` in place of each weight, which `autocast`, `cast_to_compute`
      and `dequantize` understand.

    Raises:
      ValueError: the policy has no recipe, one with blocks, or one without `fprop`.
      TypeError: `policy` is no policy.

    Warns:
      PolicyWarning: `params` has no weight that can be quantised.

    Dtypes:
      int8 or float8 with float32 scales; the rest as it is.

    Transforms:
      jit, vmap.

    Example:
      >>> params = {"w": jnp.ones((64, 128)), "b": jnp.ones(128)}
      >>> small = mpjax.quantize(params, "int8_from_mixed_bfloat16")
      >>> small["w"].values.dtype, small["b"].dtype
      (dtype('int8'), dtype('float32'))
      >>> run = mpjax.autocast(lambda params, x: x @ params["w"] + params["b"], "bf16-mixed")
      >>> run(small, jnp.ones((8, 64))).dtype
      dtype('float32')

    References:
      Jacob et al., Quantization and Training of Neural Networks, 2018, https://arxiv.org/abs/1712.05877
    """
    refuse_policy_first(params, policy, _WHERE, "params")
    checked = chosen_policy(policy, _WHERE)
    _check(checked, channel_axis)
    leaves, treedef = jax.tree.flatten(params, is_leaf=is_quantized)
    keyed = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_quantized)
    paths = leaf_paths(jax.tree.unflatten(treedef, [0] * len(leaves)))
    if isinstance(checked, PolicyMap):
        checked.warn_unused(paths, _WHERE)
    summed = attention.summed_axes(dict(zip(paths, leaves, strict=True)))
    chosen = [
        leaf
        if is_overwritten(key)
        else _quantized(leaf, path, checked, summed.get(path, (-3 - channel_axis,)))
        for path, (key, leaf) in zip(paths, keyed, strict=True)
    ]
    if not any(map(is_quantized, chosen)):
        _warn(paths, leaves, checked)
    return jax.tree.unflatten(treedef, chosen)


def _quantized(leaf: Any, path: str, policy: Any, summed: tuple[int, ...]) -> Any:
    """Returns a leaf in 8 bits, if it is a weight: `summed` are the axes that products add up."""
    index = policy.deciding(path) if isinstance(policy, PolicyMap) else None
    mine = policy.policy_for(path) if isinstance(policy, PolicyMap) else policy
    if not isinstance(mine, QuantizedPolicy) or not is_array(leaf) or not is_castable(leaf):
        return leaf
    asked_for = index is not None
    if leaf.ndim < 2 or not (asked_for or _is_weight(leaf.shape, summed)):
        return leaf
    dtype = jnp.dtype(DTYPES[(mine.recipe.products["fprop"] or ("int8", "int8"))[1]])
    # Each channel has a scale, also in float8, where one a matrix would be 0 for channels that are
    # 10⁶ smaller. Axes in front of the matrix are those of stacks: layers of a scan, experts.
    axes = tuple(sorted(axis % leaf.ndim for axis in summed))
    in_8_bits = scaled.quantize(jnp.asarray(leaf), dtype, axes, mine.recipe.margin)
    return QuantizedArray(in_8_bits.values, in_8_bits.scale)


def _matrix(summed: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the last axes of a weight, its matrix: those that are added up, and the channels."""
    return tuple(range(min(-2, *summed), 0))


def _is_weight(shape: tuple[int, ...], summed: tuple[int, ...]) -> bool:
    depth = math.prod(shape[axis] for axis in summed)
    size = math.prod(shape[axis] for axis in _matrix(summed))
    return not depth % MULTIPLE and not (size // max(depth, 1)) % MULTIPLE and size >= SMALLEST


def _check(policy: Any, channel_axis: Any) -> None:
    recipes = recipes_in(policy)
    if not recipes:
        fix = "Type mpjax.quantize(params, 'int8_from_mixed_bfloat16')."
        raise ValueError(message(_WHERE, f"{policy} has no recipe.", fix))
    for recipe in recipes:
        _check_recipe(recipe)
    if channel_axis not in (-1, -2):
        got = f"got {channel_axis!r}."
        fix = "Type -1 for kernels of Flax and Haiku, -2 for Equinox's."
        raise ValueError(message(f"{_WHERE}(channel_axis=)", got, "Allowed: -1, -2.", fix))


def _check_recipe(recipe: Recipe) -> None:
    fix = "Type mpjax.QuantizedPolicy('bf16-mixed', 'int8'), or 'float8'."
    if recipe.fprop is None:
        raise ValueError(message(_WHERE, f"{recipe} leaves the forward product.", fix))
    if recipe.block_size > 1:
        got = f"{recipe} has a scale for each {recipe.block_size} values; weights are stored with "
        got += "one for each channel."
        raise ValueError(message(_WHERE, got, fix))


def _warn(paths: list[str], leaves: list[Any], policy: Any) -> None:
    shown = [f"{p}: {list(x.shape)}" for p, x in zip(paths, leaves, strict=True) if is_array(x)]
    text = message(
        _WHERE,
        "there is no weight to quantise: two axes, 4096 elements, sizes that divide by 16.",
        *shown[:8],
        f"Name smaller ones: {map_to_type(policy, 'head/*')}.",
    )
    warn(text)
