"""What XLA:TPU's compiler moves ahead of time from a chip's memory (HBM) into the chip (VMEM).

It copies what an operation will read, whole or in slices that it then puts together, while others
run. XLA's cost analysis counts each such slice as its whole source, and the putting together as a
copy, although it is none: in a program of a BERT encoder that is nearly half of all bytes, and the
smaller a model's arrays are the more of them fit into VMEM. Without them, what is left is what the
operations themselves read and write, wherever it lies.
"""

import re

_NAME = r"%([\w.\-]+)"
_COPY = re.compile(rf"^\s*{_NAME} = \((.*)\) copy-start\({_NAME}\)", re.MULTILINE)
_COPIED = re.compile(rf" copy-done\({_NAME}\)")
_SLICE = re.compile(rf"^\s*{_NAME} = .* slice-start\({_NAME}\)", re.MULTILINE)
_SLICED = re.compile(rf"^\s*{_NAME} = .* slice-done\({_NAME}\)", re.MULTILINE)
_JOINED = re.compile(r' custom-call\(([^)]*)\), custom_call_target="ConcatBitcast"')
_ALONE = re.compile(rf" slice-done\({_NAME}\)")
_IN_VMEM = "S(1)"


def without(text: str) -> str:
    """Returns a module in which operations read what they read at the place it was moved from."""
    source = dict(_SLICE.findall(text))
    part_of = {name: source[start] for name, start in _SLICED.findall(text) if start in source}
    gone = set(source) | set(part_of)

    def joined(match: re.Match[str]) -> str:
        found = {part_of.get(name) for name in re.findall(_NAME, match[1])}
        if len(found) != 1 or None in found:
            raise ValueError(f"prefetches: parts of several arrays in {match[0][:120]!r}.")
        return f" bitcast(%{found.pop()})"

    text = _JOINED.sub(joined, text)
    read = set(re.findall(_NAME, "\n".join(_right_of_equals(text))))
    gone -= read  # what is left of these slices is not put together with others
    text = _from(source, _ALONE, text)
    moved = {
        name: array
        for name, shapes, array in _COPY.findall(text)
        if shapes.count(_IN_VMEM) == 1  # else both ends are in the same memory
    }
    gone |= set(moved)
    text = _from(moved, _COPIED, text)
    return "\n".join(line for line in text.splitlines() if _defined(line) not in gone)


def _from(source: dict[str, str], done: re.Pattern[str], text: str) -> str:
    """Returns the text with what ends a move as another name of what was moved."""

    def renamed(match: re.Match[str]) -> str:
        return f" bitcast(%{source[match[1]]})" if match[1] in source else match[0]

    return done.sub(renamed, text)


def _defined(line: str) -> str | None:
    match = re.match(rf"\s*{_NAME} = ", line)
    return match and match[1]


def _right_of_equals(text: str) -> list[str]:
    """Returns what each line but those that begin or end a slice reads."""
    lines = (line.partition(" = ")[2] for line in text.splitlines())
    return [line for line in lines if " slice-done(" not in line and " slice-start(" not in line]
