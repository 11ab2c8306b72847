"""Sets `unique_indices` of gathers by a permutation, `x[jnp.argsort(i)]`: cotangents stay low.

JAX's derivative of a gather sums the cotangents of an element that is read more than once, which
autocast does in float32. An index that sorts, or counts, names each place once: then no cotangent
is a sum.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

from mpjax._autocast.known import traits
from mpjax._autocast.speed.enumerated import holds, is_negative
from mpjax._base import compat
from mpjax._jaxpr.equation import Eqn
from mpjax._jaxpr.rewriting import with_equations, with_programs

_SAME = traits.RESHAPES | {"broadcast_in_dim", "copy"}


Makers = Mapping[Any, Any]
"""For each variable its equation, or for an input that is a permutation its number of places."""


def mark_permutations(program: Any) -> Any:
    """Returns a closed jaxpr whose gathers by a permutation have `unique_indices`."""
    known: dict[Any, Any] = {}

    def changed(jaxpr: Any, counts: tuple[int | None, ...] = ()) -> Any:
        key = (id(jaxpr), counts)
        if key not in known:
            known[key] = _changed(jaxpr, counts, changed)
        return known[key]

    new = changed(program.jaxpr)
    return program if new is program.jaxpr else program.replace(jaxpr=new)


def _changed(jaxpr: Any, counts: tuple[int | None, ...], changed: Callable[..., Any]) -> Any:
    given = {v: n for v, n in zip(jaxpr.invars, counts, strict=False) if n is not None}
    makers = given | _makers(jaxpr)
    return with_equations(jaxpr, lambda eqn: _equation(eqn, makers, changed))


def _makers(jaxpr: Any) -> dict[Any, Any]:
    return {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}


def _equation(eqn: Eqn, makers: Makers, changed: Callable[..., Any]) -> Any:
    if eqn.primitive.name == "gather":
        is_told = eqn.params["unique_indices"] or not _reads_each_once(eqn, makers)
        return eqn if is_told else eqn.replace(params={**eqn.params, "unique_indices": True})
    if eqn.primitive.name == "jit":
        counts = tuple(_places(v, makers) for v in eqn.invars)
        changed = functools.partial(changed, counts=counts)
    return with_programs(eqn, changed)


def _reads_each_once(eqn: Eqn, makers: Makers) -> bool:
    """Whether a gather takes whole slices along one axis, in the order of a permutation."""
    operand, indices = eqn.invars
    dims = eqn.params["dimension_numbers"]
    if len(dims.start_index_map) != 1 or dims.operand_batching_dims:
        return False
    (axis,) = dims.start_index_map
    sizes, shape = eqn.params["slice_sizes"], operand.aval.shape
    is_whole = all(n == (1 if i == axis else shape[i]) for i, n in enumerate(sizes))
    count = _places(indices, makers)
    # An index out of bounds would be clipped to the last place, or dropped.
    if count is None or not isinstance(shape[axis], int):
        return False
    return is_whole and count <= shape[axis]


def _places(index: Any, makers: Makers) -> int | None:
    """Returns n if an index is a permutation of 0, 1, ... n - 1, else None."""
    eqn = None if compat.is_literal(index) else makers.get(index)
    if eqn is None or isinstance(eqn, int):
        return eqn
    if not jnp.issubdtype(index.aval.dtype, jnp.integer):
        return None
    name, place = eqn.primitive.name, eqn.outvars.index(index)
    if name == "iota":
        (count, *others) = index.aval.shape
        known = isinstance(count, int) and not others  # not symbolic, as `jax.export` may have it
        return count if known and holds(index, count) else None
    if name == "sort":
        return _places(eqn.invars[place], makers) if index.aval.ndim == 1 else None
    if name == "jit":
        inner = compat.closed(eqn.params["jaxpr"]).jaxpr
        if [e.primitive.name for e in inner.eqns] != ["select_n"]:
            return _places(inner.outvars[place], _makers(inner))
        name, outside = "select_n", dict(zip(inner.invars, eqn.invars, strict=True))
        chosen = [outside.get(v) for v in compat.variables(inner.eqns[0])]
    else:
        chosen = eqn.invars
    if name == "select_n":  # JAX's `where(i < 0, i + n, i)`: a permutation is nowhere below 0
        which, x, *_ = chosen
        return _places(x, makers) if is_negative(which, x, makers) else None
    if name == "convert_element_type" or name in _SAME:
        count = _places(eqn.invars[0], makers)
        return count if count and count == index.aval.size and holds(index, count) else None
    return None
