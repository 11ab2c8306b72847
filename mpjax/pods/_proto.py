"""Reads protocol buffers, as XLA writes its programs: fields by their number, nothing generated.

The format is described under "Encoding" in the documentation of Protocol Buffers: a field is a
number and a kind, then a varint, eight or four bytes, or a length and so many bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5
_SIGN, _ALL = 1 << 63, 1 << 64


class Message:
    """One message; its fields have numbers here, and names where they are read.

    Args:
      data: the bytes of the message alone.

    Raises:
      ValueError: the bytes are no message.
    """

    __slots__ = ("_fields",)

    def __init__(self, data: bytes) -> None:
        self._fields = _fields(data)

    def has(self, field: int) -> bool:
        """Whether the field is there; one with its default value is not written."""
        return field in self._fields

    def integer(self, field: int) -> int:
        """Returns a whole number, 0 where it is not written."""
        value = self._fields.get(field, (0,))[-1]
        if isinstance(value, bytes):
            raise ValueError(f"protobuf: field {field} is no number.")
        return _signed(value)

    def integers(self, field: int) -> tuple[int, ...]:
        """Returns a repeated number, packed or not."""
        numbers: list[int] = []
        for value in self._fields.get(field, ()):
            numbers += _packed(value) if isinstance(value, bytes) else [_signed(value)]
        return tuple(numbers)

    def data(self, field: int) -> bytes:
        """Returns the bytes of a field, none where it is not written."""
        value = self._fields.get(field, (b"",))[-1]
        if not isinstance(value, bytes):
            raise ValueError(f"protobuf: field {field} holds no bytes.")
        return value

    def text(self, field: int) -> str:
        """Returns a string, '' where it is not written."""
        return self.data(field).decode(errors="replace")

    def texts(self, field: int) -> list[str]:
        """Returns a repeated string."""
        return [data.decode(errors="replace") for data in self._repeated(field)]

    def message(self, field: int) -> Message:
        """Returns a message, an empty one where it is not written."""
        return Message(self.data(field))

    def messages(self, field: int) -> Iterator[Message]:
        """Yields a repeated message."""
        yield from map(Message, self._repeated(field))

    def _repeated(self, field: int) -> list[bytes]:
        return [value for value in self._fields.get(field, ()) if isinstance(value, bytes)]


def _fields(data: bytes) -> dict[int, list[int | bytes]]:
    """Returns the values of each field, in order; messages inside are left as bytes."""
    fields: dict[int, list[int | bytes]] = {}
    position, end = 0, len(data)
    while position < end:
        tag, position = _varint(data, position)
        kind, value = tag & 7, 0
        if kind == _VARINT:
            value, position = _varint(data, position)
        elif kind == _BYTES:
            length, position = _varint(data, position)
            value, position = data[position : position + length], position + length
        elif kind in (_EIGHT, _FOUR):
            size = 8 if kind == _EIGHT else 4
            value, position = data[position : position + size], position + size
        else:
            raise ValueError(f"protobuf: unknown kind {kind} of field {tag >> 3}.")
        if position > end:
            raise ValueError(f"protobuf: field {tag >> 3} is cut short.")
        fields.setdefault(tag >> 3, []).append(value)
    return fields


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Returns the number that starts at a position, and the position after it."""
    try:
        byte = data[position]
        if byte < 128:  # most are
            return byte, position + 1
        value, shift = byte & 127, 7
        while True:
            position += 1
            byte = data[position]
            value |= (byte & 127) << shift
            if byte < 128:
                return value, position + 1
            shift += 7
    except IndexError:
        raise ValueError("protobuf: a number is cut short.") from None


def _packed(data: bytes) -> list[int]:
    numbers: list[int] = []
    position = 0
    while position < len(data):
        value, position = _varint(data, position)
        numbers.append(_signed(value))
    return numbers


def _signed(value: int) -> int:
    return value - _ALL if value >= _SIGN else value
