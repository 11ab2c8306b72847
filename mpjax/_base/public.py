"""Sets the module that a class is imported from by users, which pickles name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Class = TypeVar("Class", bound=type)


def public(cls: Class) -> Class:
    """Marks a class that `mpjax` itself exports."""
    return public_in("mpjax")(cls)


def public_in(module: str) -> Callable[[Class], Class]:
    """Returns a decorator for a class that a public module exports."""

    def decorate(cls: Class) -> Class:
        cls.__module__ = module
        return cls

    return decorate
