"""The seams where versions of JAX differ, or where public JAX needs a detour."""

from typing import Any

import jax


def axis_names(axis_name: Any) -> tuple[object, ...]:
    """Returns the axis names of a collective's `axis_name` argument, `()` for None."""
    if axis_name is None:
        return ()
    if isinstance(axis_name, (tuple, list)):
        return tuple(axis_name)
    return (axis_name,)


def varying_axes(x: jax.Array) -> frozenset[object]:
    """Returns the mesh axes over which `x` is typed as varying, inside `shard_map`."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def tracks_varying(name: object) -> bool:
    """Whether `name` is an axis of a `shard_map` that types values as varying (`check_vma`).

    Only an axis index tells: under `check_vma=False`, `pmap` and `vmap` it varies in fact but
    not in its type, and casting a value to varying is an error under `vmap`.
    """
    return name in varying_axes(jax.lax.axis_index(name))


def to_varying(x: jax.Array, axis_name: Any) -> jax.Array:
    """Returns `x`, typed as varying over those of the axes for which types are tracked."""
    have = varying_axes(x)
    missing = tuple(n for n in axis_names(axis_name) if n not in have and tracks_varying(n))
    # `pcast` raises on an axis that varies already, so that only the missing ones are named.
    return jax.lax.pcast(x, missing, to="varying") if missing else x
