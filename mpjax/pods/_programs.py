"""Reads a traced step: host callbacks, products, large arrays, differences of two traces."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Callable, Generator
from typing import Any

import jax
import numpy as np
from jax.extend import source_info_util

from mpjax._base import compat, source_lines
from mpjax._base.dtypes import describe, short_name
from mpjax._jaxpr.equation import Eqn, Jaxpr
from mpjax._jaxpr.op_rules import PRODUCTS

_CALLBACKS = (
    *("debug_callback", "debug_print", "pure_callback", "io_callback", "callback"),
    *("outside_call", "host_callback", "infeed", "outfeed"),
)
PACKAGE = os.path.join(source_lines.OURS, "")
_COLLECTIVES = frozenset({"all_gather", "all_to_all", "ppermute", "reduce_scatter"})

_traced_as = jax.make_user_context(None)


@dataclasses.dataclass(frozen=True)
class Array:
    """An array that a step makes: its type and its source line."""

    text: str  # 'f32[8,128]'
    bytes: int
    source: str


def trace(step: Callable[..., Any], args: tuple[Any, ...], *, process: int, count: int) -> Any:
    """Returns the jaxpr of `step(*args)` as process number `process` of `count` would trace it.

    `jax.process_index` and `jax.process_count` answer so while the step is traced: a program that
    depends on them is one that the processes of a job do not share. JAX's caches are kept apart
    by a context of their own, so that functions inside `jit` are traced again too.
    """
    with _traced_as(f"{process} of {count}"), _as_process(process, count):
        return jax.make_jaxpr(step)(*args)


@contextlib.contextmanager
def _as_process(index: int, count: int) -> Generator[None]:
    before = jax.process_index, jax.process_count
    jax.process_index = lambda *_, **__: index
    jax.process_count = lambda *_, **__: count
    try:
        yield
    finally:
        jax.process_index, jax.process_count = before


def source(eqn: Eqn) -> str:
    """Returns the user's line of an equation, 'train.py:12 (step)'."""
    user = source_lines.of(eqn.source_info.traceback).user
    return shorten(str(user) if user else source_info_util.summarize(eqn.source_info))


def shorten(line: str) -> str:
    """Returns a source line with its path as seen from the working directory, if it is below."""
    return line.removeprefix(f"{os.getcwd()}{os.sep}")


def callbacks(jaxpr: Jaxpr) -> list[tuple[str, str]]:
    """Returns the name and the source line of operations that call the host."""
    operations = ((eqn.primitive.name, source(eqn)) for eqn in compat.equations(jaxpr))
    return list(dict.fromkeys((name, line) for name, line in operations if name in _CALLBACKS))


def compute_dtype(jaxpr: Jaxpr) -> str:
    """Returns the dtype that most of a step's products read: 'bf16'; '' where there are none.

    Weighed by the size of their operands, so that a small float32 product does not decide.
    """
    sizes: collections.Counter[str] = collections.Counter()
    for eqn in compat.equations(jaxpr):
        if eqn.primitive.name in PRODUCTS:
            for operand in eqn.invars[:2]:
                if jax.numpy.issubdtype(operand.aval.dtype, jax.numpy.floating):
                    sizes[short_name(operand.aval.dtype)] += operand.aval.size
    return sizes.most_common(1)[0][0] if sizes else ""


def sent_dtypes(jaxpr: Jaxpr) -> dict[tuple[str, str], set[str]]:
    """Returns the dtypes that JAX's own collectives send, by operation and source line."""
    sent: dict[tuple[str, str], set[str]] = {}
    for eqn in compat.equations(jaxpr):
        if eqn.primitive.name in _COLLECTIVES:
            dtypes = {short_name(v.aval.dtype) for v in eqn.invars}
            sent.setdefault((eqn.primitive.name, line_of(source(eqn))), set()).update(dtypes)
    return sent


def outline(jaxpr: Jaxpr) -> list[str]:
    """Returns every operation with its shape and line, in order."""
    return [
        f"{eqn.primitive.name} of {' '.join(str(v.aval) for v in eqn.outvars)} at {source(eqn)}"
        for eqn in compat.equations(jaxpr)
    ]


def line_of(text: str) -> str:
    """Returns file and line of a source line, which may have a column and a function too."""
    return ":".join(text.partition(" (")[0].split(":")[:2])


def largest_arrays(jaxpr: Jaxpr, count: int = 3) -> list[Array]:
    """Returns the largest arrays that a step makes, each source line once."""
    largest: dict[str, Array] = {}
    for eqn in compat.equations(jaxpr):
        if list(compat.programs(eqn)):
            continue  # its results are made by the equations inside it
        if not source(eqn):
            continue  # JAX's own: the line that led to it has results of the same size
        for out in eqn.outvars:
            array = _array(out.aval, source(eqn))
            if array is not None and array.bytes > getattr(largest.get(array.source), "bytes", 0):
                largest[array.source] = array
    return sorted(largest.values(), key=lambda array: -array.bytes)[:count]


