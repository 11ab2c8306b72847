"""What calls of a GPU's libraries cost, which XLA's own cost analysis counts as nothing.

cuDNN's convolutions and cuBLAS's products are `custom-call`s: as bytes, their operands and
results; as flops, two for every product of a convolution's definition.
"""

import math
import re
from collections.abc import Sequence

_ITEM_SIZES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "f64": 8}
_TYPE = re.compile(rf"\b({'|'.join(_ITEM_SIZES)})\[([\d,]*)\]")
_CALL = re.compile(r' custom-call\((.*?)\), .*custom_call_target="(__cu[^"]*)"')
_LABELS = re.compile(r"dim_labels=\w+_(\w+)->")

Shape = tuple[int, ...]


def cost(lines: Sequence[str]) -> dict[str, float]:
    """Returns the bytes and flops of the library calls in the lines of one computation."""
    types = dict(match.groups() for line in lines if (match := _assignment(line)))
    found = {"bytes accessed": 0.0, "flops": 0.0}
    for line in lines:
        call = _CALL.search(line)
        if call is None:
            continue
        operands = [types[name] for name in re.findall(r"%([\w.\-]+)", call[1])]
        result = line.split(" = ", 1)[1].split(" custom-call(", 1)[0]
        found["bytes accessed"] += sum(map(_bytes, [*operands, result]))
        if "conv" in call[2]:
            found["flops"] += _convolution_flops(call[2], operands, result, line)
    return found


def _assignment(line: str) -> re.Match[str] | None:
    return re.match(r"\s+(?:ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) [\w\-]+\(", line)


def _arrays(text: str) -> list[tuple[str, Shape]]:
    return [
        (d, tuple(map(int, dims.split(",") if dims else ()))) for d, dims in _TYPE.findall(text)
    ]


def _bytes(text: str) -> float:
    return sum(_ITEM_SIZES[dtype] * math.prod(shape) for dtype, shape in _arrays(text))


def _convolution_flops(target: str, operands: Sequence[str], result: str, line: str) -> float:
    """Two for each place of the output, each point of the kernel and each of its inputs."""
    first, second, made = (_arrays(text)[0][1] for text in (*operands[:2], result))
    output, kernel = {
        "__cudnn$convBackwardFilter": (second, made),
        "__cudnn$convBackwardInput": (first, second),
    }.get(target, (made, second))
    labels = _LABELS.search(line)
    if labels is None:
        raise ValueError(f"cost: no dim_labels in {line.strip()[:120]!r}.")
    return 2.0 * math.prod(output) * math.prod(kernel) / kernel[labels[1].index("o")]
