"""Lets `jax.export` and Flax's msgpack write down a class of ours."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any, TypeVar

import jax
from jax import export

Class = TypeVar("Class", bound=type[Any])


def exported(cls: Class) -> Class:
    """Registers a pytree class, under its own name, for `jax.export.Exported.serialize`.

    Its auxiliary data must be what JSON holds unchanged: None or a name. A class that is no named
    tuple is stored by Flax too, which knows named tuples.
    """
    name = f"mpjax.{cls.__name__}"
    with contextlib.suppress(ValueError):  # the name is taken: an editor loaded the module again
        if issubclass(cls, tuple):
            export.register_namedtuple_serialization(cls, serialized_name=name)
        else:
            export.register_pytree_node_serialization(
                cls,
                serialized_name=name,
                serialize_auxdata=lambda data: json.dumps(data).encode(),
                deserialize_auxdata=lambda data: json.loads(bytes(data)),
            )
    return cls if issubclass(cls, tuple) else stored_by_flax(cls)


def stored_by_flax(cls: Class) -> Class:
    """Lets Flax's msgpack store the fields of a pytree class, once `tell_flax` has told it."""
    _UNTOLD.append(cls)
    return cls


def tell_flax() -> None:
    """Registers our classes with Flax, if Flax is there: called by whatever makes an instance."""
    if _UNTOLD and (serialization := sys.modules.get("flax.serialization")) is not None:
        while _UNTOLD:
            _register(_UNTOLD.pop(), serialization)


_UNTOLD: list[type[Any]] = []


def _register(cls: type[Any], serialization: Any) -> None:
    def state_of(x: Any) -> dict[str, Any]:
        return {name: serialization.to_state_dict(field) for name, field in _fields(x).items()}

    def from_state(target: Any, state: dict[str, Any]) -> Any:
        fields = [
            serialization.from_state_dict(field, state[name], name=name)
            for name, field in _fields(target).items()
        ]
        return jax.tree.structure(target, is_leaf=lambda x: x is not target).unflatten(fields)

    serialization.register_serialization_state(cls, state_of, from_state, override=True)


def _fields(x: Any) -> dict[str, Any]:
    pairs, _ = jax.tree.flatten_with_path(x, is_leaf=lambda y: y is not x)
    return {path[0].name: field for path, field in pairs}
