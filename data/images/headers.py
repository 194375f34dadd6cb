"""Reads the header of a JPEG or PNG from its first bytes in a few microseconds.

Markers are found as in libjpeg, and the size of a PNG where libpng reads it. Other files are left
to Pillow (`data/images/decode.py`). Parsing a header with Pillow takes longer than decoding the
pixels of a small PNG, but only about a twentieth of the time it takes to decode a JPEG.
"""

import re
import struct
from collections.abc import Iterator
from typing import NamedTuple

# SOF0 to SOF15, without DHT, JPG and DAC, which are in the same range.
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_SEQUENTIAL_FRAMES = frozenset({0xC0, 0xC1})
# Matches 0xFF and the code of either a marker that has a length or the end-of-image marker. Zero,
# TEM, the restart markers and fill bytes are excluded.
_MARKER = re.compile(rb"\xff+([^\x00\x01\xff\xd0-\xd7])")
_START_OF_IMAGE, _END = b"\xff\xd8", b"\xff\xd9"
_END_OF_IMAGE, _START_OF_SCAN, _APP1 = 0xD9, 0xDA, 0xE1
_ORIENTATION, _SHORT = 0x0112, 3  # a tag and a type of EXIF
_PNG_START = b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR"
_PNG_FIRST_CHUNK = struct.Struct(">16sIIBB")  # the start, width, height, bit depth and color type
_PNG_SECOND_CHUNK = 33
_PNG_CHUNK = struct.Struct(">I4s")  # its length and kind
# Chunks with transparency, and compressed texts and profiles, whose size Pillow limits.
_PNG_INSPECTED = frozenset({b"tRNS", b"zTXt", b"iTXt", b"iCCP"})
_WITH_ALPHA = frozenset({4, 6})  # gray with alpha, RGB with alpha


class JpegHeader(NamedTuple):
    """The size of a JPEG in pixels before EXIF rotation.

    upright: whether there is no EXIF rotation. one_scan: whether the first scan of the image is the
    only one, as in baseline JPEGs whose colors are interleaved.
    """

    height: int
    width: int
    upright: bool
    one_scan: bool


def jpeg_header(data: bytes) -> JpegHeader | None:
    """Return the header of a JPEG up to its first scan, or None if there is none."""
    if data[:2] != _START_OF_IMAGE:
        return None
    upright, frame = True, 0
    height = width = components = 0
    for marker, at in _segments(data):
        if marker == _START_OF_SCAN:
            one_scan = frame in _SEQUENTIAL_FRAMES and data[at + 2 : at + 3] == bytes([components])
            return JpegHeader(height, width, upright, one_scan) if height and width else None
        if marker in _FRAMES and not frame and len(data) >= at + 8:
            frame = marker
            height, width, components = struct.unpack_from(">HHB", data, at + 3)
        elif marker == _APP1:
            upright = upright and _is_upright(data[at + 2 : at + _length(data, at)])
    return None


def _segments(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield each marker of a JPEG up to the end of the image, and the position after it."""
    at = 2
    while (found := _MARKER.search(data, at)) is not None:
        marker, at = found[1][0], found.end()
        yield marker, at
        if marker == _END_OF_IMAGE:
            return
        at += _length(data, at)


def _length(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 2])


def _is_upright(segment: bytes) -> bool:
    """Return whether an APP1 segment certainly does not rotate the image."""
    if segment[:6] != b"Exif\0\0":
        return True
    order = {b"II": "<", b"MM": ">"}.get(segment[6:8])
    if order is None:
        return False
    try:
        (at,) = struct.unpack_from(f"{order}I", segment, 10)
        (count,) = struct.unpack_from(f"{order}H", segment, 6 + at)
        for number in range(count):
            tag, kind, _, value = struct.unpack_from(f"{order}HHIH", segment, 8 + at + 12 * number)
            if tag == _ORIENTATION:
                return bool(kind == _SHORT and value == 1)
    except struct.error:
        return False
    return True


def has_more_scans(data: bytes, limit: int) -> bool:
    """Return whether a JPEG has more than `limit` scans, each of which costs all pixels.

    A progressive JPEG from a camera has about ten scans. A scan without content takes only about a
    hundred bytes (libjpeg-turbo report LJT-01-004). Data after the end of the image is ignored.
    """
    # This quick count may be too high, because it includes matches in thumbnails and appended
    # video.
    if data.count(b"\xff\xda") <= limit:
        return False
    return sum(marker == _START_OF_SCAN for marker, _ in _segments(data)) > limit


def is_jpeg_without_end(data: bytes | memoryview) -> bool:
    """Return whether this is a JPEG without an end marker, whose last pixels may be missing.

    libjpeg fills missing data with zeros and reports this only on stderr.
    """
    if data[:3] != b"\xff\xd8\xff" or data[-2:] == _END:
        return False
    return all(marker != _END_OF_IMAGE for marker, _ in _segments(bytes(data)))


def png_header(data: bytes) -> tuple[int, int, bool] | None:
    """Return the height and width of a PNG in pixels and whether it has an alpha channel, or None
    for other data and for a PNG that Pillow must inspect.
    """
    if len(data) < _PNG_FIRST_CHUNK.size:
        return None
    start, width, height, _, color = _PNG_FIRST_CHUNK.unpack_from(data)
    if start != _PNG_START:
        return None
    at, last, chunk = _PNG_SECOND_CHUNK, len(data) - _PNG_CHUNK.size, _PNG_CHUNK.unpack_from
    while at <= last:
        length, kind = chunk(data, at)
        if kind in _PNG_INSPECTED:
            return None
        at += length + 12  # also skip the length, the kind and the checksum
    return height, width, color in _WITH_ALPHA
