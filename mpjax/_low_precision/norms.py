"""Global norms of gradients that neither overflow nor underflow, and clipping by them."""

import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from mpjax._base import compat
from mpjax._base.described import described
from mpjax._base.dtypes import FLOAT32, describe
from mpjax._base.errors import PolicyWarning, message
from mpjax._base.foreign_keywords import AXIS, NORM
from mpjax._base.keywords import names_keywords
from mpjax._base.tree import check_axes, is_array, is_floating, to_full
from mpjax._base.typing import Array, AxisName, PyTree
from mpjax._scaling.slips import refuse_scaled

# Squares of values between 2⁻⁴⁸ and 2⁴⁸ are safe, also a billion of them; larger and smaller values
# are scaled first, and summed apart. That is one pass; scaling by the largest takes two.
_EDGE = 2.0**48
_SHIFT = 2.0**80


class _Scaled(NamedTuple):
    """A norm, `value * factor`, that float32 need not hold."""

    value: Array
    factor: Array  # f32[], 2⁻⁸⁰, 1 or 2⁸⁰


@names_keywords(AXIS)
def global_norm(tree: PyTree, *, axis_name: AxisName = None) -> Array:
    """Returns the Euclidean norm of all numbers in a tree, in float32.

    Squares are summed in float32, in three classes of size. So no square and no sum overflows or
    underflows unless the norm itself does.

    Args:
      tree: arrays of real floating dtypes; others, and None, do not count.
      axis_name: axis, or axes, of `shard_map` over which leaves are split: squares of a leaf whose
        type varies over one are summed over its devices. None for the norm of the shard.

    Returns:
      f32[]; NaN if a number is NaN, else inf if one is.

    Raises:
      NameError: `axis_name` is no axis of the surrounding `shard_map`.
      ValueError: the tree are gradients as `value_and_grad` returned them for an optimizer in
        `with_loss_scale`, times its scale. Or `shard_map` does not track types
        (`check_vma=False`), so that nothing tells a shard from a copy.

    Dtypes:
      Any floating dtype; float64 is taken in float32.

    Transforms:
      jit, grad, vmap, scan, shardings, shard_map. The gradient at 0 is 0.

    Example:
      >>> float(mpjax.optim.global_norm({"w": jnp.full(4, 1e30, jnp.bfloat16)})) < 2.1e30
      True

    References:
      Blue, A Portable Fortran Program to Find the Euclidean Norm of a Vector, 1978
    """
    refuse_scaled(tree, "global_norm")
    value, factor = _norm(tree, axis_name, "global_norm")
    return value * factor


