"""Bytes that a TPU's program moves between its chip and HBM.

XLA's cost analysis counts what is read and written wherever it lies. On a TPU much of it lies in
the chip's own memory, VMEM, and a copy of a part is counted as a copy of the whole. Here only
what lies in HBM counts, and a part as a part.
"""

import math
import re
from collections.abc import Iterable

_ITEM = {"pred": 1, "bf16": 2, "f16": 2, "f32": 4, "f64": 8}
_ARRAY = re.compile(r"\b(pred|bf16|f\d+|[su]\d+)\[([\d,]*)\](\{[^}]*\})?")
_TUPLE = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
_LINE = re.compile(rf"\s+(?:ROOT )?%([\w.\-]+) = ({_TUPLE}|\S+) ([\w\-]+)\((.*)")
_NAMES_ONLY = frozenset(
    {"parameter", "tuple", "get-tuple-element", "bitcast", "constant", "copy-done", "slice-done"}
    | {"fusion-done", "async-done", "partition-id", "after-all"}
)


def traffic(text: str) -> int | None:
    """Returns the bytes of an optimised module, None where it has a loop.

    What a loop reads of a stacked array is told by its fusions alone; without one, each operand
    is read once, and each result written once.
    """
    entry = text[text.index("\nENTRY") :]
    if " while(" in entry:
        return None
    types: dict[str, str] = {}
    total = 0
    for name, made, operation, rest in map(re.Match.groups, _made(entry)):
        types[name] = made
        if operation in _NAMES_ONLY:
            continue
        if operation in ("copy-start", "slice-start"):
            total += _moved(made)
        else:
            operands = re.findall(r"%([\w.\-]+)", rest.split("), ")[0])
            total += _in_hbm(made) + sum(_in_hbm(types.get(v, "")) for v in operands)
    return total


def _made(entry: str) -> Iterable[re.Match[str]]:
    """Returns the lines that make a value, taken apart."""
    return filter(None, map(_LINE.match, entry.splitlines()))


def _moved(made: str) -> int:
    """Returns what a copy moves: of two arrays the smaller, once for each that lies in HBM."""
    pair = [match.groups() for match in _ARRAY.finditer(made)][:2]
    size = min(_size(kind, shape) for kind, shape, _ in pair)
    return size * sum(not _on_chip(layout) for _, _, layout in pair)


def _in_hbm(made: str) -> int:
    arrays = (match.groups() for match in _ARRAY.finditer(made))
    return sum(_size(kind, shape) for kind, shape, layout in arrays if not _on_chip(layout))


def _on_chip(layout: str | None) -> bool:
    return bool(layout) and "S(" in str(layout)


def _size(kind: str, shape: str) -> int:
    item = _ITEM.get(kind) or max(int(kind[1:]) // 8, 1)
    return item * math.prod(int(n) for n in shape.split(",") if n)
