"""Finds an operation's source line, and the function of JAX that it called, in the traceback."""

from __future__ import annotations

import dataclasses

from mpjax._base import source_lines
from mpjax._jaxpr.equation import Eqn

_CASTS = frozenset(
    {"astype", "_astype", "convert_element_type", "asarray", "array", "bitcast_convert_type"}
)
# The names of Python's operators in JAX's tracebacks.
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


def lines(eqn: Eqn) -> tuple[str, str]:
    """Returns the user's line as 'file.py:12', and that of the library that it called.

    The second is '' where the user's own line called JAX, both where mpjax wrote the operation. A
    library's line stands for the user's where the traceback has none behind it.
    """
    user, library = source_lines.of(eqn.source_info.traceback)
    return user.short if user else "", library.short if library else ""


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a function of JAX, in the user's line or a library's."""

    where: str  # 'file.py:12', '' where it is unknown
    line: str  # with the whole path
    function: str  # of JAX
    is_cast: bool
    library: bool  # whether the line is in an installed package


def call_of(eqn: Eqn) -> Call:
    """Returns the call that made an operation."""
    frames = getattr(eqn.source_info.traceback, "frames", None) or []
    inside: list[str] = []
    for frame in frames:
        if source_lines.is_jax(frame.file_name):
            inside.append(frame.function_name.rpartition(".")[2])
            continue
        place = source_lines.cell(frame.file_name)
        line = source_lines.Line(place, frame.line_num, frame.function_name)
        return Call(
            line.short,
            f"{line.file}:{line.number}",
            _function(inside),
            not _CASTS.isdisjoint(inside),
            frame.file_name.startswith(source_lines.INSTALLED),
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
