"""Parses protobuf messages within limits.

The values in a message are counted before it is parsed. The parser blocks all threads and creates
an object for each field, even if the field takes up only two bytes.
"""

from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from serving.api_error import ApiError
from serving.inference.tensors import invalid_inference

_VARINT, _EIGHT_BYTES, _WITH_LENGTH, _FOUR_BYTES = 0, 1, 2, 5
_FIXED_BYTES = {_EIGHT_BYTES: 8, _FOUR_BYTES: 4}
_VARINT_BYTES = 10
_ONE_VALUE = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
# Limit per message. Callers add the limits on inputs and classes where these apply.
MAX_VALUES = 10_000


def parsed(kind: type[Message], raw: bytes, most: int = MAX_VALUES) -> Any:
    """Parse a message of type `kind`, which must not be recursive.

    Raises ApiError: 400 if the message is malformed, 413 if it contains more than `most` values.
    Counts fields, including those of nested messages, and the bytes of packed numbers.
    """
    count = 0
    for more in _sizes(raw, 0, len(raw), kind.DESCRIPTOR):
        count += more
        if count > most:
            message = f"the message contains more than {most} values. Split the request"
            raise ApiError(413, "too_many_values", message)
    try:
        return kind.FromString(raw)
    except DecodeError as error:
        raise _malformed(kind.DESCRIPTOR) from error


def _sizes(raw: bytes, offset: int, end: int, kind: Descriptor) -> Iterator[int]:
    """Yield, for each field, an upper bound on the number of values that it contains."""
    while offset < end:
        yield 1
        tag, offset = _varint(raw, offset, end, kind)
        if not tag >> 3:
            raise _malformed(kind)
        field, wire = kind.fields_by_number.get(tag >> 3), tag & 7
        if wire == _WITH_LENGTH:
            size, offset = _varint(raw, offset, end, kind)
            if size > end - offset:
                raise _malformed(kind)
            if field is not None and field.message_type is not None:
                yield from _sizes(raw, offset, offset + size, field.message_type)
            elif field is not None and field.type not in _ONE_VALUE:
                yield size
            offset += size
        elif wire == _VARINT:
            _, offset = _varint(raw, offset, end, kind)
        elif wire in _FIXED_BYTES:
            offset += _FIXED_BYTES[wire]
        else:
            raise _malformed(kind)


def _varint(raw: bytes, offset: int, end: int, kind: Descriptor) -> tuple[int, int]:
    """Return a varint (7 bits per byte) and the offset after it."""
    value = 0
    for count, byte in enumerate(raw[offset : min(end, offset + _VARINT_BYTES)]):
        value |= (byte & 127) << 7 * count
        if byte < 128:
            return value, offset + count + 1
    raise _malformed(kind)


def _malformed(kind: Descriptor) -> ApiError:
    return invalid_inference(f"the message is not a valid {kind.name}")
