"""Whose line an operation is, and which function of JAX that called: from the traceback."""

from __future__ import annotations

import dataclasses
import functools
import sysconfig
from pathlib import Path
from typing import Any

import jax
import numpy as np

_JAX = tuple(str(Path(m.__file__ or "").parent) for m in (jax, np))
_OURS = str(Path(__file__).parent.parent)
_INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
_CASTS = frozenset(
    {"astype", "_astype", "convert_element_type", "asarray", "array", "bitcast_convert_type"}
)
# What Python's operators call themselves in JAX's tracebacks.
_OPERATORS = {
    "mul": "multiply",
    "add": "add",
    "sub": "subtract",
    "truediv": "divide",
    "pow": "power",
    "matmul": "matmul",
}


_WRAPPERS = frozenset(
    {"op", "meth", "deferring_binary_op", "__call__", "fn", "method", "wrapper", "cache_miss"}
    | {"reraise_with_filtered_traceback", "<lambda>", "bind", "_run_python_pjit"}
    | {"bind_with_trace", "process_primitive", "current", "fun"}
)


def lines(eqn: Any) -> tuple[str, str]:
    """Returns the user's line as 'file.py:12', and that of the library that it called.

    The second is '' where the user's own line called JAX, both where mpjax wrote the operation. A
    library's line stands for the user's where the traceback has none behind it.
    """
    return _lines(eqn.source_info.traceback)


@functools.lru_cache(maxsize=8192)
def _lines(traceback: Any) -> tuple[str, str]:
    library = ""
    for frame in getattr(traceback, "frames", None) or []:
        if frame.file_name.startswith(_JAX) or frame.file_name.startswith("<frozen"):
            continue
        if frame.file_name.startswith(_OURS):
            break  # what called mpjax did not write the operation
        line = f"{Path(frame.file_name).name}:{frame.line_num}"
        if not frame.file_name.startswith(_INSTALLED):
            return line, library
        library = library or line
    return library, library


@dataclasses.dataclass(frozen=True)
class Call:
    """What the user's line, or a library's, called."""

    where: str  # 'file.py:12', '' where it is unknown
    line: str  # with the whole path
    function: str  # of JAX
    is_cast: bool
    library: bool  # whether the line is in an installed package


def call_of(eqn: Any) -> Call:
    """Returns the call that made an operation."""
    frames = getattr(eqn.source_info.traceback, "frames", None) or []
    inside: list[str] = []
    for frame in frames:
        if frame.file_name.startswith(_JAX) or frame.file_name.startswith("<frozen"):
            inside.append(frame.function_name.rpartition(".")[2])
            continue
        name = Path(frame.file_name).name
        line = f"{frame.file_name}:{frame.line_num}"
        return Call(
            f"{name}:{frame.line_num}",
            line,
            _function(inside),
            not _CASTS.isdisjoint(inside),
            frame.file_name.startswith(_INSTALLED),
        )
    return Call("", "", "", False, False)


def _function(inside: list[str]) -> str:
    """Returns the outermost function of JAX, by the name that users know."""
    for name in reversed(inside):
        if name.startswith("_operator_"):
            bare = name.removeprefix("_operator_")
            return _OPERATORS.get(bare, _OPERATORS.get(bare.removeprefix("r"), bare))
        if name not in _WRAPPERS:
            return name
    return ""
