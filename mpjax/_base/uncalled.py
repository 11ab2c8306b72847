"""Answers `with block:`, where `block()` is meant, with what to type."""

from collections.abc import Callable
from typing import Any, NoReturn

from mpjax._base.errors import message


class SaysToCall(type):
    """The type of a class whose instances are context managers: `with` the class is an error.

    The class has an attribute `_call`, which is what to type: 'full_precision()'.
    """

    _call: str

    def _refuse(cls, *_: Any) -> NoReturn:
        name = cls.__name__
        fix = f"Type `with mpjax.{cls._call}:`."
        raise TypeError(message(name, f"`with {name}:` has no parentheses.", fix))

    __enter__: Callable[..., NoReturn] = _refuse
    __exit__: Callable[..., NoReturn] = _refuse
