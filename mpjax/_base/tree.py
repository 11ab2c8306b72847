"""Pytrees: which leaves are castable, casting and selecting them, finiteness, readable paths."""

import collections
import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeGuard, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._base import compat
from mpjax._base.by_leaf import Reduction, reduced
from mpjax._base.dtypes import FLOAT32, FLOAT64, POLICY_DTYPES, DType, describe, require_x64
from mpjax._base.errors import message
from mpjax._base.foreign_keywords import AXIS
from mpjax._base.keywords import names_keywords
from mpjax._base.quantized_array import holds_quantized, is_quantized
from mpjax._base.typing import Array, AxisName, KeyPath, PyTree, ScalarLike

T = TypeVar("T")

OVERWRITE_WITH_GRADIENT = "_overwrite_with_gradient"
"""Flax's collection of float8 scales and histories: their "gradient" is their next value."""
RECORDED = "_recorded_amax"
"""Inside that: the largest values of products' operands, which are joined by maximum."""

_CASTABLE = frozenset(POLICY_DTYPES.values())
_NUMPY = (np.ndarray, np.generic)
_NUMBERS = (bool, int, float, complex)
_VALUE = (jax.tree_util.GetAttrKey("value"),)


def is_array(x: object) -> TypeGuard[Array]:
    """Whether `x` is an array to JAX, with a type of its own; Python scalars have none."""
    return isinstance(x, (jax.Array, *_NUMPY))


def is_array_or_shape(x: object) -> TypeGuard[Any]:
    """Whether `x` is an array to JAX, or a `jax.ShapeDtypeStruct`, the shape of one."""
    return is_array(x) or isinstance(x, jax.ShapeDtypeStruct)


def is_floating(x: Any) -> bool:
    """Whether `x` is an array of real floating numbers."""
    return is_array(x) and jnp.issubdtype(x.dtype, jnp.floating)


def is_deleted(x: Any) -> bool:
    """Whether `x` is an array of JAX whose memory was donated or freed."""
    return isinstance(x, jax.Array) and compat.has_values(x) and x.is_deleted()


def strong(x: Any) -> Any:
    """Returns a number or array as a strongly typed array, so that a later step is not retraced."""
    is_number = isinstance(x, _NUMBERS)
    return jax.lax.convert_element_type(x, jnp.result_type(x)) if is_number or is_array(x) else x


def jax_dtype(x: Any) -> Any:
    """Returns the dtype that JAX gives `x`: NumPy's float64 is float32 with 64-bit types off.

    So is the float64 of a `ShapeDtypeStruct`, which may stand for an array of either library.
    """
    known = isinstance(x, jax.Array)
    return x.dtype if known else jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True)


def is_castable(x: Any) -> bool:
    """Whether a policy may move `x`: an array or `ShapeDtypeStruct` of one of a policy's dtypes.

    Integers, booleans, PRNG keys, complex values, 8-bit floats, Python scalars (weakly typed:
    they adopt the dtype of what they meet) and everything that is no array are left alone.
    """
    return is_array_or_shape(x) and x.dtype in _CASTABLE


def path_str(path: KeyPath) -> str:
    """Returns a leaf's path as users write it: 'encoder/norm_0/scale', list indices as parts."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def is_overwritten(path: KeyPath) -> bool:
    """Whether a leaf lies in Flax's `_overwrite_with_gradient`, which is never cast or scaled."""
    parts = (getattr(key, "key", getattr(key, "name", None)) for key in path)
    return OVERWRITE_WITH_GRADIENT in parts


def is_recorded(path: KeyPath) -> bool:
    """Whether a leaf records products' largest values, which devices join by maximum."""
    return RECORDED in (getattr(key, "key", None) for key in path)


def map_with_path(fun: Callable[..., Any], tree: T, *rest: PyTree) -> T:
    """Returns `tree` with `fun(path, leaf, *leaves)` for each leaf outside overwritten ones."""

    def apply(path: KeyPath, leaf: Any, *others: Any) -> Any:
        return leaf if is_overwritten(path) else fun(path, leaf, *others)

    return jax.tree_util.tree_map_with_path(apply, tree, *rest)


