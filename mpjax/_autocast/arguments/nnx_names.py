"""Puts the operations of Flax NNX modules under named scopes, as Flax linen does by itself.

NNX has no hook around a module's methods: its own `nnx.capture` and `nnx.tabulate` change classes
while they run. Here autocast changes its own copies of the modules instead: each gets a subclass of
its class whose methods run under `jax.named_scope`, and its path as an attribute outside the NNX
state, so that both survive `nnx.split`, `nnx.scan` and `nnx.remat` inside the function.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import sys
import types
from collections.abc import Callable, Generator, Iterator
from typing import Any, TypeVar

import jax

T = TypeVar("T")
PATH = "mpjax_path"
_here = contextvars.ContextVar("here", default="")  # the path of the module whose method runs


def name_modules(tree: T) -> T:
    """Returns the tree; its NNX modules name their operations from now on, as linen's do.

    The name of a module is the model's class and its path: 'Net/layers/0'. A module that has a name
    already is left as it is.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return tree
    for model in _models(tree, nnx):
        for path, module in list(nnx.iter_modules(model)):
            cls = type(module)
            if hasattr(module, PATH) or not _can_be_named(cls, module):
                continue
            setattr(module, PATH, "/".join([type(model).__name__, *map(str, path)]))
            object.__setattr__(module, "__class__", _named(cls))
    return tree


def unname_modules(tree: Any) -> None:
    """Undoes `name_modules`: gives the NNX modules in a tree their own classes back."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return
    for model in _models(tree, nnx):
        for _, module in list(nnx.iter_modules(model)):
            if hasattr(type(module), "mpjax_given_class"):
                delattr(module, PATH)
                object.__setattr__(module, "__class__", type(module).mpjax_given_class)


def _models(tree: Any, nnx: Any) -> list[Any]:
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, nnx.Module))
    return [leaf for leaf in leaves if isinstance(leaf, nnx.Module)]


def _can_be_named(cls: type, module: Any) -> bool:
    """Whether a subclass can take the place of a module's class, and has a method to name.

    An object that is not a pytree was not copied: it is the caller's. A class with
    `__init_subclass__` would be told of a subclass that its author does not know.
    """
    is_copy = not jax.tree_util.all_leaves([module])
    watches = any("__init_subclass__" in vars(base) for base in _own_bases(cls))
    return is_copy and not watches and any(True for _ in _methods(cls))


def _own_bases(cls: type) -> list[type]:
    flax = sys.modules["flax.nnx"].Module.__mro__
    return [base for base in cls.__mro__ if base not in flax]


def _methods(cls: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yields the public methods that a class or its bases define, NNX's own base left out."""
    seen: set[str] = set()
    for base in _own_bases(cls):
        for name, value in vars(base).items():
            is_public = not name.startswith("_") or name == "__call__"
            if name not in seen and is_public and inspect.isfunction(value):
                yield name, value
            seen.add(name)


@functools.cache  # JAX keeps every class that it has registered, too
def _named(cls: type) -> type:
    names: dict[str, Any] = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "mpjax_given_class": cls,
    }
    names["__reduce_ex__"] = lambda self, protocol: (_empty, (cls,), _state(self))
    names |= {name: _naming(method) for name, method in _methods(cls)}
    return types.new_class(cls.__name__, (cls,), exec_body=lambda space: space.update(names))


def _empty(cls: type) -> Any:
    return object.__new__(cls)


def _state(module: Any) -> dict[str, Any]:
    """Returns the state for a pickle: a module is unpickled as its own class, without a path."""
    return {name: value for name, value in module.__getstate__().items() if name != PATH}


def _naming(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def naming(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _entered(getattr(self, PATH, "")):
            return method(self, *args, **kwargs)

    return naming


@contextlib.contextmanager
def _entered(path: str) -> Generator[None]:
    """Enters the scope of a path, less the path of the module whose method runs already."""
    here = _here.get()
    if path in ("", here):
        yield
        return
    token = _here.set(path)
    try:
        with jax.named_scope(path.removeprefix(f"{here}/") if here else path):
            yield
    finally:
        _here.reset(token)
