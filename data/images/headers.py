"""Reads the header of a JPEG or PNG from its first bytes in a few microseconds.

Only plain headers are parsed, in the same way as in libjpeg and libpng. Pillow parses all other
headers, such as those of PNGs with text or profiles (`data/images/decode.py`). Parsing a header
with Pillow takes longer than decoding the pixels of a small PNG, but only about a twentieth of the
time it takes to decode a JPEG.
"""

import re
import struct
import zlib
from functools import lru_cache
from typing import NamedTuple

# SOF0 to SOF15, without DHT, JPG and DAC, which are in the same range.
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_SEQUENTIAL_FRAMES = frozenset({0xC0, 0xC1})
# Matches 0xFF and the code of either a marker that has a length or the end-of-image marker. Zero,
# TEM, the restart markers and fill bytes are excluded.
MARKER = re.compile(rb"\xff+([^\x00\x01\xff\xd0-\xd7])")
START_OF_SCAN, END_OF_IMAGE = b"\xda", b"\xd9"
# DHT, DQT, DRI, APP0 to APP15 and COM are skipped by their length.
_JPEG_SEGMENTS_SKIPPED = frozenset({0xC4, 0xDB, 0xDD, *range(0xE0, 0xF0), 0xFE})
_APP1 = 0xE1
_ORIENTATION, _SHORT = 0x0112, 3  # a tag and a type of EXIF
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
# Gray, RGB, palette, gray with alpha, RGB with alpha.
_PNG_COLOR_TYPES, _WITH_ALPHA = frozenset({0, 2, 3, 4, 6}), frozenset({4, 6})
# The header chunk contains 13 bytes of data, after its length and name and before its checksum.
_PNG_HEADER_END = 33
_PALETTE_BYTES = 3 * 256
# Small chunks that may be present. tRNS is excluded because it adds transparency, which Pillow
# handles.
_PNG_CHUNKS_SKIPPED = frozenset(
    {b"PLTE", b"bKGD", b"cHRM", b"gAMA", b"pHYs", b"sBIT", b"sRGB", b"tIME"}
)


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
    """Return the header of a JPEG up to its first scan, or None if the header is not plain."""
    if data[:2] != b"\xff\xd8":
        return None
    at, upright, frame = 2, True, 0
    height = width = components = 0
    while at + 10 <= len(data) and data[at] == 0xFF:
        marker, length = struct.unpack_from(">BH", data, at + 1)
        if marker == START_OF_SCAN[0]:
            one_scan = frame in _SEQUENTIAL_FRAMES and data[at + 4] == components
            return JpegHeader(height, width, upright, one_scan) if height and width else None
        if marker in _FRAMES and not frame:
            frame = marker
            height, width, components = struct.unpack_from(">HHB", data, at + 5)
        elif marker not in _JPEG_SEGMENTS_SKIPPED or length < 2:
            return None
        elif marker == _APP1:
            upright = upright and _is_upright(data[at + 4 : at + 2 + length])
        at += 2 + length
    return None


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
    """Return whether a JPEG has more than `limit` scans. A decoder processes all pixels for each
    scan.

    A progressive JPEG from a camera has about ten scans. A scan without content takes only about a
    hundred bytes (libjpeg-turbo report LJT-01-004). Data after the end of the image is ignored.
    """
    # This quick count may be too high, because it includes matches in thumbnails and appended
    # video.
    if data.count(b"\xff\xda") <= limit:
        return False
    scans, at = 0, 2
    while (found := MARKER.search(data, at)) is not None and found[1] != END_OF_IMAGE:
        at = found.end()
        scans += found[1] == START_OF_SCAN
        if scans > limit:
            return True
        at += int.from_bytes(data[at : at + 2], "big")
    return False


class PngHeader(NamedTuple):
    """The size of a PNG in pixels, and whether it has an alpha channel."""

    height: int
    width: int
    transparent: bool


def png_header(data: bytes) -> PngHeader | None:
    """Return the header of a PNG with 8 bits per channel, or None if the header is not plain."""
    if data[:8] != _PNG_SIGNATURE:
        return None
    header = _png_header(data[:_PNG_HEADER_END])
    if header is None or not (data[37:41] == b"IDAT" or _pixels_follow(data)):
        return None
    return header


# Most images of a set of small images have the same header.
@lru_cache(maxsize=256)
def _png_header(start: bytes) -> PngHeader | None:
    """Parse the first 33 bytes of a PNG."""
    if start[8:16] != b"\0\0\0\x0dIHDR" or len(start) < _PNG_HEADER_END:
        return None
    width, height, depth, color, *methods, crc = struct.unpack_from(">IIBBBBBI", start, 16)
    if depth != 8 or color not in _PNG_COLOR_TYPES or any(methods) or not (width and height):
        return None
    return (
        PngHeader(height, width, color in _WITH_ALPHA) if zlib.crc32(start[12:29]) == crc else None
    )


def _pixels_follow(data: bytes) -> bool:
    at = _PNG_HEADER_END
    while at + 8 <= len(data):
        length, name = struct.unpack_from(">I4s", data, at)
        if name == b"IDAT":
            return True
        if name not in _PNG_CHUNKS_SKIPPED or length > _PALETTE_BYTES:
            return False
        at += 12 + length
    return False
