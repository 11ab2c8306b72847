"""Lays a step's arguments out on devices that need not be here; names their leaves."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mpjax._base.dtypes import describe
from mpjax._base.errors import message
from mpjax._base.keywords import names_keywords
from mpjax._base.tree import leaf_paths, path_str
from mpjax.pods._gather import broadcast_specs
from mpjax.pods._topology import Topology

T = TypeVar("T")


@names_keywords()
def with_sharding(tree: T, specs: Any, mesh: Mesh) -> T:
    """Returns `tree` as specs of arrays that are laid out on `mesh`, for `check`.

    Args:
      tree: arrays or `jax.ShapeDtypeStruct`s, as `jax.eval_shape` makes them.
      specs: a `PartitionSpec` for each leaf, or for each subtree; `PartitionSpec()` means that
        every device holds the whole array.
      mesh: of the devices that `get_topology` returned, or any other.

    Raises:
      ValueError: an axis of a leaf is not divisible by the mesh axes that split it, or a spec names
        an axis that the mesh has not.

    Dtypes:
      As they are.

    Transforms:
      None: nothing is computed.

    Example:
      >>> mesh = mpjax.pods.get_topology("cpu:1").make_mesh({"fsdp": 1})
      >>> spec = jax.sharding.PartitionSpec("fsdp")
      >>> mpjax.pods.with_sharding({"w": jnp.ones((8, 2))}, spec, mesh)["w"].sharding.spec
      P('fsdp',)
    """
    spec_of = broadcast_specs(specs, tree)
    is_spec = lambda x: isinstance(x, PartitionSpec)  # noqa: E731
    jax.tree.map(lambda spec: _check_spec(spec, mesh), spec_of, is_leaf=is_spec)
    check_divisible(tree, spec_of, mesh, "with_sharding")
    return jax.tree.map(lambda x, spec: _spec(x, NamedSharding(mesh, spec)), tree, spec_of)


def _check_spec(spec: Any, mesh: Mesh) -> None:
    if not isinstance(spec, PartitionSpec):
        got = f"must be jax.sharding.PartitionSpecs; got {type(spec).__name__}."
        raise TypeError(message("with_sharding(specs)", got, "Type PartitionSpec('fsdp')."))
    unknown = [axis for axis in _axes(spec) if axis not in mesh.shape]
    if unknown:
        got = f"{spec} names {unknown[0]!r}, which is no axis of the mesh."
        known = f"It has {', '.join(map(repr, mesh.shape))}."
        raise ValueError(message("with_sharding(specs)", got, known))


def _axes(spec: Iterable[Any]) -> list[str]:
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec]
    return [axis for entry in entries for axis in entry if isinstance(axis, str)]


def _spec(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    if not hasattr(x, "shape"):  # a Python number
        x = jax.eval_shape(lambda: x)
    dtype = jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True)
    weak = bool(getattr(x, "weak_type", False))
    return jax.ShapeDtypeStruct(x.shape, dtype, sharding=sharding, weak_type=weak)


def place(args: tuple[Any, ...], topology: Topology) -> tuple[tuple[Any, ...], Mesh | None]:
    """Returns the arguments as specs on the topology's devices, and their mesh.

    Shardings over a mesh of other devices, or of none, are carried over by axis name; leaves
    without one are replicated.

    Raises:
      ValueError: nothing says how the arguments are laid out, or the sizes do not fit.
    """
    leaves = jax.tree.leaves(args)
    for path, leaf in jax.tree_util.tree_leaves_with_path(args):
        if not hasattr(leaf, "shape") and not isinstance(leaf, int | float | complex):
            got = f"must be arrays, jax.ShapeDtypeStructs or numbers; got {describe(leaf)}."
            fix = "Bind it: check(functools.partial(step, mode=...), (state, batch), ...)."
            raise TypeError(message(f"check(args) at {path_str(path)!r}", got, fix))
    shardings = [getattr(x, "sharding", None) for x in leaves]
    meshes = {s.mesh for s in shardings if isinstance(s, NamedSharding)}
    shapes = {tuple(mesh.shape.items()) for mesh in meshes}
    if len(shapes) > 1:
        got = f"the arguments are on several meshes: {', '.join(map(_mesh_text, shapes))}."
        raise ValueError(message("check(args)", got, "Lay all of them out on one."))
    if not shapes:
        if topology.num_devices > 1:
            raise ValueError(_unsharded(topology))
        sharding = jax.sharding.SingleDeviceSharding(topology.devices[0])
        return jax.tree.map(lambda x: _spec(x, sharding), args), None
    mesh = _own_mesh(meshes, dict(shapes.pop()), topology)
    spec_of = jax.tree.map(_carried, args)
    check_divisible(args, spec_of, mesh, "check(args)")
    placed = jax.tree.map(lambda x, spec: _spec(x, NamedSharding(mesh, spec)), args, spec_of)
    return placed, mesh


def _own_mesh(meshes: set[Any], shape: Mapping[str, int], topology: Topology) -> Mesh:
    """Returns the arguments' mesh if it is of the topology's devices, else one of equal shape."""
    own = set(topology.devices)
    for mesh in meshes:
        if isinstance(mesh, Mesh) and set(mesh.devices.flat) == own:
            return mesh
    return topology.make_mesh(shape)


def _carried(x: Any) -> PartitionSpec:
    sharding = getattr(x, "sharding", None)
    return sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()


def _unsharded(topology: Topology) -> str:
    return message(
        "check(args)",
        f"no argument says how it is laid out on the {topology.num_devices} devices of "
        f"{topology.name!r}.",
        "Give ShapeDtypeStructs or arrays with a NamedSharding, on any mesh of that size:",
        "args = mpjax.pods.with_sharding(args, specs, topology.make_mesh({'fsdp': -1})).",
    )


def check_divisible(tree: Any, specs: Any, mesh: Mesh, where: str) -> None:
    """Raises ValueError where an axis of a leaf does not divide into its shards."""

    def check(path: Any, x: Any, spec: PartitionSpec) -> None:
        for axis, entry in enumerate(spec):
            names = _axes([entry])
            parts = math.prod(mesh.shape[name] for name in names)
            if axis < np.ndim(x) and np.shape(x)[axis] % parts == 0:
                continue
            text = describe(x)
            if axis < np.ndim(x):
                over = " x ".join(f"{name}={mesh.shape[name]}" for name in names)
                got = f"{text} does not divide axis {axis} by {parts} ({over})."
                size = np.shape(x)[axis]
                near = max(parts, round(size / parts) * parts)
                fix = f"Make it {near}, or split it over fewer devices."
            else:
                got = f"{text} has no axis {axis}; its spec is {spec}."
                fix = "Drop the entries that it has too many."
            raise ValueError(message(f"{where} at {path_str(path)!r}", got, fix))

    jax.tree_util.tree_map_with_path(check, tree, specs)


# -- names -----------------------------------------------------------------------------------------


def input_paths(step: Callable[..., Any], args: tuple[Any, ...]) -> list[str]:
    """Returns the path of every leaf of the arguments: 'state/params/w'."""
    names = _argument_names(step, len(args))
    return [
        "/".join(part for part in (name, path) if part)
        for name, arg in zip(names, args, strict=True)
        for path in leaf_paths(arg)
    ]


def _argument_names(step: Callable[..., Any], count: int) -> list[str]:
    try:
        parameters = tuple(inspect.signature(step).parameters.values())
    except (TypeError, ValueError):  # a builtin has none
        parameters = ()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in parameters if p.kind in kinds][:count]
    rest = [p.name for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL]
    if rest and len(names) == count - 1:  # `step(state, *batch)`, called with one
        return names + rest
    return names + [f"argument {i}" for i in range(len(names), count)]


def state_arguments(args: tuple[Any, ...], results: Any) -> set[int]:
    """Returns the numbers of the arguments that a result of equal structure replaces: the state."""
    # A bare array may have the shape of one weight among the results by chance.
    depths = (2 if len(jax.tree.leaves(arg)) > 1 else 1 for arg in args)
    states = {
        i for i, (arg, n) in enumerate(zip(args, depths, strict=True)) if _like(arg, results, n)
    }
    return states or {0}


def _like(arg: Any, results: Any, depth: int) -> bool:
    """Whether `results`, or an element of it, has the structure and shapes of `arg`."""
    structure = jax.tree.structure(arg)
    if jax.tree.structure(results) == structure:
        pairs = zip(jax.tree.leaves(arg), jax.tree.leaves(results), strict=True)
        return structure.num_leaves > 0 and all(a.shape == b.shape for a, b in pairs)
    if depth and isinstance(results, (tuple, list)):
        return any(_like(arg, part, depth - 1) for part in results)
    return False


def _mesh_text(shape: tuple[tuple[str, int], ...]) -> str:
    return " x ".join(f"{name}={size}" for name, size in shape)