def _array(aval: Any, line: str) -> Array | None:
    if not hasattr(aval, "shape") or not hasattr(aval.dtype, "itemsize"):
        return None
    return Array(
        describe(aval), int(np.prod(aval.shape, dtype=np.int64)) * aval.dtype.itemsize, line
    )


# -- differences -----------------------------------------------------------------------------------


def fingerprint(text: str) -> str:
    """Returns a hash of a lowered program's text; equal on all processes of a sound job."""
    return hashlib.sha256(text.encode()).hexdigest()


def first_difference(a: Any, b: Any) -> str:
    """Returns the first difference between two traces of one step, '' for none."""
    if [str(v.aval) for v in a.jaxpr.invars] != [str(v.aval) for v in b.jaxpr.invars]:
        return "inputs of other shapes or dtypes"
    return _difference(a, b)


def _difference(a: Any, b: Any) -> str:
    """Returns the first difference between two jaxprs, closed or open."""
    consts = zip(getattr(a, "consts", ()), getattr(b, "consts", ()), strict=False)
    differing = next((i for i, (x, y) in enumerate(consts) if not _equal(x, y)), None)
    if differing is not None:
        variable = a.jaxpr.constvars[differing]
        reader = next((eqn for eqn in a.jaxpr.eqns if variable in eqn.invars), None)
        where = f" that {reader.primitive.name} at {source(reader)} reads" if reader else ""
        return f"the values of a constant {_describe(a.consts[differing])}{where}"
    a, b = getattr(a, "jaxpr", a), getattr(b, "jaxpr", b)
    for x, y in zip(a.eqns, b.eqns, strict=False):
        for one, other in zip(_inside(x), _inside(y), strict=False):
            # Inside first, to name the innermost equation that differs.
            if difference := _difference(one, other):
                return difference
        if difference := _equation_difference(x, y):
            return difference
    if len(a.eqns) != len(b.eqns):
        longer = max(a.eqns, b.eqns, key=len)
        extra = longer[min(len(a.eqns), len(b.eqns))]
        return f"{extra.primitive.name} at {source(extra)}, which one of them lacks"
    return ""


def _inside(eqn: Eqn) -> list[Any]:
    """Returns the jaxprs in an equation's parameters, with their constants where they have some."""
    jaxprs: list[Any] = []
    for param in eqn.params.values():
        inside = param if isinstance(param, (tuple, list)) else (param,)
        jaxprs += [x for x in inside if hasattr(x, "eqns") or hasattr(x, "jaxpr")]
    return jaxprs


def _equation_difference(x: Any, y: Any) -> str:
    if _signature(x) != _signature(y):
        other = "" if source(x) == source(y) else f", or {y.primitive.name} at {source(y)}"
        return f"{x.primitive.name} at {source(x)}{other}"
    for one, other in zip(x.invars, y.invars, strict=True):
        if compat.is_literal(one) and not _equal(one.val, other.val):
            return f"{x.primitive.name} at {source(x)}, with a constant of other values"
    return ""


def _signature(eqn: Eqn) -> tuple[Any, ...]:
    """Returns an equation's primitive, types and parameters, without the jaxprs in it."""
    params = {
        key: str(value)
        for key, value in eqn.params.items()
        if isinstance(value, (int, float, str, bool, tuple, np.dtype, type(None)))
        and not _holds_program(value)
    }
    operands = tuple((str(v.aval), compat.is_literal(v)) for v in eqn.invars)
    return eqn.primitive.name, tuple(sorted(params.items())), operands, len(eqn.outvars)


def _holds_program(value: Any) -> bool:
    """Whether a parameter's text has names of variables or addresses of functions in it."""
    text = str(value)
    return " = " in text or "0x" in text or "lambda" in text


def _equal(x: Any, y: Any) -> bool:
    if type(x) is not type(y) or getattr(x, "shape", None) != getattr(y, "shape", None):
        return False
    if jax.dtypes.issubdtype(getattr(x, "dtype", np.float32), jax.dtypes.extended):
        return True  # PRNG keys: their data is a constant of its own
    # Its values are on other hosts, and cannot be compared here.
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return True
    return np.asarray(x).tobytes() == np.asarray(y).tobytes()  # NaN is equal to itself


def _describe(x: Any) -> str:
    return describe(x) if hasattr(x, "dtype") else str(x)
