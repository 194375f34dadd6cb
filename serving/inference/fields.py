"""How much a protobuf message holds, told from its bytes before it is parsed.

The parser makes an object of each field, some of them of two bytes, and holds all threads up
meanwhile.
"""

from collections.abc import Iterator

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from serving.errors import ApiError

_VARINT, _EIGHT_BYTES, _WITH_LENGTH, _FOUR_BYTES = 0, 1, 2, 5
_FIXED_BYTES = {_EIGHT_BYTES: 8, _FOUR_BYTES: 4}
_VARINT_BYTES = 10
_ONE_VALUE = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)


def check_count(raw: bytes, kind: Descriptor, most: int) -> None:
    """ApiError for a message of over `most` values (413), or of what is none of a `kind` (400).

    Fields are counted, those of messages inside included, and the bytes of packed numbers. The
    kind's messages may not hold messages of their own kind.
    """
    count = 0
    for more in _sizes(raw, 0, len(raw), kind):
        count += more
        if count > most:
            message = f"the message holds over {most} values: send fewer at once"
            raise ApiError(413, "too_many_values", message)


def _sizes(raw: bytes, place: int, end: int, kind: Descriptor) -> Iterator[int]:
    """A number for each field: the values that it may hold."""
    while place < end:
        yield 1
        tag, place = _varint(raw, place, end, kind)
        if not tag >> 3:
            raise _no(kind)
        field, wire = kind.fields_by_number.get(tag >> 3), tag & 7
        if wire == _WITH_LENGTH:
            size, place = _varint(raw, place, end, kind)
            if size > end - place:
                raise _no(kind)
            if field is not None and field.message_type is not None:
                yield from _sizes(raw, place, place + size, field.message_type)
            elif field is not None and field.type not in _ONE_VALUE:
                yield size
            place += size
        elif wire == _VARINT:
            _, place = _varint(raw, place, end, kind)
        elif wire in _FIXED_BYTES:
            place += _FIXED_BYTES[wire]
        else:
            raise _no(kind)


def _varint(raw: bytes, place: int, end: int, kind: Descriptor) -> tuple[int, int]:
    """A number of 7 bits a byte, and the place after it."""
    value = 0
    for count, byte in enumerate(raw[place : min(end, place + _VARINT_BYTES)]):
        value |= (byte & 127) << 7 * count
        if byte < 128:
            return value, place + count + 1
    raise _no(kind)


def _no(kind: Descriptor) -> ApiError:
    return ApiError(400, "invalid_inference", f"this is no {kind.name}")
