"""Memoises results of functions of a program for as long as the program lives.

A cache with strong references would keep alive the arrays that a traced function closes over, after
JAX itself has dropped the function. So a cache refers to the program weakly, and a memoised result
must have no reference to it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
_MOST_KEPT = 8192


def by_identity(fun: Callable[[Any], R]) -> Callable[[Any], R]:
    """Returns `fun`, memoised on the identity of its argument, which need not be hashable."""
    known: dict[int, tuple[weakref.ref[Any], R]] = {}

    @functools.wraps(fun)
    def cached(x: Any) -> R:
        key = id(x)
        if key not in known:
            known[key] = weakref.ref(x, lambda _: known.pop(key)), fun(x)
        return known[key][1]

    return cached


def by_kept_identity(fun: Callable[[Any], R]) -> Callable[[Any], R]:
    """Returns `fun`, memoised on the identity of its argument: small, and slow to hash.

    Arguments are kept alive, the last few thousand, so that no other object has the identity of
    one. A name stack of JAX is such an argument, to which no weak reference can be made.
    """
    known: dict[int, tuple[Any, R]] = {}

    @functools.wraps(fun)
    def cached(x: Any) -> R:
        entry = known.get(id(x))
        if entry is None:
            if len(known) >= _MOST_KEPT:
                known.clear()
            entry = known[id(x)] = x, fun(x)
        return entry[1]

    return cached


def by_program(fun: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Returns `fun`, memoised on the identity of its first argument and on the rest by value."""
    memos: weakref.WeakKeyDictionary[Any, dict[Hashable, R]] = weakref.WeakKeyDictionary()

    @functools.wraps(fun)
    def cached(program: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        known = memos.get(program)
        if known is None:
            known = memos[program] = {}
        key = (args, tuple(kwargs.items()))
        if key not in known:
            known[key] = fun(program, *args, **kwargs)
        return known[key]

    return cached
