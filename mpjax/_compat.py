"""The seams where versions of JAX differ, or where public JAX needs a detour."""

from typing import Any

import jax
import jax.extend.core


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


# -- seams of `_autocast`: jaxprs, and types that carry shardings or varying axes --------------


def is_literal(atom: Any) -> bool:
    """Whether an equation's operand is a literal rather than a variable."""
    return isinstance(atom, jax.extend.core.Literal)


def closed(jaxpr: Any) -> Any:
    """Returns a closed jaxpr: JAX 0.12 has one class for both, and `remat2` holds an open one."""
    if hasattr(jaxpr, "consts"):
        return jaxpr
    return jax.extend.core.ClosedJaxpr(jaxpr, ())


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """Returns how many constants and carries a `scan` equation has (JAX 0.12 holds trees)."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def is_batched(dim: Any) -> bool:
    """Whether a batching rule's dimension says that the operand is batched."""
    return isinstance(dim, int)


def explicit_sharding(aval: Any) -> Any:
    """Returns the sharding in a type where the user's mesh is explicit, else None."""
    sharding = getattr(aval, "sharding", None)
    spec = getattr(sharding, "spec", None) or ()
    return sharding if any(entry is not None for entry in spec) else None


def like_varying(aval: Any, other: Any) -> Any:
    """Returns `aval` varying over the mesh axes over which `other` does."""
    return aval.update_manual_axis_type(other.manual_axis_type)


def equally_varying(*xs: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the arrays, each typed as varying over every axis over which one of them does."""
    have = [varying_axes(x) for x in xs]
    union = frozenset[object]().union(*have)
    return tuple(
        jax.lax.pcast(x, tuple(union - mine), to="varying") if union - mine else x
        for x, mine in zip(xs, have, strict=True)
    )