def leaf_paths(tree: PyTree) -> list[str]:
    """Returns the paths of the leaves of `tree`, in order.

    The trailing `value` of an NNX variable is not part of its path. To JAX it is an attribute
    like any other. But a variable has no second one, unlike a module with a `query`, a `key` and
    a `value`.
    """
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    below = collections.Counter(path[:end] for path in paths for end in range(len(path)))

    def is_variable(path: KeyPath) -> bool:
        return path[-1:] == _VALUE and below[path[:-1]] == 1

    whole = _quantized_paths(tree)
    return [
        path_str(path[:-1] if path[:-1] in whole or is_variable(path) else path) for path in paths
    ]


def _quantized_paths(tree: PyTree) -> frozenset[KeyPath]:
    """Returns the paths of arrays in 8 bits: their values and scales go by one path."""
    if not holds_quantized(tree):
        return frozenset()
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_quantized)
    return frozenset(path for path, x in leaves if is_quantized(x))


def cast_leaf(x: Any, dtype: DType, *, move_float64: bool) -> Any:
    """Returns `x` in `dtype` if it may move there, else `x` itself."""
    if not is_castable(x):
        return x
    have = jax_dtype(x)
    if have == FLOAT64 != dtype and not move_float64:
        return x
    if x.dtype == dtype:
        return x  # no operation in the jaxpr, not even for a weakly typed array
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.update(dtype=dtype, weak_type=False)
    if isinstance(x, _NUMPY):
        # Twice, so that a NumPy float64 rounds as JAX would: to float32 first. An overflow to
        # inf is what JAX gives; NumPy would warn of it.
        with np.errstate(over="ignore", under="ignore"):
            return x.astype(have, copy=False).astype(dtype)
    return x.astype(dtype)


def cast_tree(tree: T, dtype: DType, *, move_float64: bool, where: str) -> T:
    """Returns `tree` with its castable leaves in `dtype`.

    Args:
      tree: any pytree.
      dtype: one of a policy's dtypes.
      move_float64: whether float64 leaves move too: a policy that names float64 means them.
      where: the function in whose name an error speaks.

    Raises:
      ValueError: `dtype` is float64 and 64-bit types are off.
    """
    require_x64(dtype, where)
    if holds_quantized(tree):
        return _cast_quantized(tree, dtype, move_float64=move_float64, where=where)
    return map_with_path(lambda _, x: cast_leaf(x, dtype, move_float64=move_float64), tree)


def _cast_quantized(tree: T, dtype: DType, *, move_float64: bool, where: str) -> T:
    """Returns the cast tree, with plain arrays in place of `QuantizedArray`s, to compute with."""
    reads = where.endswith("cast_to_compute")

    def cast(path: KeyPath, x: Any) -> Any:
        if is_quantized(x):
            return x.dequantize(dtype) if reads else x
        return x if is_overwritten(path) else cast_leaf(x, dtype, move_float64=move_float64)

    return jax.tree_util.tree_map_with_path(cast, tree, is_leaf=is_quantized)


def to_full(x: Any) -> Any:
    """Returns a float16 or bfloat16 array in float32, anything else as it is."""
    return x.astype(FLOAT32) if is_castable(x) and x.dtype.itemsize < 4 else x


def distance(arrays: Sequence[Any], exact: Sequence[Any]) -> tuple[float, float]:
    """Returns two L2 norms over all arrays: of their differences from others, and of the others."""
    pairs = zip(arrays, exact, strict=True)
    off = sum(float(np.sum(np.abs(a - b) ** 2)) for a, b in pairs)
    whole = sum(float(np.sum(np.abs(b) ** 2)) for b in exact)
    return math.sqrt(off), math.sqrt(whole)


