"""Imports a function from a user's file."""

import ast
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from mpjax._base.errors import message, nearest
from mpjax._base.users_line import users_line

WHERE = "mpjax doctor"
_TRAINS = ("fit", "main", "run", "train")  # names that a script calls at its end


def load(target: str, where: str = WHERE) -> tuple[ModuleType, Callable[..., Any], str]:
    """Returns the module, function and name that 'FILE.py:FUNCTION' means."""
    path, colon, name = target.rpartition(":")
    if not colon or not path or not name:
        fix = "Type FILE.py:FUNCTION, e.g. train.py:loss_fn."
        raise ValueError(message(where, f"{target!r} names no function in a file.", fix))
    module = _import(path, where)
    fun: Any = module
    for part in name.split("."):  # 'model.loss' is an attribute of an attribute
        fun = getattr(fun, part, None)
    if callable(fun) and not isinstance(fun, type):
        return module, fun, name
    known = [n for n, x in vars(module).items() if callable(x) and not isinstance(x, type)]
    known = [n for n in known if not n.startswith("_")]
    close = nearest(name, known) or known
    fix = f"It has {', '.join(close[:8])}." if close else "It has no function."
    got = f"{path} has no function {name!r}."
    if fun is not None:
        kind = "class" if isinstance(fun, type) else type(fun).__name__
        got = f"{name!r} in {path} is a {kind}, and no function."
    raise ValueError(message(where, got, fix))


def load_build(target: str, where: str) -> tuple[ModuleType, Callable[..., Any], str]:
    """Returns what `load` does, of a function that builds a job for a topology."""
    module, fun, name = load(target, where)
    try:
        signature = inspect.signature(fun)
    except (TypeError, ValueError):  # some callables have none
        return module, fun, name
    try:
        signature.bind("topology")
    except TypeError:
        takes = ", ".join(signature.parameters)
        got = f"{name}({takes}) cannot be called with a topology alone: it builds no job."
        allowed = "Allowed: build(topology) -> (step, args)."
        fix = "Give the function that builds the job, and returns step, (state, batch)."
        raise ValueError(message(where, got, allowed, fix)) from None
    return module, fun, name


def _import(path: str, where: str) -> ModuleType:
    if not path.endswith(".py"):
        return _executed(path, where, lambda: importlib.import_module(path))
    file = Path(path).resolve()
    if not file.is_file():
        here = [p.name for p in file.parent.glob("*.py")] if file.parent.is_dir() else []
        close = nearest(file.name, here)
        fix = f"Did you mean {close[0]}?" if close else "Type the path of a Python file."
        raise ValueError(message(where, f"there is no file {path}.", fix))
    _refuse_script(path, file, where)
    sys.path.insert(0, str(file.parent))  # as `python FILE` does, for what stands beside it
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise ValueError(message(where, f"{path} is no Python file."))
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    loader = spec.loader
    _executed(path, where, lambda: loader.exec_module(module))
    return module


def _executed(path: str, where: str, execute: Callable[[], Any]) -> Any:
    """Returns `execute()`, which imports the user's file and may raise anything."""
    try:
        return execute()
    except SystemExit as error:
        got = f"{path} ends the program while it is imported: it is a script."
        fix = "Put what it runs under `if __name__ == '__main__':`."
        raise ValueError(message(where, got, *users_line(error), fix)) from error
    except Exception as error:
        got = f"{path} cannot be imported: {first_line(error)}"
        fix = "Type a path that ends in .py, or a module that Python finds from here."
        is_missing = isinstance(error, ModuleNotFoundError) and not path.endswith(".py")
        raise ValueError(message(where, got, *users_line(error), *[fix] * is_missing)) from error


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _refuse_script(path: str, file: Path, where: str) -> None:
    """Raises if importing a file would train: a loop, or a call of `main()`, not under a guard."""
    try:
        tree = ast.parse(file.read_bytes())
    except SyntaxError:
        return  # importing it says where
    for node in _run_on_import(tree.body):
        if _is_work(node):
            got = f"{path} is a script: importing it would run what it does."
            line = f"At {file.name}:{node.lineno}: {ast.unparse(node).partition(chr(10))[0]}"
            fix = "Put what it runs under `if __name__ == '__main__':`."
            raise ValueError(message(where, got, line, fix))


def _run_on_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields the statements outside of functions, classes and `if __name__ == "__main__":`."""
    for node in body:
        yield node
        if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test):
            yield from _run_on_import(node.body if "!=" in ast.unparse(node.test) else node.orelse)
        elif isinstance(node, ast.If | ast.With | ast.Try):
            inner = [*node.body, *getattr(node, "orelse", []), *getattr(node, "finalbody", [])]
            yield from _run_on_import(inner)


def _is_work(node: ast.stmt) -> bool:
    """Returns whether a statement is a loop that calls functions, or calls `main()` or the like.

    A loop over a literal, which may fill a table, does not count.
    """
    if isinstance(node, ast.For | ast.While):
        is_table = isinstance(node, ast.For) and isinstance(node.iter, ast.Tuple | ast.List)
        return not is_table and any(isinstance(x, ast.Call) for x in _calls_in(node.body))
    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        return False
    name = ast.unparse(node.value.func).rpartition(".")[2]
    return name in _TRAINS


def _calls_in(body: list[ast.stmt]) -> Iterator[ast.AST]:
    return (x for node in body for x in ast.walk(node))
