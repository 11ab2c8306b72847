"""Finds the parameters among a function's arguments, and gives each its path.

Example: in `loss(params, batch)` the leaf `params["up"]["kernel"]` has the path "up/kernel".
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax

from mpjax._autocast.arguments import stateful
from mpjax._base.errors import message
from mpjax._base.tree import is_castable, leaf_paths
from mpjax._policies.parts import default_of

Params = tuple[int | str, ...] | None
"""Positions and names of arguments. None stands for the modules among them, or the first if there
are none."""


def checked(params: Any, where: str) -> Params:
    """Returns the arguments that a user named, as a tuple.

    Raises:
      TypeError: `params` is neither a position nor a name, nor several.
    """
    if params is None:
        return None
    named = tuple(params) if isinstance(params, (tuple, list)) else (params,)
    for one in named:
        if not isinstance(one, (int, str)) or isinstance(one, bool):
            allowed = "Allowed: the position or the name of an argument, or several."
            fix = "Type params=0, params='params' or params=(0, 1)."
            raise TypeError(message(f"{where}(params=)", f"got {one!r}.", allowed, fix))
    return named


def paths(fun: Callable[..., Any], args: Any, kwargs: Any, params: Params) -> list[str | None]:
    """Returns, for each leaf of `(args, kwargs)`, its path if it is a parameter, else None.

    Parameters are the arguments that `params` names; by default the Flax NNX and Equinox modules
    anywhere among the arguments, or else the first argument, which `jax.grad` differentiates.

    Raises:
      ValueError: `params` names an argument that the call has not.
    """
    if params is not None:
        chosen = [_named(fun, args, kwargs, one) for one in params]
        return [path for part in _parts(args, kwargs) for path in _of(part, _is_in(part, chosen))]
    parts = _parts(args, kwargs)
    if any(map(_holds_module, parts)):
        return [path for part in parts for path in _of_modules(part)]
    first = 0 if args else None
    return [path for i, part in enumerate(parts) for path in _of(part, i == first)]


def held_in_16_bits(
    fun: Callable[..., Any], args: Any, kwargs: Any, settings: Any
) -> frozenset[int]:
    """Returns the places, among the leaves of `(args, kwargs)`, of parameters in 16 bits.

    A policy such as "O2" keeps them so, and returns float32. They are read in float32, as in its
    train step: products read the same 16 bits, and all else does not run in them, as it would by
    JAX's promotion. NNX modules, to which a function may write, are left as they are.
    """
    default = default_of(settings.policy)
    held = default.param_dtype
    if held.itemsize != 2 or default.output_dtype.itemsize <= 2 or stateful.modules((args, kwargs)):
        return frozenset()
    named = paths(fun, args, kwargs, settings.params)
    leaves = zip(jax.tree.leaves((args, kwargs)), named, strict=True)
    return frozenset(
        i
        for i, (leaf, path) in enumerate(leaves)
        if path is not None and is_castable(leaf) and leaf.dtype == held
    )


def with_owner(fun: Callable[..., Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns a function and its first arguments: `call(module, ...)` for an Equinox module."""
    if not _is_equinox(fun) or not jax.tree.leaves(fun):
        return fun, ()
    return lambda module, *args, **kwargs: module(*args, **kwargs), (fun,)


def _parts(args: Any, kwargs: Any) -> list[Any]:
    """Returns the arguments in the order of the leaves of `(args, kwargs)`."""
    return [*args, *(kwargs[name] for name in sorted(kwargs))]


def _is_in(part: Any, chosen: list[Any]) -> bool:
    return any(part is one for one in chosen)


def _of(part: Any, is_parameter: bool) -> list[str | None]:
    if not is_parameter:
        return [None] * len(jax.tree.leaves(part))
    return list(leaf_paths(part))


def _holds_module(part: Any) -> bool:
    return any(map(_is_module, jax.tree.leaves(part, is_leaf=_is_module)))


def _of_modules(part: Any) -> list[str | None]:
    tops = jax.tree.leaves(part, is_leaf=_is_module)
    return [path for top in tops for path in _of(top, _is_module(top))]


def _is_module(x: Any) -> bool:
    kinds = stateful.object_types()
    return (isinstance(x, kinds) if kinds else False) or _is_equinox(x)


def _is_equinox(x: Any) -> bool:
    """Whether an object is an Equinox module, told by name so that Equinox is not imported."""
    return any(
        kind.__name__ == "Module" and kind.__module__.startswith("equinox.")
        for kind in type(x).__mro__
    )


def _named(fun: Callable[..., Any], args: Any, kwargs: Any, one: int | str) -> Any:
    where = "autocast(params=)"
    if isinstance(one, int):
        if -len(args) <= one < len(args):
            return args[one]
        got = f"there is no argument {one}: the call has {len(args)}."
        raise ValueError(message(where, got, "Type the position of one that it has."))
    if one in kwargs:
        return kwargs[one]
    try:
        bound = inspect.signature(fun).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        bound = {}
    if one in bound:
        return bound[one]
    named = ", ".join(map(repr, [*bound, *kwargs])) or "none by name"
    got = f"there is no argument {one!r}."
    raise ValueError(message(where, got, f"The call has: {named}.", "Type one of them."))
