"""Where the arrays of a new state are: with sharded parameters, on all devices of their mesh."""

from __future__ import annotations

from typing import Any

import jax
import jax.core
from jax.sharding import NamedSharding, PartitionSpec

from mpjax._training.state import TrainState


def on_its_mesh(state: TrainState) -> TrainState:
    """Returns a state whose new arrays, such as counters, are on all devices that hold parameters.

    A step returns them there. Left on one device, they would make a second step of another type,
    which is compiled again. Arrays that someone placed stay where they are, and so does a state on
    devices of other processes, which is made under `jax.jit`.
    """
    mesh = _mesh_of(state.params)
    if mesh is None:
        return state
    everywhere = NamedSharding(mesh, PartitionSpec())

    def place(x: Any) -> Any:
        is_free = isinstance(x, jax.Array) and not x.committed
        return jax.device_put(x, everywhere) if is_free else x

    return jax.tree.map(place, state)


def _mesh_of(params: Any) -> Any:
    """Returns the one mesh of several devices on which parameters are; None if there is none."""
    arrays = [x for x in jax.tree.leaves(params) if isinstance(x, jax.Array)]
    if any(isinstance(x, jax.core.Tracer) for x in arrays):
        return None
    placed = [x.sharding for x in arrays if isinstance(x.sharding, NamedSharding)]
    meshes = {s.mesh for s in placed if s.num_devices > 1 and s.is_fully_addressable}
    return meshes.pop() if len(meshes) == 1 else None