@names_keywords(NORM)
def clip_by_global_norm(
    max_norm: float, *, axis_name: AxisName = None
) -> optax.GradientTransformation:
    """Returns optax's `clip_by_global_norm` for gradients of any size and dtype.

    A norm beyond float32 clips too. Gradients within the norm are not changed. A NaN makes all
    gradients NaN, and an inf becomes NaN, as in optax: put clipping inside `with_loss_scale`, which
    skips such a step.

    Args:
      max_norm: the largest norm that passes, positive.
      axis_name: axis, or axes, of `shard_map` over which leaves are split, as in `global_norm`.

    Raises:
      ValueError: `max_norm` is not positive; in `update`, gradients are still scaled, or
        `shard_map` does not track types where `axis_name` is given.
      PolicyWarning: without `axis_name`, gradients differ by device.

    Dtypes:
      Gradients keep theirs; the arithmetic is float32.

    Transforms:
      jit, grad, scan, shardings, as `global_norm`.

    Example:
      >>> tx = mpjax.optim.clip_by_global_norm(1.0)
      >>> grads = {"w": jnp.full(4, 6e4, jnp.float16)}  # its square overflows
      >>> tx.update(grads, tx.init(grads))[0]
      {'w': Array([0.5, 0.5, 0.5, 0.5], dtype=float16)}
    """
    _check_max_norm(max_norm)

    def update(updates: PyTree, state: Any, params: PyTree | None = None) -> tuple[PyTree, Any]:
        del params
        refuse_scaled(updates, "clip_by_global_norm")
        if axis_name is None:
            _warn_of_shards(updates)
        value, factor = _norm(updates, axis_name, "clip_by_global_norm")
        limit = jnp.asarray(max_norm, FLOAT32)
        # The norm is `value * factor`, which float32 may not hold: compare without it.
        inverse = jnp.where(factor > 1, 1 / _SHIFT, jnp.where(factor < 1, _SHIFT, 1.0))
        within = jnp.where(factor > 1, value < limit * inverse, value * factor < limit)
        divisor = jnp.where(value == 0, 1.0, value)  # or the derivative of no gradients were NaN

        def clip(g: Any) -> Any:
            if not is_floating(g):
                return g
            # Not `/ factor`: XLA would make of `x / a / b` a division by `a * b`, which overflows.
            clipped = to_full(g).astype(FLOAT32) * inverse / divisor * limit
            return jnp.where(within, g, clipped.astype(g.dtype))

        return jax.tree.map(clip, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _warn_of_shards(updates: PyTree) -> None:
    """Warns where each device has other gradients, and would clip by a norm of its own."""
    arrays = filter(is_array, jax.tree.leaves(updates))
    axes = sorted({str(name) for x in arrays for name in compat.varying_axes(x)})
    if axes:
        got = f"each device of {', '.join(map(repr, axes))} has other gradients"
        got += ", and clips by the norm of its own."
        names = repr(axes[0]) if len(axes) == 1 else repr(tuple(axes))
        fix = f"Type clip_by_global_norm(..., axis_name={names}) for the norm of all"
        fix += ", or axis_name=() if each device trains a model of its own."
        warnings.warn(message("clip_by_global_norm", got, fix), PolicyWarning, stacklevel=4)


def _check_max_norm(max_norm: Any) -> None:
    where = "clip_by_global_norm(max_norm)"
    is_number = isinstance(max_norm, (int, float)) and not isinstance(max_norm, bool)
    if not (is_number or (is_array(max_norm) and max_norm.ndim == 0)):
        got = f"must be a number; got {described(max_norm)}."
        fix = "It is a part of the optimizer: "
        fix += "optax.chain(mpjax.optim.clip_by_global_norm(1.0), optax.adam(1e-3))."
        raise TypeError(message(where, got, fix))
    if is_number and not max_norm > 0:
        got = f"must be positive; got {max_norm!r}."
        raise ValueError(message(where, got, "Type, for example, 1.0."))


def _norm(tree: PyTree, axis_name: AxisName, where: str) -> _Scaled:
    leaves = [x for x in jax.tree.leaves(tree) if is_floating(x)]
    for x in jax.tree.leaves(tree):
        if not (is_array(x) or isinstance(x, (int, float))):
            got = f"a leaf is no array; got {described(x)}."
            raise TypeError(message(where, got, "Give a pytree of arrays, such as gradients."))
        if is_array(x) and jnp.issubdtype(x.dtype, jnp.complexfloating):
            got = f"a leaf is complex; got {describe(x)}."
            raise TypeError(message("global_norm", got, "Give its real and imaginary parts."))
    names = _tracked(axis_name, where)
    zero = jnp.zeros((), FLOAT32)
    sums: dict[tuple[object, ...], list[Array]] = {(): [zero, zero, zero]}  # by the axes of parts
    for x in leaves:
        axes = tuple(name for name in names if name in compat.varying_axes(x))
        before = sums.get(axes, [zero, zero, zero])
        squares = _squares(to_full(x).astype(FLOAT32))
        sums[axes] = [a + b for a, b in zip(before, squares, strict=True)]
    total = sums.pop(())
    for axes, parts in sums.items():
        total = [a + b for a, b in zip(total, jax.lax.psum(parts, axes), strict=True)]
    return _root(total)


def _tracked(axis_name: AxisName, where: str) -> tuple[object, ...]:
    """Returns the axes, over which types have to tell which leaves are split."""
    check_axes(axis_name, where)
    names = compat.axis_names(axis_name)
    for name in names:
        if not compat.tracks_varying(name):
            got = f"got {name!r}, over which no types tell a shard from a copy."
            fix = "Type jax.shard_map(..., check_vma=True), which is JAX's default."
            raise ValueError(message(f"{where}(axis_name)", got, fix))
    return names


def _root(sums: list[Array]) -> _Scaled:
    """Returns the norm, given the sums of `_squares`."""
    large, middle, small = sums
    # XLA would make 2⁻¹⁶⁰, which is 0, of a root that is scaled and squared.
    scaled = (_sqrt(x) * (1 / _SHIFT) for x in (middle, small))
    middle_root, small_root = jax.lax.optimization_barrier(tuple(scaled))
    huge = _sqrt(large + jnp.square(middle_root))
    usual = _sqrt(middle + jnp.square(small_root))
    # NaN is neither large nor small: it is summed with the middling values, and stays NaN.
    is_huge, is_usual = large > 0, middle != 0
    value = jnp.where(is_huge, huge, jnp.where(is_usual, usual, _sqrt(small)))
    factor = jnp.where(is_huge, _SHIFT, jnp.where(is_usual | (value == 0), 1.0, 1 / _SHIFT))
    return _Scaled(jnp.where(jnp.isnan(middle), middle, value), factor)


def _sqrt(x: Array) -> Array:
    """Returns the square root. At 0 its derivative is 0: `jnp.sqrt` has inf, times 0 is NaN."""
    is_zero = x == 0
    return jnp.where(is_zero, 0.0, jnp.sqrt(jnp.where(is_zero, 1.0, x)))


def _squares(x: Array) -> list[Array]:
    """Returns the sums of squares of large, middling and small values, scaled."""
    size = jnp.abs(x)
    is_large, is_small = size >= _EDGE, size < 1 / _EDGE

    def total(pick: Array, scale: float) -> Array:
        return jnp.sum(jnp.square(jnp.where(pick, x, 0.0) * scale))

    return [
        total(is_large, 1 / _SHIFT),
        total(~(is_large | is_small), 1.0),
        total(is_small, _SHIFT),
    ]