def leaves_finite(tree: PyTree, counted: Sequence[bool] | None = None) -> Array:
    """Returns, leaf by leaf, whether it holds neither inf nor NaN: bool[number of leaves].

    A leaf that is not `counted` counts as finite and is not read.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    counted = counted or [True] * len(leaves)
    flags: list[Any] = [True] * len(leaves)
    places = [i for i, (_, x) in enumerate(leaves) if counted[i] and is_inexact(x)]
    for i, flag in zip(places, reduced(_FINITE, [leaves[i] for i in places]), strict=True):
        flags[i] = flag
    return jnp.stack(list(map(jnp.asarray, flags))) if flags else jnp.ones((0,), jnp.bool_)


def is_inexact(x: Any) -> bool:
    """Returns whether something is a floating or a complex number or array, in any precision."""
    return isinstance(x, (float, complex)) or (is_array(x) and jnp.issubdtype(x.dtype, jnp.inexact))


def _finite(x: Array) -> Array:
    if not _is_foldable(x):
        return _all_finite(x)
    return jax.lax.platform_dependent(x, cpu=_all_finite_folded, default=_all_finite)


# `isfinite` and not a maximum of magnitudes, which would be cheaper still: on JAX 0.12 XLA:CPU's
# maximum of more than some thousand values passes over NaN.
def _all_finite(x: Array) -> Array:
    return jnp.all(jnp.isfinite(x))


def _all_finite_folded(x: Array) -> Array:
    """As above, for XLA:CPU, which would write all booleans out before it reduces them.

    Neighbours along the last axis are combined first, so that an eighth is written. The split
    stays within a shard.
    """
    flags = jnp.isfinite(x).reshape(*x.shape[:-1], -1, _FOLD)
    return jnp.all(functools.reduce(jnp.logical_and, (flags[..., i] for i in range(_FOLD))))


_FOLD = 8


def _is_foldable(x: Array) -> bool:
    """Whether folding pays; not under explicit sharding, where a reshape asks for its own."""
    if x.size < 4096 or x.shape[-1] % _FOLD:
        return False
    return compat.explicit_sharding(jax.typeof(x)) is None


_FINITE = Reduction(_finite, jnp.isfinite, jnp.logical_and, start=True)


def check_axes(axis_name: AxisName, where: str) -> None:
    """Raises NameError where one of the names is no axis of the surrounding transformation."""
    for name in compat.axis_names(axis_name):
        if not isinstance(name, Hashable):
            got = f"got {describe(name)} as the name of an axis."
            fix = "Type one tree, such as the pair (a, b), before it."
            raise TypeError(message(f"{where}(axis_name)", got, fix))
        try:
            jax.lax.axis_index(name)
        except NameError:
            got = f"{name!r} is no axis of the surrounding transformation."
            allowed = "Allowed: an axis of the mesh in shard_map, or axis_name of pmap or vmap."
            fix = "Type its name as it stands there; under jit with shardings leave it out."
            raise NameError(message(f"{where}(axis_name)", got, allowed, fix)) from None


def agree(pred: Array, axis_name: AxisName, where: str = "with_loss_scale") -> Array:
    """Returns whether `pred` is true on every member of the axes."""
    check_axes(axis_name, where)
    names = compat.axis_names(axis_name)
    if not names:
        return pred
    return jax.lax.pmin(compat.to_varying(pred.astype(jnp.int32), names), names) > 0


@names_keywords(AXIS)
def all_finite(tree: PyTree, axis_name: AxisName = None) -> Array:
    """Returns whether no leaf of `tree` holds an inf or a NaN.

    One pass over the leaves; a tree without floating leaves is finite.

    Args:
      tree: any pytree; leaves that are not floating or complex count as finite. Flax's
        `_overwrite_with_gradient` counts too: its gradient is its next value, and an inf would stay
        in it.
      axis_name: mapped axis, or several, of `shard_map`, `pmap` or `vmap`: true only if every
        member is finite.

    Returns:
      bool[], never synchronised with the host.

    Raises:
      NameError: `axis_name` is not an axis of the surrounding transformation.

    Dtypes:
      Any; each leaf is tested in its own dtype.

    Transforms:
      jit, vmap, scan, shard_map (`check_vma` on and off), pmap.

    Example:
      >>> mpjax.all_finite({"w": jnp.array([1.0, jnp.inf]), "n": jnp.arange(3)})
      Array(False, dtype=bool)
    """
    return agree(jnp.all(leaves_finite(tree)), axis_name, "all_finite")


@names_keywords()
def select_tree(pred: ScalarLike, a: T, b: T) -> T:
    """Returns `a` where `pred` is true and `b` where it is not, leaf by leaf.

    Both are computed: this chooses between values and saves no work. Use it to return the old
    parameters, or the old BatchNorm statistics, after a step that overflowed.

    Args:
      pred: boolean scalar, concrete or traced.
      a, b: trees of equal structure, shapes and dtypes. Leaves that are not arrays (strings,
        callables) must be equal in both.

    Returns:
      A tree like `a`.

    Raises:
      ValueError: `pred` is not a boolean scalar, or the trees differ; the message names the
        first path where they do.

    Dtypes:
      Unchanged; nothing is promoted, so a bfloat16 leaf against a float32 one is an error.

    Transforms:
      jit, vmap (also over `pred`), scan. Gradients go to the chosen tree only, never to `pred`.

    Example:
      >>> mpjax.select_tree(False, {"w": jnp.ones(2)}, {"w": jnp.zeros(2)})
      {'w': Array([0., 0.], dtype=float32)}

    References:
      Micikevicius et al., Mixed Precision Training, 2018, https://arxiv.org/abs/1710.03740
    """
    flag = as_pred(pred, "select_tree(pred)")
    if jax.tree.structure(a) != jax.tree.structure(b):
        raise ValueError(_structure_difference(a, b))
    return jax.tree_util.tree_map_with_path(functools.partial(_select_leaf, flag), a, b)


def as_pred(pred: ScalarLike, where: str) -> Array:
    """Returns `pred` as bool[], or raises ValueError."""
    if isinstance(pred, bool) or (is_array(pred) and pred.shape == () and pred.dtype == bool):
        return jnp.asarray(pred)
    fix = "Reduce it, e.g. `mpjax.all_finite(grads)` or `jnp.all(flags)`."
    raise ValueError(message(where, f"must be a boolean scalar; got {describe(pred)}.", fix))


def _select_leaf(pred: Array, path: KeyPath, a: Any, b: Any) -> Any:
    if not all(is_array(x) or isinstance(x, _NUMBERS) for x in (a, b)):
        if a is b or a == b:
            return a
        raise ValueError(_leaf_difference(path, repr(a), repr(b)))
    if np.shape(a) != np.shape(b) or jnp.result_type(a) != jnp.result_type(b):
        raise ValueError(_leaf_difference(path, describe(a), describe(b)))
    if getattr(a, "dtype", None) == jax.dtypes.float0:
        return a
    return jax.lax.select(pred, jnp.asarray(a), jnp.asarray(b))


def _leaf_difference(path: KeyPath, a: str, b: str) -> str:
    where = f"select_tree at {path_str(path)!r}" if path else "select_tree"
    fix = "Give both the same shape and dtype, e.g. `b.astype(a.dtype)`."
    return message(where, f"the trees differ; got {a} and {b}.", "Nothing is promoted.", fix)


def _structure_difference(a: PyTree, b: PyTree) -> str:
    return first_difference("select_tree", ("the first tree", a), ("the second", b))


def first_difference(
    where: str, first: tuple[str, PyTree], second: tuple[str, PyTree], fix: Sequence[str] = ()
) -> str:
    """Returns the message that two trees, each with its name, differ, and where first."""
    ours, theirs = leaf_paths(first[1]), leaf_paths(second[1])
    for here, there, name in ((ours, theirs, first[0]), (theirs, ours, second[0])):
        only = [path for path in here if path not in set(there)]
        if only:
            got = f"the trees differ; {only[0]!r} is only in {name}."
            return message(where, got, *fix)
    kinds = f"{type(first[1]).__name__} and {type(second[1]).__name__}"
    return message(where, f"the trees differ in their containers; got {kinds}.", *fix)
