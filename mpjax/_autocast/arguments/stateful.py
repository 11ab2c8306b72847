"""Arguments that a function changes in place, as it may change a Flax NNX module or optimizer.

Tracing runs the function on a copy of such an argument. Variables that the function changed there
come back as results and are written to the caller's object. A change that cannot be written back
(a new variable, a shared one) is refused, and so is a change to the variables of a Flax linen
module inside its `apply`.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

from mpjax._base.errors import message
from mpjax._base.quantized_array import dequantize, holds_quantized, is_quantized


def object_types() -> tuple[Any, ...]:
    """Returns NNX's classes of modules, optimizers, metrics, random streams, and of variables.

    Empty where Flax NNX is not loaded: nobody has such an object then.
    """
    nnx = sys.modules.get("flax.nnx")
    return () if nnx is None else (nnx.Pytree, nnx.Variable)


def with_owner(fun: Callable[..., Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns a function and its first arguments: `call(module, ...)` for an NNX module."""
    kind = object_types()
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
    """Returns the NNX objects in a tree of arguments, in order: most are modules."""
    kind = object_types()
    if not kind:
        return []
    return [leaf for leaf in _leaves(tree, kind) if isinstance(leaf, kind)]


class WatchedModules:
    """The copies on which tracing runs a function, compared with what they were before."""

    __slots__ = ("_before", "_in_8_bits", "_shared", "_where", "modules")

    def __init__(self, given: Any, copies: Any, where: str) -> None:
        """Records the leaves of `copies` of the arguments `given`; `where` names the function."""
        self.modules = modules(copies)
        self._before = [jax.tree.leaves(module) for module in self.modules]
        self._in_8_bits = [list(map(is_quantized, _stored(module))) for module in modules(given)]
        self._shared = _shared(given, copies)
        self._where = where

    def changes(self) -> list[tuple[int, list[Any]]]:
        """Returns the modules that tracing changed: the place of each, and its new leaves.

        Raises:
          ValueError: a module has other variables than before, or a variable that was changed is
            in the arguments twice, or in 8 bits.
        """
        changed: list[tuple[int, list[Any]]] = []
        for i, (old, module) in enumerate(zip(self._before, self.modules, strict=True)):
            new = jax.tree.leaves(module)
            if len(new) != len(old):
                raise ValueError(
                    message(
                        self._where,
                        f"the function adds variables to its {type(module).__name__}.",
                        "Allowed: changes to the variables that a module has, as BatchNorm makes "
                        "them.",
                        "Split it outside: graphdef, state = nnx.split(model), and return "
                        "nnx.state().",
                    )
                )
            if _differ(old, new):
                self._check_not_in_8_bits(i, new)
                changed.append((i, new))
        self._check_shared()
        return changed

    def _check_not_in_8_bits(self, place: int, new: list[Any]) -> None:
        rows = zip(self._in_8_bits[place], self._before[place], new, strict=True)
        if any(in_8_bits and a is not b for in_8_bits, a, b in rows):
            got = "the function changes a weight that is stored in 8 bits."
            fix = "Pass mpjax.dequantize(model) to change weights, and quantize it afterwards."
            raise ValueError(message(self._where, got, "Allowed: to read it.", fix))

    def _check_shared(self) -> None:
        for variable, old in self._shared:
            if _differ(old, jax.tree.leaves(variable)):
                raise ValueError(
                    message(
                        self._where,
                        f"the function changes a {type(variable).__name__} that its arguments "
                        "hold twice.",
                        "Allowed: to share variables that are only read.",
                        "Split them outside: graphdef, state = nnx.split(everything), and return "
                        "nnx.state().",
                    )
                )


def _differ(old: Sequence[Any], new: Sequence[Any]) -> bool:
    return len(old) != len(new) or any(a is not b for a, b in zip(old, new, strict=True))


def _shared(given: Any, copies: Any) -> list[tuple[Any, list[Any]]]:
    """Returns the copies of variables that occur more than once in a tree, with their leaves."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return []
    variables, twins = (
        [x for x in _leaves(tree, nnx.Variable) if isinstance(x, nnx.Variable)]
        for tree in (given, copies)
    )
    count = collections.Counter(map(id, variables))
    return [
        (twin, jax.tree.leaves(twin))
        for variable, twin in zip(variables, twins, strict=True)
        if count[id(variable)] > 1
    ]


def _leaves(tree: Any, kind: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kind))


def _stored(module: Any) -> list[Any]:
    """Returns a module's leaves; a weight in 8 bits is one."""
    return jax.tree.leaves(module, is_leaf=is_quantized)


def call_in_full(fun: Callable[..., Any], args: Any, kwargs: Any, where: str) -> Any:
    """Returns `fun(*args, **kwargs)`, weights in 8 bits read as the arrays that they represent."""
    bare, owner = with_owner(fun)
    given = ((*owner, *args), kwargs)
    if not holds_quantized(given):
        return fun(*args, **kwargs)
    copies = dequantize(given)
    watched = WatchedModules(given, copies, where)
    result = bare(*copies[0], **copies[1])
    for place, leaves in watched.changes():
        write_back(modules(given)[place], leaves)
    return result


def write_back(module: Any, leaves: Sequence[Any]) -> None:
    """Writes a module's new leaves to the caller's object."""
    nnx = sys.modules["flax.nnx"]
    rows = zip(_stored(module), leaves, strict=True)
    kept = [old if is_quantized(old) else new for old, new in rows]
    new = jax.tree.unflatten(jax.tree.structure(module, is_leaf=is_quantized), kept)
    if isinstance(module, nnx.Variable):
        module.set_value(new.get_value())
    else:
        nnx.update(module, nnx.state(new))


# -- Flax linen: a module inside `init` or `apply` has its variables as attributes -----------------


def linen_modules(fun: Callable[..., Any], args: Any) -> list[Any]:
    """Returns the linen modules that a function is called on or with, inside `init` or `apply`."""
    linen = sys.modules.get("flax.linen")
    kind = getattr(linen, "Module", ()) if linen is not None else ()
    if not kind:
        return []
    objects = [fun, getattr(fun, "__self__", None), *jax.tree.leaves(args)]
    return [m for m in objects if isinstance(m, kind) and getattr(m, "scope", None) is not None]


def is_initializing(linen: Sequence[Any]) -> bool:
    """Whether a linen module is in `init`: its parameters do not depend on autocast's dtypes."""
    return any(module.is_initializing() for module in linen)


def variables(linen: Sequence[Any]) -> list[Any]:
    """Returns the variables of linen modules, as they are now."""
    return [leaf for module in linen for leaf in jax.tree.leaves(module.variables)]


def check_unchanged(before: Sequence[Any], linen: Sequence[Any], where: str) -> None:
    """Raises if tracing changed a linen module: tracers would be left in its variables."""
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
