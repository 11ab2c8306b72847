"""Reductions of each leaf of a tree to a number; on GPUs a kernel reduces several leaves.

XLA gives each leaf kernels of its own: two for a weight and one for a bias, of hundreds. A kernel
that reduces a bias takes no time but that of being started. A `lax.reduce` of several arrays is one
kernel where the arrays have one shape.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._base.typing import Array, KeyPath

# On an H100 a step of ViT-B/16 has 1346 kernels with 1 leaf in each, 955 with 4 and 900 with 8, of
# which 8 take a fifth longer to compile (XLA of JAX 0.12).
_MOST = 4


class Reduction(NamedTuple):
    """How an array becomes a number, for XLA to fuse as it likes, and as one operation."""

    whole: Callable[[Array], Array]
    of_element: Callable[[Array], Array]
    combine: Callable[[Array, Array], Array]
    start: bool | float
    on_cpu: Callable[[Array], Array] | None = None  # in place of `whole`


def reduced(how: Reduction, leaves: Sequence[tuple[KeyPath, Array]]) -> list[Array]:
    """Returns the number of each leaf.

    Leaves whose paths differ in numbers alone, such as those of like layers, are reduced together:
    they are sharded alike.
    """

    def each(reduce: Callable[[Array], Array]) -> Callable[..., list[Array]]:
        return lambda *arrays: [reduce(x) for x in arrays]

    def together(*arrays: Array) -> list[Array]:
        numbers: dict[int, Array] = {}
        for places in groups:
            numbers |= zip(places, _at_once(how, [arrays[i] for i in places]), strict=True)
        return [numbers[i] for i in range(len(arrays))]

    if not leaves:
        return []
    arrays = [jnp.asarray(x) for _, x in leaves]
    groups = _alike([path for path, _ in leaves], arrays)
    return jax.lax.platform_dependent(
        *arrays,
        cpu=each(how.on_cpu or how.whole),
        cuda=together,
        rocm=together,
        default=each(how.whole),
    )


def _alike(paths: Sequence[KeyPath], arrays: Sequence[Array]) -> list[list[int]]:
    """Returns the places of leaves that one kernel may reduce, at most `_MOST` in each list."""
    groups: dict[Any, list[list[int]]] = {}
    for place, (path, x) in enumerate(zip(paths, arrays, strict=True)):
        may_join = x.ndim and jnp.issubdtype(x.dtype, jnp.floating)
        name = re.sub(r"\d+", "", jax.tree_util.keystr(path))
        of_kind = groups.setdefault((name, jax.typeof(x)) if may_join else place, [[]])
        if len(of_kind[-1]) == _MOST:
            of_kind.append([])
        of_kind[-1].append(place)
    return [places for of_kind in groups.values() for places in of_kind]


def _at_once(how: Reduction, arrays: list[Array]) -> Sequence[Array]:
    """Returns the numbers of arrays of one shape and dtype, by one operation."""
    if len(arrays) == 1:
        return [how.whole(arrays[0])]
    values = [how.of_element(x) for x in arrays]
    start = np.asarray(how.start, values[0].dtype)

    def combine(left: Sequence[Array], right: Sequence[Array]) -> tuple[Array, ...]:
        return tuple(map(how.combine, left, right))

    return jax.lax.reduce(values, [start] * len(values), combine, range(values[0].ndim))
