"""Tensor elements as bytes: gRPC's raw contents, and the binary tensor extension over REST.

Elements are little-endian, in row-major order. A BYTES element is preceded by its length, 4 bytes.
"""

import struct
from typing import Any

import numpy as np

from serving.errors import ApiError
from serving.inference.tensors import Tensor

_LENGTH = struct.Struct("<I")
_INPUT_DATATYPES = ("BYTES", "INT64")
_OUTPUT_DTYPES = {"FP32": "<f4", "BOOL": "?"}


def elements_of(name: str, datatype: str, raw: bytes, most: int) -> list[Any]:
    """The elements of an input. Raises ApiError: 400 for another datatype or truncated data, 413
    for more than `most` elements."""
    if datatype not in _INPUT_DATATYPES:
        kinds = ", ".join(_INPUT_DATATYPES)
        raise _wrong(f"{name[:80]} is {datatype[:20]}: inputs are {kinds}")
    if datatype == "BYTES":
        return _with_lengths(name, raw, most)
    if len(raw) > 8 * most:
        raise _too_many(name, most)
    if len(raw) % 8:
        raise _wrong(f"{name[:80]} has {len(raw)} raw bytes: an INT64 element takes 8")
    return np.frombuffer(raw, "<i8").tolist()


def array_of(tensor: Tensor) -> np.ndarray:
    """The elements of an output in its datatype. A threshold of the request that FP32 cannot
    represent becomes infinite."""
    with np.errstate(over="ignore"):
        return np.asarray(tensor.data).astype(_OUTPUT_DTYPES[tensor.datatype])


def _with_lengths(name: str, raw: bytes, most: int) -> list[bytes]:
    elements: list[bytes] = []
    place = 0
    while place < len(raw):
        if len(elements) == most:
            raise _too_many(name, most)
        start = place + _LENGTH.size
        if start > len(raw):
            raise _wrong(f"{name[:80]}[{len(elements)}] is cut off within its 4 length bytes")
        (length,) = _LENGTH.unpack_from(raw, place)
        place = start + length
        if place > len(raw):
            raise _wrong(
                f"{name[:80]}[{len(elements)}] is cut off: {length} bytes are declared and "
                f"{len(raw) - start} sent"
            )
        elements.append(raw[start:place])
    return elements


def _too_many(name: str, most: int) -> ApiError:
    message = f"{name[:80]} has over {most} elements: send fewer at once"
    return ApiError(413, "too_many_values", message)


def _wrong(message: str) -> ApiError:
    return ApiError(400, "invalid_inference", message)
