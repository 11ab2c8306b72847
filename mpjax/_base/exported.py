"""Lets `jax.export` write down functions that take or return a class of ours."""

from __future__ import annotations

import contextlib
import json
from typing import Any, TypeVar

from jax import export

Class = TypeVar("Class", bound=type[Any])


def exported(cls: Class) -> Class:
    """Registers a pytree class, under its own name, for `jax.export.Exported.serialize`.

    Its auxiliary data must be what JSON holds unchanged: None or a name.
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
    return cls
