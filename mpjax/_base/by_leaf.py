"""Reductions of each leaf of a tree to a number; on a GPU one kernel reduces several leaves.

XLA gives each leaf kernels of its own: two for a weight and one for a bias, of hundreds. A kernel
that reduces a bias takes no time but that of being started. A `lax.reduce` of several arrays is one
kernel where the arrays have one shape.

A program that XLA splits over devices reduces each leaf alone: XLA would gather each array for a
`lax.reduce` of several (JAX 0.10 to 0.12, 16 all-gathers for 24 leaves and no other collective).
Only a lowering rule knows, and so the reduction is a primitive.
"""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching, mlir

from mpjax._base import compat
from mpjax._base.own_primitives import GPUS, own_primitive
from mpjax._base.typing import Array, KeyPath

# On an H100 a step of ViT-B/16 has 1346 kernels with 1 leaf in each, 955 with 4 and 900 with 8, of
# which 8 take a fifth longer to compile (XLA of JAX 0.12).
_MOST = 4


class Reduction(NamedTuple):
    """How an array becomes a number: by itself, and as one operation on several arrays."""

    alone: Callable[[Array], Array]
    of_element: Callable[[Array], Array]
    combine: Callable[[Array, Array], Array]
    start: bool | float


def reduced(how: Reduction, leaves: Sequence[tuple[KeyPath, Any]]) -> list[Array]:
    """Returns the number of each leaf.

    On GPUs leaves are reduced together whose paths differ in numbers alone, as those of like
    layers.
    """
    arrays = [jnp.asarray(x) for _, x in leaves]
    if not arrays:
        return []
    return _reduced_p.bind(*arrays, how=how, groups=_alike([path for path, _ in leaves], arrays))


def _alike(paths: Sequence[KeyPath], arrays: Sequence[Array]) -> tuple[tuple[int, ...], ...]:
    """Returns the places of leaves that one kernel may reduce, at most `_MOST` in each list."""
    groups: dict[Any, list[list[int]]] = {}
    for place, (path, x) in enumerate(zip(paths, arrays, strict=True)):
        may_join = x.ndim and jnp.issubdtype(x.dtype, jnp.floating)
        name = re.sub(r"\d+", "", jax.tree_util.keystr(path))
        of_kind = groups.setdefault((name, jax.typeof(x)) if may_join else place, [[]])
        if len(of_kind[-1]) == _MOST:
            of_kind.append([])
        of_kind[-1].append(place)
    return tuple(tuple(places) for of_kind in groups.values() for places in of_kind)


def _apart(*arrays: Array, how: Reduction, **_: Any) -> list[Array]:
    return [how.alone(x) for x in arrays]


def _together(*arrays: Array, how: Reduction, groups: Sequence[Sequence[int]]) -> list[Array]:
    numbers: dict[int, Array] = {}
    for places in groups:
        numbers |= zip(places, _at_once(how, [arrays[i] for i in places]), strict=True)
    return [numbers[i] for i in range(len(arrays))]


def _at_once(how: Reduction, arrays: list[Array]) -> Sequence[Array]:
    """Returns the numbers of arrays of one shape and dtype, by one operation."""
    if len(arrays) == 1:
        return [how.alone(arrays[0])]
    values = [how.of_element(x) for x in arrays]
    start = np.asarray(how.start, values[0].dtype)

    def combine(left: Sequence[Array], right: Sequence[Array]) -> tuple[Array, ...]:
        return tuple(map(how.combine, left, right))

    return jax.lax.reduce(values, [start] * len(values), combine, range(values[0].ndim))


# -- the primitive -------------------------------------------------------------------------------

_reduced_p = own_primitive("reduced_leaves", computes=True, several=True)
_reduced_p.def_impl(_apart)


@_reduced_p.def_abstract_eval
def _abstract(*avals: Any, how: Reduction, **_: Any) -> list[Any]:
    numbers = (jax.core.ShapedArray((), _dtype(how.alone, x.shape, x.dtype)) for x in avals)
    return list(map(compat.like_varying, numbers, avals))


@functools.cache
def _dtype(reduce: Callable[[Array], Array], shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.eval_shape(reduce, jax.ShapeDtypeStruct(shape, dtype)).dtype


def _lower(ctx: Any, *args: Any, **params: Any) -> Any:
    return mlir.lower_fun(_apart, multiple_results=True)(ctx, *args, **params)


def _lower_on_gpu(ctx: Any, *args: Any, **params: Any) -> Any:
    if not compat.is_for_one_device(ctx):
        return _lower(ctx, *args, **params)
    return mlir.lower_fun(_together, multiple_results=True)(ctx, *args, **params)


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    given = tuple(map(ad.instantiate_zeros, tangents))
    return jax.jvp(lambda *arrays: _apart(*arrays, **params), tuple(primals), given)


def _batch(arrays: Any, dims: Any, *, how: Reduction, **_: Any) -> Any:
    maps = [jax.vmap(how.alone, d) if compat.is_batched(d) else how.alone for d in dims]
    numbers = [fun(x) for fun, x in zip(maps, arrays, strict=True)]
    return numbers, [0 if compat.is_batched(d) else d for d in dims]


ad.primitive_jvps[_reduced_p] = _jvp
batching.primitive_batchers[_reduced_p] = _batch
mlir.register_lowering(_reduced_p, _lower)
for _platform in GPUS:
    mlir.register_lowering(_reduced_p, _lower_on_gpu, platform=_platform)
