"""The values of a compiled program, elementwise, as its text says: `run(text, *arguments)`.

What a GPU's or a TPU's compiler made of a program cannot run here, and what it deleted shows in
the text alone. The operations are done by NumPy, one after the other, in the dtypes that the text
names: a rounding that is not there is not done. A product that the device contracts with a sum,
which no text shows, is rounded here.
"""

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from _numpy_operations import named

_DTYPES = {
    "f32": np.float32,
    "bf16": ml_dtypes.bfloat16,
    "f16": np.float16,
    "pred": np.bool_,
    "s8": np.int8,
    "s32": np.int32,
    "u32": np.uint32,
    "u8": np.uint8,
    "u16": np.uint16,
}
_LINE = re.compile(r"\s*(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\(([^)]*)\)(.*)")
_HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{")


class _Op(NamedTuple):
    name: str
    type: str
    kind: str
    inside: str  # the parentheses
    rest: str  # attributes

    @property
    def shape(self) -> tuple[int, ...]:
        inside = self.type.partition("[")[2].rstrip("]")
        return tuple(map(int, inside.split(","))) if inside else ()

    def attribute(self, name: str) -> str:
        found = re.search(rf"\b{name}=(\{{[^}}]*\}}|[%\w.\-]+)", self.rest)
        assert found, (name, self.rest)
        return found[1].strip("%{}")


@functools.cache
def _computations(text: str) -> tuple[dict[str, list[_Op]], str]:
    found: dict[str, list[_Op]] = {}
    entry = current = ""
    for line in re.sub(r"\]\{[^}]*\}", "]", text).splitlines():
        head = _HEAD.match(line)
        if head:
            current = head[2]
            entry = current if head[1] else entry
            found[current] = []
        elif current and (made := _LINE.match(line)):
            found[current].append(_Op(*made.groups()[1:]))
    return found, entry


def _reduced(x: Any, op: _Op) -> Any:
    """Returns float32 values rounded to nearest-even, as `reduce-precision` does."""
    dropped = 23 - int(op.attribute("mantissa_bits"))
    if dropped:
        bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
        half = np.uint32((1 << (dropped - 1)) - 1) + ((bits >> dropped) & np.uint32(1))
        x = np.where(np.isfinite(x), ((bits + half) >> dropped << dropped).view(np.float32), x)
    most = 2 ** (int(op.attribute("exponent_bits")) - 1)  # 128: nothing is beyond, or below
    if most == 128:
        return x
    x = np.where(np.abs(x) < 2.0 ** (2 - most), np.copysign(np.float32(0), x), x)
    beyond = (np.abs(x) >= 2.0**most) & ~np.isnan(x)
    return np.where(beyond, np.copysign(np.float32(np.inf), x), x)


def _others(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(axis for axis in range(len(shape)) if axis not in axes)


def _broadcast(x: Any, op: _Op) -> Any:
    axes = tuple(int(axis) for axis in op.attribute("dimensions").split(",") if axis)
    return np.broadcast_to(np.expand_dims(x, _others(op.shape, axes)), op.shape)


def _shifted(x: Any, by: Any, shift: Callable[..., Any]) -> Any:
    return np.where(by < 32, shift(x, np.minimum(by, x.dtype.type(31))), 0).astype(x.dtype)


_COMPARE = named(np, "EQ=equal NE=not_equal LT=less LE=less_equal GT=greater GE=greater_equal")
_NUMPYS = """
add subtract multiply divide maximum minimum negate=negative abs floor round-nearest-even=rint
and=bitwise_and or=bitwise_or xor=bitwise_xor not=invert is-finite=isfinite select=where
"""
_PLAIN: dict[str, Callable[..., Any]] = {
    **named(np, _NUMPYS),
    "copy": lambda x: x,
    "copy-start": lambda x: x,
    "copy-done": lambda x: x,
    "tuple": lambda *xs: xs,
    "shift-left": lambda x, by: _shifted(x, by, np.left_shift),
    "shift-right-logical": lambda x, by: _shifted(x, by, np.right_shift),
    "shift-right-arithmetic": lambda x, by: _shifted(x.view(np.int32), by, np.right_shift),
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
}


def _constant(op: _Op, dtype: Any) -> Any:
    words = op.inside.strip("{}").split(",")
    read = {"pred": lambda x: x.strip() == "true"}.get(
        op.type[:4], float if "f" in op.type else int
    )
    return np.asarray([read(word) for word in words], dtype).reshape(op.shape)


def _typed(op: _Op, x: Any) -> Any:
    """Returns the result of an operation that says its dtype or its shape."""
    dtype = _DTYPES.get(op.type.partition("[")[0])
    if op.kind == "constant":
        return _constant(op, dtype)
    if op.kind == "broadcast":
        return _broadcast(x, op)
    if op.kind == "convert":
        return np.asarray(x).astype(dtype)
    if op.kind == "iota":
        axis = int(op.attribute("iota_dimension"))
        line = np.arange(op.shape[axis], dtype=dtype)
        return np.broadcast_to(np.expand_dims(line, _others(op.shape, (axis,))), op.shape)
    return np.ascontiguousarray(x).view(dtype).reshape(op.shape)  # bitcast


_TYPED = frozenset({"constant", "broadcast", "convert", "iota", "bitcast", "bitcast-convert"})


def run(text: str, *arguments: Any) -> Any:
    """Returns what a program's entry returns: an array, or a tuple of them.

    Args:
      text: of the compiled program; of operations that reorder and sum nothing.
      *arguments: arrays of its parameters' shapes and dtypes.
    """
    computations, entry = _computations(text)

    def value(op: _Op, values: dict[str, Any], given: tuple[Any, ...]) -> Any:
        if op.kind == "parameter":
            return given[int(op.inside)]
        names = () if op.kind in ("constant", "iota") else op.inside.split(",")
        operands = [values[x.split()[-1].strip("%")] for x in names if x.strip()]
        if op.kind in _TYPED:
            return _typed(op, *(operands or [None]))
        if op.kind == "fusion":
            return whole(op.attribute("calls"), tuple(operands))
        if op.kind == "get-tuple-element":
            return operands[0][int(op.attribute("index"))]
        if op.kind == "compare":
            return _COMPARE[op.attribute("direction")](*operands)
        if op.kind == "reduce-precision":
            return _reduced(operands[0], op)
        return _PLAIN[op.kind](*operands)

    def whole(name: str, given: tuple[Any, ...]) -> Any:
        values: dict[str, Any] = {}
        for op in computations[name]:
            values[op.name] = value(op, values, given)
        return values[computations[name][-1].name]

    with np.errstate(all="ignore"):
        return whole(entry, arguments)
