"""Arguments that a function changes in place, as it may change a Flax NNX module.

Tracing runs the function on a copy of such an argument. What it changed there comes back as
results and is written to the caller's object; what cannot be written back is refused, and so is a
change to the variables of a Flax linen module inside its `apply`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

from mpjax._errors import message


def module_type() -> Any:
    """Returns NNX's module class if Flax NNX is loaded; nobody has such a module otherwise."""
    nnx = sys.modules.get("flax.nnx")
    return getattr(nnx, "Module", ()) if nnx is not None else ()


def with_owner(fun: Callable[..., Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns a function and what to pass it first: a module's own call takes the module."""
    kind = module_type()
    if isinstance(fun, kind):

        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            return module(*args, **kwargs)

        call.__name__ = type(fun).__name__
        return call, (fun,)
    owner = getattr(fun, "__self__", None)
    if isinstance(owner, kind):
        return getattr(fun, "__func__", fun), (owner,)
    return fun, ()


def modules(tree: Any) -> list[Any]:
    """Returns the NNX modules in a tree of arguments, in order."""
    kind = module_type()
    if not kind:
        return []
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kind))
    return [leaf for leaf in leaves if isinstance(leaf, kind)]


def changes(before: Sequence[Any], after: Sequence[Any], where: str) -> list[tuple[int, list[Any]]]:
    """Returns the modules that tracing changed: their place, and their leaves after it.

    Args:
      before: leaves of each module as it was handed to the function.
      after: the modules, after the function ran.
      where: the function, for the message.

    Raises:
      ValueError: a module has other variables than before.
    """
    found: list[tuple[int, list[Any]]] = []
    for i, (old, module) in enumerate(zip(before, after, strict=True)):
        new = jax.tree.leaves(module)
        if len(new) != len(old):
            raise ValueError(
                message(
                    where,
                    f"the function adds variables to its {type(module).__name__}.",
                    "Allowed: changes to the variables that a module has, as BatchNorm makes them.",
                    "Split it outside: graphdef, state = nnx.split(model), and return nnx.state().",
                )
            )
        if any(a is not b for a, b in zip(old, new, strict=True)):
            found.append((i, new))
    return found


def write_back(module: Any, leaves: Sequence[Any]) -> None:
    """Writes a module's new leaves to the caller's object."""
    nnx = sys.modules["flax.nnx"]
    new = jax.tree.unflatten(jax.tree.structure(module), leaves)
    nnx.update(module, nnx.state(new))


# -- Flax linen: a module inside `init` or `apply` holds its variables itself ---------------------


def linen_modules(fun: Callable[..., Any], args: Any) -> list[Any]:
    """Returns the linen modules that a function is called on or with, inside `init` or `apply`."""
    linen = sys.modules.get("flax.linen")
    kind = getattr(linen, "Module", ()) if linen is not None else ()
    if not kind:
        return []
    found = [fun, getattr(fun, "__self__", None), *jax.tree.leaves(args)]
    return [m for m in found if isinstance(m, kind) and getattr(m, "scope", None) is not None]


def is_initializing(linen: Sequence[Any]) -> bool:
    """Whether parameters are being made: they do not depend on the dtypes of a computation."""
    return any(module.is_initializing() for module in linen)


def variables(linen: Sequence[Any]) -> list[Any]:
    """Returns the variables of linen modules, as they are now."""
    return [leaf for module in linen for leaf in jax.tree.leaves(module.variables)]


def check_unchanged(before: Sequence[Any], linen: Sequence[Any], where: str) -> None:
    """Raises where tracing changed a linen module: its variables would be values of the trace."""
    after = variables(linen)
    if len(before) == len(after) and all(a is b for a, b in zip(before, after, strict=True)):
        return
    raise ValueError(
        message(
            where,
            f"the function changes variables of its {type(linen[0]).__name__}.",
            "Allowed inside a linen module: functions that read variables.",
            "Type autocast(model.apply, policy)(variables, x, mutable=[...]) around the model.",
        )
    )
